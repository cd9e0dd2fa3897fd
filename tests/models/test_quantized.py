"""Models whose weights are quantised: what is exported, loaded and computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import tvm

from relax_fusion import QUANTIZATIONS, Report, dequantize, make_target, quantize
from relax_fusion.models import (
    ConfigError,
    Generator,
    NotFiniteWarning,
    WeightsError,
    config_from_dict,
    export,
    load_config,
    load_weights,
    random_weights,
)
from relax_fusion.models.expert_config import Experts

from ..support import models
from ..support.quantised_functions import called, lowered
from ..support.tiny_llama import TINY

GPT2 = config_from_dict(
    {"model_type": "gpt2", "vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 4}
)
BERT = config_from_dict(
    {
        "model_type": "bert",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
)
CONFIGS = {
    "llama": TINY,
    "tied": replace(TINY, tie_word_embeddings=True, attention_bias=True),
    "normed": replace(TINY, qk_norm=True, post_norms=True, norm_offset=True, head_dim=40),
    "experts": replace(TINY, experts=Experts(4, 2, 48)),
    "gpt2": GPT2,
    "bert": BERT,
}


TABLES = ("embed", "wte", "wpe")
"""What is in the names of tables whose rows are looked up."""


def without(mod: tvm.IRModule, names: Sequence[str]) -> tvm.IRModule:
    """Return a module without some of its functions."""
    return tvm.IRModule({g: f for g, f in mod.functions.items() if g.name_hint not in names})


def quantised_in_place(model, name: str):
    """Give a model of torch the weights that its quantised ones are decoded to."""
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim == 3:  # of experts, whose rows stay together
                w = value.reshape(-1, value.shape[-1]).numpy()
                new = dequantize(
                    *quantize(w, format := name.replace("_0", "_1")), format, w.shape[1]
                )
                value.copy_(torch.from_numpy(new.astype("float32")).reshape(value.shape))
            elif value.ndim == 2 and not key.endswith("mlp.gate.weight"):
                turned = any(part in key for part in ("c_attn", "c_proj", "c_fc"))
                w = (value.T if turned else value).numpy()
                is_table = any(table in key for table in TABLES)
                format = name.replace("_0", "_1") if is_table else name
                new = dequantize(*quantize(w, format), format, w.shape[1]).astype("float32")
                value.copy_(torch.from_numpy(new.T if turned else new))
    return model


@pytest.mark.parametrize("name", ["q4f32_1", "q4f16_0"])
@pytest.mark.parametrize("config", CONFIGS)
def test_projections_and_tables_are_stored_quantised(config: str, name: str) -> None:
    dense = {p.name: p for p in export(CONFIGS[config], max_seq_len=16).params}
    stored = export(CONFIGS[config], max_seq_len=16, quantization=name)
    assert (stored.dtype, stored.quantization) == (QUANTIZATIONS[name].dtype, name)
    by_name = {p.name: p for p in stored.params}
    for weight, spec in dense.items():
        if len(spec.shape) == 1 or "rope" in weight or weight.endswith("mlp.gate.weight"):
            assert by_name.pop(weight).shape == spec.shape
            continue
        q = QUANTIZATIONS[name]
        rows = any(table in weight for table in TABLES) or (config == "experts" and "mlp" in weight)
        format = q.table if rows else q.packed
        n, k = spec.shape
        wanted = format.operands("w", format.along((n, n), k))
        parts = [weight.replace("weight", f"q_{part}") for part in ("weight", "scale")]
        got = [by_name.pop(part) for part in parts]
        assert [(p.shape, p.dtype) for p in got] == [(o.shape, o.dtype) for o in wanted]
    assert by_name == {}


@pytest.mark.parametrize("name, target", [("q3f16_0", "llvm"), ("q4f16_1", "h200")])
@pytest.mark.parametrize("config", CONFIGS)
def test_no_launch_is_for_decoding(config: str, name: str, target: str) -> None:
    """Every weight is decoded by the kernel that reads it."""
    report = Report()
    exported = export(CONFIGS[config], max_seq_len=16, quantization=name)
    mod = without(exported.mod, exported.functions[:-1])
    func = lowered(mod, target, phases=3, report=report)[exported.functions[-1]]
    assert "dequantize" not in [c.args[0].name_hint for c in called(func)]
    found = [d for d in report.fused if "matmul" in d.spelling or "silu" in d.spelling]
    routers = config == "experts"  # are not quantised
    assert found and sum("packed" not in d.spelling for d in found) == routers
    # FuseChains tells that it would decode a weight, and leaves that to the others
    heads = {"FuseAttentionChain"}  # of 8 features, which on a GPU no kernel but a scalar one takes
    why = "kernels of the family have no norm of heads behind a projection"
    left = [d for d in report.declined if d.decline is None or d.decline.detail != why]
    assert {d.pattern for d in left} <= heads


@pytest.mark.parametrize(
    "make, name",
    [
        (partial(models.llama, tie_word_embeddings=True), "q4f32_1"),
        (partial(models.llama, tie_word_embeddings=True), "q3f16_0"),
        (models.gpt2, "q8f16_1"),
        (partial(models.decoder, "Mixtral"), "q4f32_1"),
        (partial(models.decoder, "Qwen3Moe"), "q4f16_0"),
    ],
    ids=("llama-q4f32_1", "llama-q3f16_0", "gpt2-q8f16_1", "mixtral-q4f32_1", "qwen-q4f16_0"),
)
@pytest.mark.slow
def test_logits_are_those_of_the_decoded_weights(tmp_path, make, name: str) -> None:
    path = models.save(make(), tmp_path)
    exported = export(load_config(path), max_seq_len=models.SHORT_SEQ_LEN, quantization=name)
    compiled = models.compile_for_test(exported)
    generator = Generator(compiled, exported, load_weights(path, exported))
    exact = quantised_in_place(make(), name)
    models.check_decoder(generator, exact, QUANTIZATIONS[name].dtype)


def saved_arrays(path, name: str) -> tuple[dict, dict]:
    """Return the weights of a checkpoint by name, whole and quantised."""
    found = []
    for quantization in (None, name):
        exported = export(load_config(path), max_seq_len=16, quantization=quantization)
        arrays = load_weights(path, exported)
        found.append({p.name: a for p, a in zip(exported.params, arrays, strict=True)})
    return found[0], found[1]


@pytest.mark.parametrize("make", [models.llama, models.gpt2, models.bert])
def test_weights_are_merged_and_turned_before(tmp_path, make) -> None:
    whole, stored = saved_arrays(models.save(make(), tmp_path), "q4f32_1")
    for name, array in whole.items():
        if name in stored:
            np.testing.assert_array_equal(stored[name], array)
            continue
        parts = (stored[name.replace("weight", f"q_{s}")] for s in ("weight", "scale"))
        for got, wanted in zip(parts, quantize(array, "q4f32_1"), strict=True):
            np.testing.assert_array_equal(got, wanted)


def spoilt(path, value: float):
    """Save a LLaMA with one wrong weight, and return what loads it."""
    model = models.llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    config = load_config(models.save(model, path))
    return partial(load_weights, path, export(config, max_seq_len=16, quantization="q4f16_1"))


def test_weights_beyond_the_range_of_the_scales(tmp_path) -> None:
    with pytest.raises(
        WeightsError, match=r"'model\.layers\.1\.mlp\.gate_up_proj\.weight'.*1e\+30"
    ):
        spoilt(tmp_path, 1e30)()


def test_weights_that_are_no_numbers_warn(tmp_path) -> None:
    with pytest.warns(NotFiniteWarning, match=r"in 1 weight.*gate_up_proj\.q_scale"):
        spoilt(tmp_path, float("nan"))()


def test_random_weights_are_quantised_ones() -> None:
    whole, stored = (export(TINY, quantization=q) for q in (None, "q4f32_1"))
    dense = dict(zip((p.name for p in whole.params), random_weights(whole, 3), strict=True))
    given = dict(zip((p.name for p in stored.params), random_weights(stored, 3), strict=True))
    for param in stored.params:
        assert given[param.name].shape == param.shape and given[param.name].dtype == param.dtype
    words, _ = quantize(dense["lm_head.weight"], "q4f32_1")
    np.testing.assert_array_equal(given["lm_head.q_weight"], words)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"quantization": "q4"}, "quantization is 'q4'; must be one of q3f16_0"),
        ({"quantization": 4}, "quantization is 4"),
        ({"quantization": "q4f16_1", "dtype": "float32"}, "models in q4f16_1 are of float16"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        export(TINY, **arguments)


@pytest.mark.parametrize("batch", [1, *(pytest.param(b, marks=pytest.mark.slow) for b in (3, "b"))])
@pytest.mark.parametrize("config", ["normed", "gpt2"])
def test_fused_kernels_are_those_that_were_chosen(config: str, batch: int | str) -> None:
    wide = replace(CONFIGS[config], hidden_size=512, num_heads=8, intermediate_size=768)
    exported = export(wide, max_seq_len=16, batch=batch, quantization="q4f16_1")
    report = Report()
    lowered(without(exported.mod, ["prefill"]), make_target("h200"), 5, report=report)
    packed = [s for s in report.schedules if s.plans and s.plans.entries[0][1].family]
    assert len(packed) >= 4
    assert [(s.rule, s.refusals) for s in packed if s.refusals] == []
