"""MLC-LLM's layers of experts, as operators: their numbers, and what is left as it is.

Numbers need the sources of MLC-LLM at commit 79d603f: RELAX_FUSION_MLC=PATH of a checkout.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from relax_fusion import Report
from relax_fusion.mlc.experts import ReadExperts
from relax_fusion.options import make_options

from ..support import mlc_models
from ..support.quick import machine, quick_host, quickly
from .test_generation import CHECKOUT, report  # noqa: F401

HIDDEN, WIDE, EXPERTS, CHOSEN = 64, 96, 6, 3
ERRORS = {"q0f32": 2e-6, "q4f32_1": 2e-6, "q0f16": 3e-3, "q4f16_1": 3e-3}
"""Largest differences that are allowed, of the largest number."""

checkout = pytest.mark.skipif(
    not CHECKOUT, reason="set RELAX_FUSION_MLC to a checkout of MLC-LLM at 79d603f"
)


def layer(kind: str, quantization: str, tokens: int | str) -> tuple[tvm.IRModule, list[Any]]:
    """Return a layer of experts as MLC-LLM exports it, and its parameters."""
    from mlc_llm.loader import QuantizeMapping
    from mlc_llm.model import MODELS
    from mlc_llm.model.mixtral.mixtral_model import MixtralMoE
    from mlc_llm.model.qwen3_moe.qwen3_moe_model import Qwen3MoeSparseMoeBlock
    from mlc_llm.quantization import QUANTIZATION

    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDE, "moe_intermediate_size": WIDE}
    sizes |= {"num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 64, "head_dim": 16, "max_position_embeddings": 64}
    sizes |= {"context_window_size": 64, "prefill_chunk_size": 64}
    fields = {**sizes, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "position_embedding_base": 1e4}
    fields |= {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
    fields |= {"norm_topk_prob": kind != "unnormalised"}
    name, cls = (
        ("mixtral", MixtralMoE) if kind == "mixtral" else ("qwen3_moe", Qwen3MoeSparseMoeBlock)
    )
    known = MODELS[name].config.from_dict(dict(fields))
    how, model = QUANTIZATION[quantization], cls(known)
    model.dtype = how.model_dtype
    model.to(how.model_dtype)
    if not quantization.startswith("q0"):
        model = how.quantize_model(model, QuantizeMapping({}, {}), "")
    spec = {"forward": {"x": nn.spec.Tensor([1, tokens, HIDDEN], how.model_dtype)}}
    mod, params = model.export_tvm(spec=spec)
    rng = np.random.default_rng(3)
    arrays = []
    for param_name, param in params:
        shape, dtype = tuple(map(int, param.shape)), str(param.dtype)
        value = (
            rng.standard_normal(shape) * shape[-1] ** -0.5 * (8 if "gate.w" in param_name else 2)
        )
        if param_name.endswith("scale"):
            value = np.abs(value) / 8
        if dtype == "uint32":
            value = rng.integers(0, 2**32, shape, dtype)
        arrays.append((param_name, value.astype(dtype)))
    return mod, arrays


def exact(params: list[Any], x: np.ndarray, normalised: bool) -> np.ndarray:
    """Return what a layer makes of rows, in float64."""
    given = dict(params)

    def whole(name: str) -> np.ndarray:
        plain = next((v for n, v in params if n.endswith(f"{name}.weight")), None)
        if plain is not None:
            return plain.astype("float64")
        words, scales = (
            next(v for n, v in params if n.endswith(f"{name}.q_{k}")) for k in ("weight", "scale")
        )
        numbers = (words[..., None] >> (np.arange(8, dtype="uint32") * 4) & 15).astype(
            "float64"
        ) - 7
        return numbers.reshape(*words.shape[:2], -1) * np.repeat(scales.astype("float64"), 32, -1)

    names = [("e1_e3", "e2"), ("moe_gate_up_proj", "moe_down_proj")]
    first, last = next(pair for pair in names if any(pair[0] in name for name in given))
    wide, back, gate = whole(first), whole(last), whole("gate")
    out = np.zeros(x.shape)
    for row, vector in enumerate(x.astype("float64")):
        logits = (gate @ vector).astype(x.dtype).astype("float64")
        best = np.argsort(-logits, kind="stable")[:CHOSEN]
        shares = np.exp(logits - logits.max())
        shares = shares / (shares[best] if normalised else shares).sum()
        for expert in best:
            up, other = np.split(wide[expert] @ vector, 2)
            out[row] += shares[expert] * (back[expert] @ (up / (1 + np.exp(-up)) * other))
    return out


@checkout
@pytest.mark.usefixtures("report")
@pytest.mark.parametrize("quantization", ERRORS)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "unnormalised"])
@pytest.mark.parametrize("tokens", ["n", 1])
def test_a_layer_is_three_kernels_of_ours(kind: str, quantization: str, tokens: int | str) -> None:
    mod, params = layer(kind, quantization, tokens)
    dtype = "float16" if "f16" in quantization else "float32"
    found = Report()
    options = make_options(quick_host(), {"report": found, "variable_bounds": {"n": 32}})
    pipeline = relax.get_pipeline(
        "relax_fusion", target=quick_host(), report=found, variable_bounds={"n": 32}
    )
    run = machine(quickly(ReadExperts(options)(mod), pipeline))
    assert [d.pattern for d in found.fused if d.pattern != "FuseMatmulEpilogue"] == [
        *("RouteExperts", "FuseExperts", "FuseExperts")
    ], found.text()
    for count in (1,) if tokens == 1 else (1, 2, 19):
        x = np.random.default_rng(count).standard_normal((1, count, HIDDEN)).astype(dtype)
        wanted = exact(params, x[0], kind != "unnormalised")
        got = run["forward"](*map(tvm.runtime.tensor, (x, *(v for _, v in params)))).numpy()[0]
        assert np.abs(got - wanted).max() <= ERRORS[quantization] * np.abs(wanted).max()


def calls(mod: tvm.IRModule) -> set[str]:
    """Return which functions a module calls that multiply groups of rows, and its choices."""
    return {*re.findall(r"cls\.(\w*group_gemm)|(R\.topk)", mod.script(show_meta=False))}


def read(text: str, target: str = "llvm", **options: Any) -> set[str]:
    """Return what is left of experts in a function of a Mixtral."""
    return calls(ReadExperts(make_options(target, options))(mlc_models.parse(text)))


CHANGES = {
    "rows are moved": (r"R\.nn\.silu\((\w+)\)", r"R.flip(\1, axis=0)"),
    "rows are added up": (r"R\.nn\.silu\((\w+)\)", r"R.cumsum(\1, axis=0)"),
    "sums are of other rows": (r"exclusive=False", "exclusive=True"),
    "no whole number is taken off": (r"- T\.float16\(7\.0\)", "- T.float16(7.5)"),
}


@pytest.mark.parametrize("why", CHANGES)
def test_what_is_something_else_is_left(why: str) -> None:
    text = mlc_models.texts()["Mixtral-8x7B-v0.1-q4f16_1"]["batch_decode"]
    assert read(text) == {("", "R.topk")}
    changed = re.sub(*CHANGES[why], text)
    assert changed != text
    assert read(changed) == {("dequantize_group_gemm", "")}


def test_targets_without_better_kernels_keep_those_of_mlc() -> None:
    half, wide = (
        mlc_models.texts()[f"Mixtral-8x7B-v0.1-{kind}"]["batch_decode"]
        for kind in ("q4f16_1", "q4f32_1")
    )
    left = {("dequantize_group_gemm", "")}
    assert read(half, "h200") == read(wide, "llvm") == {("", "R.topk")}
    assert read(wide, "h200") == read(half, "h200", backend="tir") == left
    assert read(half, disable=["FuseExperts"]) == left
