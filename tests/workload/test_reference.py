"""What numpy makes of the graphs, against PyTorch in float64 and against graphs' own words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from relax_fusion.errors import GraphError
from relax_fusion.workload import (
    Attention,
    DynamicDim,
    GatedFFN,
    Graph,
    Norm,
    NormMatmul,
    Packed,
    Projection,
    Rope,
)
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.graph import Slot
from relax_fusion.workload.reference import evaluate, rounded, unrounded
from relax_fusion.workload.values import Axis, apply

from ..support.matmul_chains import TwoMatmuls
from ..support.workloads import inputs

FLOAT = ("float32", "float32")
ACTIVATE = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def torched(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {n: torch.from_numpy(a.astype("float64")) for n, a in arrays.items()}


def same(got: np.ndarray, want: torch.Tensor) -> None:
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("act", ACTIVATE)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_norm_and_matmuls(act: str, layout: Any) -> None:
    norm = Norm("rms", 1e-3, residual=True, returns_sum=True, returns_norm=True)
    outputs = Projection(6, layout, ("bias", act)), Projection(5, "nk", (act, "residual"))
    work = NormMatmul(3, 16, outputs, norm, *FLOAT)
    arrays = inputs(work)
    got, t = evaluate(work.graph, arrays, rounding=unrounded), torched(arrays)
    total = t["x"] + t["residual"]
    x = F.rms_norm(total, (16,), t["gamma"], 1e-3)
    first = F.linear(x, t["w0"] if layout == "nk" else t["w0"].T, t["bias0_0"])
    assert list(got) == ["x_sum", "x_norm", "out0", "out1"]
    same(got["x_sum"], total)
    same(got["x_norm"], x)
    same(got["out0"], ACTIVATE[act](first))
    same(got["out1"], ACTIVATE[act](x @ t["w1"].T) + t["residual1_1"])


def test_layer_norm() -> None:
    work = NormMatmul(4, 16, (Projection(6, "nk"),), Norm("layer", 1e-3, beta=True), *FLOAT)
    arrays = inputs(work)
    t = torched(arrays)
    x = F.layer_norm(t["x"], (16,), t["gamma"], t["beta"], 1e-3)
    same(evaluate(work.graph, arrays)["out0"], x @ t["w0"].T)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated(merged: bool, gate_first: bool) -> None:
    work = GatedFFN(3, 16, 6, "nk", merged, gate_first, "silu", None, *FLOAT, bias=True)
    arrays = inputs(work)
    t = torched(arrays)
    weights = t["w0"].chunk(2) if merged else (t["w0"], t["w1"])
    biases = t["bias0"].chunk(2) if merged else (t["bias0"], t["bias1"])
    parts = [F.linear(t["x"], w, b) for w, b in zip(weights, biases, strict=True)]
    gate, up = parts if gate_first else parts[::-1]
    same(evaluate(work.graph, arrays)["out0"], F.silu(gate) * up)


@pytest.mark.parametrize("positions", [None, 2, DynamicDim("s")])
def test_rope(positions: Any) -> None:
    rope = Rope(4, 8, "float32", positions)
    work = NormMatmul(DynamicDim("n"), 16, (Projection(12, "nk", ("bias",), rope),), None, *FLOAT)
    arrays = inputs(work, {"rows": 6, "positions0": 3})
    t = torched(arrays)
    x = F.linear(t["x"], t["w0"], t["bias0_0"])
    heads = x[:, :8].reshape(6, 2, 4)
    low, high = heads.chunk(2, -1)
    row = torch.arange(6) % len(t["cos0"])
    cos, sin = t["cos0"][row][:, None], t["sin0"][row][:, None]
    turned = heads * cos + torch.cat([-high, low], -1) * sin
    same(evaluate(work.graph, arrays)["out0"], torch.cat([turned.reshape(6, 8), x[:, 8:]], 1))


EVERYTHING = Attention(
    *(2, DynamicDim("q"), DynamicDim("kv"), 6, 2, 8, 4, 0.3, "bottom_right"),
    *((True, False, True, True), "float32", "float32"),
    q_layout="bnsh",
    kv_prefix=True,
    mask_dims=(True, False, False, True),
    window=4,
    softcap=2.0,
    alibi="float32",
    sinks="float32",
)


@pytest.mark.parametrize("bias_op", ["add", "min"])
@pytest.mark.parametrize("lengths", [(3, 7), (1, 5), (5, 2)])
def test_attention_with_every_option(bias_op: Any, lengths: tuple[int, int]) -> None:
    work, (q_len, kv_len) = replace(EVERYTHING, bias_op=bias_op), lengths
    sizes = {"q_len": q_len, "kv_len": kv_len, "kv_capacity": 9}
    arrays = inputs(work, sizes)
    arrays["k"][:, kv_len:] = arrays["v"][:, kv_len:] = np.nan  # not read
    got = evaluate(work.graph, {**arrays, "kv_len": kv_len}, constants="float64")["out"]
    t = torched(arrays)
    k, v = (t[n][:, :kv_len].repeat_interleave(3, 2).transpose(1, 2) for n in "kv")
    scores = 2.0 * torch.tanh(t["q"] @ k.mT * 0.3 / 2.0)
    scores = scores + t["bias"] if bias_op == "add" else torch.minimum(scores, t["bias"])
    away = torch.arange(kv_len) - torch.arange(q_len)[:, None] - (kv_len - q_len)
    scores = scores + t["slopes"][:, None, None] * away
    seen = (away <= 0) & (away > -4) & (t["mask"] != 0)
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = t["sinks"][:, None, None].expand(2, 6, q_len, 1)
    weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    same(got, (weights @ v).transpose(1, 2))


def test_attention_of_a_row_that_sees_no_key_is_zero() -> None:
    work = replace(EVERYTHING, sinks=None, kv_prefix=False, window=None, mask_dims=None)
    arrays = inputs(work, {"q_len": 3, "kv_len": 2})  # the first query stands before all keys
    arrays["bias"][1, 0, 2] = -np.inf
    got = evaluate(work.graph, arrays)["out"]
    assert (got[:, 0] == 0).all() and (got[1, 2] == 0).all()
    assert (got[0, 1:] != 0).all()
    none = inputs(work, {"q_len": 3, "kv_len": 0})
    assert (evaluate(work.graph, none)["out"] == 0).all()


@pytest.mark.parametrize("batch", [None, 2])
def test_matmul_chain_rounds_what_is_between(batch: int | None) -> None:
    steps = ("bias", 0.5, "silu"), ("residual",)
    work = TwoMatmuls(3, 16, 4, 6, ("nk", "kn"), *steps, "float16", "float32", batch).chain
    arrays = inputs(work)
    t = torched(arrays)
    middle = F.silu((t["x"] @ t["w0"].mT + t["bias0_0"]) * 0.5)
    want = middle.half().double() @ t["w1"] + t["residual1_0"]
    same(evaluate(work.graph, arrays)["out1"], want)
    whole = evaluate(work.graph, arrays, rounding=unrounded)["out1"]
    same(whole, middle @ t["w1"] + t["residual1_0"])
    assert np.abs(whole - want.numpy()).max() > 1e-5
    own = evaluate(work.graph, arrays, rounding=rounded)["out1"]
    assert (own.astype("float32") == own).all()


def three_matmuls() -> Graph:
    """x @ A @ B @ C, as one chain."""
    g = GraphBuilder()
    i, axes = (
        Axis("i", DynamicDim("rows")),
        [Axis(f"k{n}", size) for n, size in enumerate((8, 4, 6, 5))],
    )
    data = g.input("x", (i.size, 8), "float32")
    for n, (k, j) in enumerate(pairwise(axes)):
        w = g.input(f"w{n}", (k.size, j.size), "float32")
        data = g.sum(f"y{n}", (i, j), (k,), data[i, k] * w[k, j])
    g.output(data)
    return g.graph()


def test_three_matmuls() -> None:
    rng = np.random.default_rng(3)
    shapes = {"x": (7, 8), "w0": (8, 4), "w1": (4, 6), "w2": (6, 5)}
    arrays = {n: rng.standard_normal(s) for n, s in shapes.items()}
    x, a, b, c = arrays.values()
    got = evaluate(three_matmuls(), arrays)["y2"]
    np.testing.assert_allclose(got, x @ a @ b @ c, rtol=1e-12)


def q4_gate_up(k: int = 64, n: int = 48) -> Graph:
    """Norm -> gate and up of LLaMA on q4f16_1 weights -> silu * up."""
    g = GraphBuilder()
    i, kk, j = Axis("r", DynamicDim("rows")), Axis("k", k), Axis("j", n)
    x, gamma = g.input("x", (i.size, k), "float16"), g.input("gamma", (k,), "float16")
    w = g.input("w", (2 * n, k), "float16", Packed(4, 32, 7))
    q = g.sum("q", (i,), (kk,), x[i, kk] * x[i, kk])
    scale = apply("rsqrt", q[i] / float(k) + 1e-5)
    h = g.map("h", (i, kk), x[i, kk] * scale * gamma[kk], "float16")
    p = Axis("p", 2)
    a = g.sum("a", (p, i, j), (kk,), h[i, kk] * w[p * n + j, kk])
    g.output(g.map("y", (i, j), apply("silu", a[0, i, j]) * a[1, i, j], "float16"))
    return g.graph()


def test_packed_weights() -> None:
    rng = np.random.default_rng(5)
    fields = rng.integers(0, 16, (96, 64), dtype="uint32")
    words = np.zeros((96, 8), "uint32")
    for place in range(8):
        words |= fields[:, place::8] << np.uint32(4 * place)
    scale = rng.standard_normal((96, 2)).astype("float16")
    x, gamma = rng.standard_normal((3, 64)), rng.standard_normal(64)
    given = {"x": x, "gamma": gamma, "w": words, "w_scale": scale}
    w = torch.from_numpy((fields - 7.0) * np.repeat(scale.astype("float64"), 32, 1))
    h = F.rms_norm(torch.from_numpy(x), (64,), torch.from_numpy(gamma), 1e-5)
    gate, up = (h @ w.T).chunk(2, -1)
    same(evaluate(q4_gate_up(), given)["y"], F.silu(gate) * up)


def test_a_tensor_that_is_changed_in_place() -> None:
    """Rows of a cache are overwritten: the rest stays."""
    g = GraphBuilder()
    i, d = Axis("i", 2), Axis("d", 3)
    new = g.input("new", (2, 3), "float32")
    cache = g.tensor("cache", (5, 3), "float32")
    g.part(cache[i + 1, d], (i, d), new[i, d])
    graph = g.graph()
    graph = replace(graph, slots=(*graph.slots, Slot("cache", "inout")))
    given = {"new": np.ones((2, 3)), "cache": np.zeros((5, 3))}
    assert evaluate(graph, given)["cache"].sum(1).tolist() == [0, 3, 3, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w0": None}, "inputs are x; must be x, w0"),
        ({"w0": (6, 15)}, r"w0 has shape \[6, 15\]; must be \[6, 16\]"),
        ({"x": (3, 2, 16)}, r"x has shape \[3, 2, 16\]; must be \['rows', 16\]"),
    ],
)
def test_inputs_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    work = NormMatmul(DynamicDim("n"), 16, (Projection(6, "nk"),), None, *FLOAT)
    given = {"x": (3, 16), "w0": (6, 16)} | change
    arrays = {n: np.zeros(s) for n, s in given.items() if s is not None}
    with pytest.raises(GraphError, match=message):
        evaluate(work.graph, arrays)


def test_sizes_that_contradict_each_other_are_named() -> None:
    work = NormMatmul(DynamicDim("n"), 16, (Projection(6, "nk", ("residual",)),), None, *FLOAT)
    arrays = inputs(work, {"rows": 3}) | {"residual0_0": np.zeros((4, 6))}
    with pytest.raises(GraphError, match=r"residual0_0 has shape \[4, 6\]; must be \[3, 6\]"):
        evaluate(work.graph, arrays)
