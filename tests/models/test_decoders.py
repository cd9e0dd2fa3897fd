"""Decoders like LLaMA: against transformers, what is fused, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
import tvm

from relax_fusion import Report
from relax_fusion.models import (
    ConfigError,
    Generator,
    UnsupportedFeatureError,
    config_from_dict,
    export,
    load_config,
    load_weights,
)
from relax_fusion.options import make_options
from relax_fusion.pipeline import (
    count_launches,
    phase0_annotate,
    phase1_fuse,
    phase2_lower,
    phase3_tir,
)

from ..support import models
from ..support.slow import quick_if, sampled
from .test_imported import CPU

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN |= {"mscale": 0.7, "mscale_all_dim": 0.9}


def make_generator(path: Path, dtype: str = "float32", length: int = models.SHORT_SEQ_LEN):
    exported = export(load_config(path), dtype=dtype, max_seq_len=length)
    return Generator(models.compile_for_test(exported), exported, load_weights(path, exported))


def config_of(name: str, **changes) -> dict:
    """Return the ``config.json`` of a model."""
    return config_at(models.decoder(name, **changes).config)


def config_at(config: transformers.PreTrainedConfig) -> dict:
    return {key: value for key, value in config.to_dict().items() if key != "transformers_version"}


@pytest.mark.parametrize("name", quick_if("Gemma3Text".__eq__, models.DECODERS))
def test_logits_match_transformers(name: str, tmp_path: Path) -> None:
    model = models.decoder(name)
    models.check_decoder(make_generator(models.save(model, tmp_path)), model)


LATENT = {
    "yarn": {"rope_parameters": YARN | {"rope_theta": 10000.0}},
    "neighbours apart": {"rope_interleave": False, "q_lora_rank": None, "topk_group": 4},
    "the best of groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
}


@pytest.mark.parametrize("how", quick_if("yarn".__eq__, LATENT))
def test_latent_attention_matches_transformers(how: str, tmp_path: Path) -> None:
    name = "DeepseekV2" if "topk_method" in LATENT[how] else "DeepseekV3"
    model = models.decoder(name, **LATENT[how])
    models.check_decoder(make_generator(models.save(model, tmp_path)), model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3Text"])
def test_half_is_accurate(name: str, tmp_path: Path) -> None:
    model = models.decoder(name, num_hidden_layers=1, layer_types=None)
    models.check_half_decoder(make_generator, model, tmp_path, "float16", models.SHORT_SEQ_LEN)


LAUNCHES = {
    "Qwen2": 6,
    "Mistral": 6,
    "Phi3": 6,
    "Qwen3": 6,
    "Gemma2": 6,
    "Gemma3Text": 6,
    "Mixtral": 8,
    "Qwen3Moe": 8,
    "GptOss": 8,
    "Qwen2Moe": 8,
    "DeepseekV3": 12,
    "DeepseekV2": 11,
}
"""Kernels of a layer, that of the cache among them."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    # In half precision, casts stand around norms: of rows, of heads, and those that add 1
    sampled(
        [(name, "float32") for name in models.DECODERS]
        + [(name, "float16") for name in ("Phi3", "Qwen3", "Gemma3Text")],
        4,
    ),
)
def test_every_chain_is_fused(name: str, dtype: str) -> None:
    fields = {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3}
    wide = {"hidden_size": 256, "intermediate_size": 512}
    if name in ("Qwen2", "Qwen3"):
        fields |= {"use_sliding_window": True, "max_window_layers": 0}
    elif name in ("Qwen2Moe", "Qwen3Moe"):
        fields |= {"use_sliding_window": True, "mlp_only_layers": None}
    elif name in ("Mistral", "Phi3", "Mixtral", "DeepseekV2", "DeepseekV3"):
        del fields["layer_types"]
    exported = export(config_from_dict(config_of(name, **fields, **wide)), dtype=dtype)
    report = Report()
    options = make_options(CPU, {"report": report})
    phases = (phase0_annotate, phase1_fuse, phase2_lower, phase3_tir, count_launches)
    passes = [p for phase in phases for p in phase(options) if p.info.name != "FoldConstants"]
    with CPU:
        tvm.transform.Sequential(passes)(exported.mod)
    for coverage in report.coverage:
        assert coverage.per_layer == LAUNCHES[name]
        fused, there = coverage.chains.pop("rope")
        assert there > 0 and fused == (0 if name.startswith("Deepseek") else there)
        assert all(found == there > 0 for found, there in coverage.chains.values())


def test_windows_of_layers() -> None:
    def windows(name: str, **fields) -> tuple:
        config = config_of(name) | {"num_hidden_layers": 4, "layer_types": None} | fields
        return config_from_dict(config).windows

    assert windows("Gemma2") == (5, None, 5, None)
    assert windows("Gemma3Text", sliding_window_pattern=3) == (5, 5, None, 5)
    assert windows("Qwen2", sliding_window=7) == ()
    sliding = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}
    assert windows("Qwen2", **sliding) == (None, None, None, 7)
    assert windows("Mistral", sliding_window=None) == ()
    kinds = ["full_attention"] * 3 + ["sliding_attention"]
    assert windows("Gemma2", layer_types=kinds) == (None, None, None, 5)


