"""What the ``config.json`` of LLaMA and of decoders like it say, as fields of one description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigError, UnsupportedFeatureError
from ..validation import read, shown
from .decoder_parts import Data, Fields, flag, layers_of, mapping, root, rotary, windows
from .deepseek import FIELDS as DEEPSEEK
from .deepseek import V2, V3, deepseek
from .expert_config import Experts
from .rope import RopeScaling

_COMMON = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "hidden_act"),
    *("tie_word_embeddings", "eos_token_id", "architectures", "model_type", "quantization_config"),
)
"""Fields that are read for every decoder."""

_IRRELEVANT = (
    *("auto_map", "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range", "id2label"),
    *("label2id", "num_labels", "pretraining_tp", "attention_dropout", "attn_implementation"),
    *("resid_pdrop", "embd_pdrop", "hidden_dropout", "return_dict", "tokenizer_class", "prefix"),
    *("finetuning_task", "problem_type", "chunk_size_feed_forward", "cache_implementation"),
    *("max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty"),
    *("original_max_position_embeddings", "task_specific_params", "unsloth_fixed"),
    *("unsloth_version", "rope_interleaved", "max_sequence_length", "neftune_noise_alpha"),
)
"""Fields that change nothing of what a model computes."""


def decoder_fields(data: Data) -> Fields:
    """Read the fields of a decoder that are no field of LLaMA's, or are spelt otherwise.

    Returns fields of `LlamaConfig`, by the names that it reads.

    `data`: the content of a ``config.json``.
    Raises `UnsupportedFeatureError` if `data` has a field that changes what the model computes, and
    that is not built; it names the field and its value.
    """
    name = _name(data)
    family = _BY_NAME[name]
    known = (*_COMMON, *_IRRELEVANT, *family.fields)
    for key, value in data.items():
        own = isinstance(key, str) and not key.startswith("_") and key not in known
        if own and value not in (None, False, [], {}):
            raise UnsupportedFeatureError(
                f"a config of {name} with {key} {shown(value)} is not supported"
            )
    defaults = {key: value for key, value in family.defaults.items() if key not in data}
    return {**defaults, **family.read({**defaults, **data})}


def _name(data: Data) -> str:
    return (data.get("architectures") or [data.get("model_type")])[0]


def _llama(data: Data) -> Fields:
    return {"output_bias": data.get("attention_bias"), **rotary(data)}


def _qwen2(data: Data) -> Fields:
    return {"attention_bias": True, "output_bias": False, **windows(data), **rotary(data)}


def _qwen3(data: Data) -> Fields:
    return {"qk_norm": True, **windows(data), **_llama(data)}


def _mistral(data: Data) -> Fields:
    """Read one window for all layers."""
    window = data.get("sliding_window")
    windows = (window,) * layers_of(data) if window is not None else ()
    return {"windows": windows, **rotary(data)}


_EXPERTS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "output_router_logits"),
    *("router_aux_loss_coef", "router_jitter_noise"),
)


_OF_EXPERTS = {
    "dense_layers": "mlp_only_layers",
    "limit": "swiglu_limit",
    "sharpness": "swiglu_alpha",
}
"""What a file calls further fields of `Experts`."""


def _experts(data: Data, features: str, count: int, **others: Any) -> Experts:
    """Read how many experts there are, in the spellings of transformers 4 and 5, and how wide.

    `features`: the name of their width.
    `count`: of experts, where a file does not tell.
    `others`: further fields of `Experts`.
    """
    number = "num_local_experts" if "num_local_experts" in data else "num_experts"
    keys = {"count": number, "chosen": "num_experts_per_tok", "features": features}
    fields = {"count": count, **{field: data[key] for field, key in keys.items() if key in data}}
    return read(Experts, {**fields, **others}, ConfigError, "experts", keys=keys | _OF_EXPERTS)


def _mixtral(data: Data) -> Fields:
    experts = _experts(data, "intermediate_size", 8, names="mixtral")
    return {"experts": experts, **_mistral(data)}


def _qwen3_moe(data: Data) -> Fields:
    """Read which layers have experts, and how many."""
    every = data.get("decoder_sparse_step")
    stored = data.get("mlp_only_layers") or ()
    if not isinstance(stored, (list, tuple)):
        raise ConfigError(f"mlp_only_layers is {shown(stored)}; must be a list of integers")
    dense = list(stored)
    if type(every) is not int or every < 1:
        raise ConfigError(f"decoder_sparse_step is {shown(every)}; must be an integer from 1 on")
    dense += [n for n in range(layers_of(data)) if (n + 1) % every and n not in dense]
    how = {"renormalised": flag(data, "norm_topk_prob", False), "dense_layers": tuple(dense)}
    return {"experts": _experts(data, "moe_intermediate_size", 128, **how), **_qwen3(data)}


def _gpt_oss(data: Data) -> Fields:
    if data["swiglu_limit"] is None:  # which would be a gate without bounds
        raise ConfigError("swiglu_limit is null; must be greater than 0")
    gate = {"limit": data.get("swiglu_limit"), "sharpness": data.get("swiglu_alpha")}
    how = {"names": "gpt_oss", "biases": True, **gate}
    window = 128 if data["sliding_window"] is None else data["sliding_window"]
    scaling = mapping(data, "rope_scaling") or _GPT_OSS_ROPE
    return {
        "experts": _experts(data, "intermediate_size", 128, **how),
        "sinks": True,
        **windows({**data, "sliding_window": window}, every=2),
        **_llama({**data, "rope_scaling": scaling}),
    }


def stores_mxfp4(data: Data) -> bool:
    """Tell whether a checkpoint has the weights of its experts in MXFP4, as gpt-oss's has."""
    stored = data.get("quantization_config")
    is_mxfp4 = isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4"
    return is_mxfp4 and _BY_NAME.get(_name(data)) is _BY_NAME["gpt_oss"]