def test_defaults_of_short_configs() -> None:
    short = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    short |= {"num_attention_heads": 32}
    for kind in ("Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Gemma3Text", "Mixtral"):
        reference = getattr(transformers, f"{kind}Config")(**short)
        model_type = "gemma3_text" if kind == "Gemma3Text" else kind.lower()
        config = config_from_dict(short | {"model_type": model_type})
        assert config.norm_eps == reference.rms_norm_eps
        assert config.num_kv_heads == reference.num_key_value_heads
        assert config.head_dim == (getattr(reference, "head_dim", None) or 64 // 32)
        assert config.tie_word_embeddings == reference.tie_word_embeddings
        window = None if kind.startswith("Q") else reference.sliding_window
        assert config.window(0) == window


def test_defaults_of_a_short_deepseek() -> None:
    short = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    config = config_from_dict(
        short | {"num_attention_heads": 32, "model_type": "deepseek_v3", "eos_token_id": None}
    )
    reference = transformers.DeepseekV3Config(**short, num_attention_heads=32)
    assert config.latent is not None and config.experts is not None
    sizes = (config.latent.rank, config.latent.query_rank, config.latent.value, config.head_dim)
    wanted = (reference.kv_lora_rank, reference.q_lora_rank, reference.v_head_dim)
    assert sizes == (*wanted, reference.qk_head_dim)
    choice = config.experts.choice
    assert (choice.groups, choice.chosen_groups) == (reference.n_group, reference.topk_group)
    assert choice.factor == reference.routed_scaling_factor and choice.sigmoid
    assert config.experts.count == reference.n_routed_experts and config.experts.renormalised
    assert config.experts.dense_layers == tuple(range(reference.first_k_dense_replace))


def test_rotary_positions_of_both_spellings_of_gemma() -> None:
    new = config_from_dict(config_of("Gemma3Text"))
    old = {k: v for k, v in config_of("Gemma3Text").items() if k != "rope_parameters"}
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
    assert new == config_from_dict(old)
    assert (new.rope_theta, new.local_rope_theta) == (1e6, 1e4)
    scaled = config_from_dict(old | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled.rope_scaling.factor == 8.0


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("Qwen2", {"num_experts": 8}, "qwen2 with num_experts 8 is not supported"),
        ("Mixtral", {"num_experts_per_tok": 9}, "is 9; must be at most the 6 experts"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("Qwen3Moe", {"mlp_only_layers": 5}, "mlp_only_layers is 5; must be a list"),
        ("GptOss", {"sliding_window": 0}, "is 0; must be greater than or equal to 1"),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 70}, "is 70; must be a multiple of"),
        ("DeepseekV3", {"num_key_value_heads": 2}, "num_key_value_heads is 2; must be 4"),
        ("DeepseekV3", {"attention_bias": True}, "attention_bias true is not supported"),
        ("DeepseekV3", {"kv_lora_rank": 0}, "latent attention: kv_lora_rank is 0; must be greater"),
        ("DeepseekV3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; must be even"),
        ("DeepseekV3", {"topk_group": 5}, "topk_group is 5; must be at most the 4 groups"),
        ("DeepseekV3", {"n_group": 3}, "n_group is 3; must divide the 8 experts"),
        ("DeepseekV3", {"scoring_func": "softmax"}, "'softmax' with topk_method 'noaux_tc' is not"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob with scoring_func 'softm"),
        ("DeepseekV3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("DeepseekV3", {"first_k_dense_replace": -1}, "must be an integer from 0 to 10000"),
        ("DeepseekV3", {"n_shared_experts": 1.5}, "n_shared_experts is 1.5; must be a valid"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("Phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75"),
        ("Phi3", {"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "'longrope'"),
        ("Qwen3", {"layer_types": ["linear_attention"]}, "layer_types with 'linear_attention'"),
        ("Gemma2", {"layer_types": ["full_attention"] * 2}, "must be a list of 1 names"),
        ("Gemma2", {"sliding_window": -1}, "-1"),
        ("Gemma2", {"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar is 'x'"),
        ("Gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1; must be greater"),
        ("Qwen2Moe", {"qkv_bias": 3}, "qkv_bias is 3; must be true or false"),
        ("Qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1; must be true or false"),
        ("Qwen3Moe", {"norm_topk_prob": "x"}, "norm_topk_prob is 'x'; must be true or false"),
        ("Qwen3Moe", {"num_local_experts": 0}, "experts: num_local_experts is 0; must be"),
        ("Qwen3Moe", {"moe_intermediate_size": None}, "the field 'moe_intermediate_size' is miss"),
        ("Qwen3Moe", {"mlp_only_layers": [-1]}, r"mlp_only_layers\[0\] is -1; must be greater"),
        ("Mixtral", {"num_local_experts": 1.5}, "num_local_experts is 1.5; must be a valid"),
        ("GptOss", {"swiglu_limit": -1}, "swiglu_limit is -1; must be greater than 0"),
        ("GptOss", {"swiglu_limit": None}, "swiglu_limit is null; must be greater than 0"),
        ("Gemma3Text", {"sliding_window_pattern": "x"}, "sliding_window_pattern is 'x'"),
        (
            "Gemma3Text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention .* is not supported",
        ),
    ],
)
def test_what_is_not_built_is_refused(name: str, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_from_dict(config_of(name) | changes)
    if "not supported" in message:
        assert isinstance(caught.value, UnsupportedFeatureError)