def _qwen2_moe(data: Data) -> Fields:
    """Read the network that all tokens go to, beside what Qwen3 has."""
    found = _qwen3_moe(data)
    wide, each = (data.get(f"{n}_intermediate_size") for n in ("shared_expert", "moe"))
    sizes = [size for size in (wide, each) if isinstance(size, int) and size > 0]
    if len(sizes) < 2 or sizes[0] % sizes[1]:
        raise ConfigError(
            f"shared_expert_intermediate_size is {shown(wide)}; must be a multiple of "
            f"moe_intermediate_size {shown(each)}"
        )
    bias = flag(data, "qkv_bias", True)
    biases = {"attention_bias": bias, "output_bias": False, "qk_norm": False}
    return {**found, **biases, "experts": replace(found["experts"], shared=sizes[0] // sizes[1])}


def _phi3(data: Data) -> Fields:
    return {"merged_checkpoint": True, **_mistral(data)}


def _gemma(data: Data) -> Fields:
    """Read what Gemma 2 and 3 share."""
    hidden, scale, tied = (
        data.get(key) for key in ("hidden_size", "query_pre_attn_scalar", "tie_word_embeddings")
    )
    act = data.get("hidden_activation") or data.get("hidden_act") or "gelu_pytorch_tanh"
    return {
        "norm_offset": True,
        "post_norms": True,
        "hidden_act": act,
        "tie_word_embeddings": True if tied is None else tied,
        "query_scale": root(scale, -0.5),
        "embedding_scale": root(hidden, 0.5),
        "attention_softcap": data.get("attn_logit_softcapping"),
        "logit_softcap": data.get("final_logit_softcapping"),
        "output_bias": data.get("attention_bias"),
    }


def _gemma2(data: Data) -> Fields:
    return {**_gemma(data), **windows(data, every=2), **rotary(data)}


def _gemma3(data: Data) -> Fields:
    every = data.get("sliding_window_pattern") or data.get("_sliding_window_pattern") or 6
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"sliding_window_pattern is {shown(every)}; must be an integer from 1 on")
    rope = mapping(data, "rope_parameters")
    local = mapping(rope, "sliding_attention")
    if RopeScaling.from_dict(local).kind != "default":
        raise UnsupportedFeatureError(
            f"rope_parameters with sliding_attention {shown(local)} is not supported"
        )
    wide = mapping(rope, "full_attention")
    return {
        **_gemma(data),
        **windows(data, every),
        **rotary({**data, "rope_parameters": wide} if wide else data),
        "qk_norm": True,
        "local_rope_theta": local.get("rope_theta") or data.get("rope_local_base_freq"),
    }


@dataclass(frozen=True)
class _Family:
    """An architecture: the fields that it adds, what reads them, and what is left out of a file."""

    architecture: str
    model_type: str
    fields: tuple[str, ...]
    read: Callable[[Data], Fields]
    defaults: Data = field(default_factory=dict)


_SLIDING = ("sliding_window", "layer_types")
_QWEN = (*_SLIDING, "use_sliding_window", "max_window_layers")
_SPARSE = ("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
_GEMMA = (
    *("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "attention_bias"),
    *("final_logit_softcapping", *_SLIDING),
)
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
}
_GPT_OSS = (
    *("attention_bias", "swiglu_limit", "swiglu_alpha", "experts_per_token"),
    "initial_context_length",
)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_FAMILIES = (
    _Family("LlamaForCausalLM", "llama", ("attention_bias", "mlp_bias"), _llama),
    _Family(
        *("MistralForCausalLM", "mistral", ("sliding_window",), _mistral),
        {"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    _Family("Qwen2ForCausalLM", "qwen2", _QWEN, _qwen2, {"num_key_value_heads": 32}),
    _Family(
        *("Qwen3ForCausalLM", "qwen3", (*_QWEN, "attention_bias"), _qwen3),
        {"num_key_value_heads": 32, "head_dim": 128},
    ),
    _Family(
        *("MixtralForCausalLM", "mixtral"),
        ("sliding_window", *_EXPERTS),
        _mixtral,
        {
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
    ),
    _Family(
        *("Qwen3MoeForCausalLM", "qwen3_moe"),
        (*_QWEN, *_EXPERTS, "attention_bias", *_SPARSE),
        _qwen3_moe,
        {
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
    ),
    _Family(
        *("Qwen2MoeForCausalLM", "qwen2_moe"),
        (*_QWEN, *_EXPERTS, *_SPARSE, "shared_expert_intermediate_size", "qkv_bias"),
        _qwen2_moe,
        {
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
    ),
    _Family(
        *("GptOssForCausalLM", "gpt_oss"),
        (*_SLIDING, *_EXPERTS, *_GPT_OSS),
        _gpt_oss,
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "max_position_embeddings": 131072,
        },
    ),
    _Family("DeepseekV2ForCausalLM", "deepseek_v2", DEEPSEEK, deepseek, V2),
    _Family("DeepseekV3ForCausalLM", "deepseek_v3", DEEPSEEK, deepseek, V3),
    _Family("Phi3ForCausalLM", "phi3", _SLIDING, _phi3, {"rms_norm_eps": 1e-5}),
    _Family(
        *("Gemma2ForCausalLM", "gemma2", _GEMMA, _gemma2),
        {**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    _Family(
        *("Gemma3ForCausalLM", "gemma3_text"),
        *((*_GEMMA, "rope_local_base_freq", "sliding_window_pattern"), _gemma3),
        {**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
)
ARCHITECTURES = tuple(family.architecture for family in _FAMILIES)
"""Values of ``architectures`` that `LlamaConfig` describes."""
MODEL_TYPES = tuple(family.model_type for family in _FAMILIES)
"""Values of ``model_type`` that `LlamaConfig` describes."""
SPELLINGS = {
    "windows": "sliding_window",
    "local_rope_theta": "rope_local_base_freq",
    "query_scale": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "output_bias": "attention_bias",
}
"""What a file calls fields of `LlamaConfig` that `decoder_fields` makes."""
_BY_NAME = {name: f for f in _FAMILIES for name in (f.architecture, f.model_type)}
