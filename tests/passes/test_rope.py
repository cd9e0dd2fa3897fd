"""Rotated heads: FuseMatmulEpilogue takes a rotary embedding along."""

from __future__ import annotations

import pytest

from relax_fusion import make_target
from relax_fusion.estimator import candidates, predict
from relax_fusion.hardware.target import device_of
from relax_fusion.workload import DynamicDim

from ..support.chains import Chain, Rewrite, assert_numbers, calls, fused, module, run_pass
from ..support.rope_chains import (
    INPUTS,
    MATMUL,
    NORM_MATMUL,
    Q4,
    WIDE,
    H,
    Q,
    rope,
    turn,
    work,
)

REWRITES = [
    Rewrite(
        Chain("heads", INPUTS, Q4 + turn("q", "c", "s"), "y"),
        work(rope(64, 6)),
        "x W C S",
    ),
    Rewrite(
        Chain(
            "transposed_heads",
            "x[2,6,32] W[32,64] C[1,6,16] S[1,6,16]",
            Q
            + "q3 = R.reshape(m, R.shape([2, 6, 4, 16])); q = R.permute_dims(q3, [0, 2, 1, 3])\n"
            + WIDE
            + turn("q", "c", "s"),
            "y",
        ),
        work(rope(64, 6)),
        "x W C S",
        ("permute_dims",),
    ),
    Rewrite(
        Chain(
            "angles_of_each_row",
            "x[2,6,32] W[32,64] C[2,6,16] S[2,6,16]",
            Q4.replace("axis=[1]", "axis=[2]") + turn("q", "c", "s"),
            "y",
        ),
        work(rope(64)),
        "x W C S",
    ),
    Rewrite(
        Chain(
            "one_token_of_each_sequence",
            "x[b,1,32] W[32,64] C[1,16] S[1,16]",
            Q4.replace("[2, 6, 4", "[b, 1, 4") + turn("q", "c", "s"),
            "y",
            {"b": 3},
        ),
        work(rope(64, 1), rows=DynamicDim("b")),
        "x W C S",
    ),
    Rewrite(
        Chain(
            "symbolic_sizes",
            "x[b,t,32] W[32,64] C[t,16] S[t,16]",
            Q4.replace("[2, 6, 4", "[b, t, 4") + turn("q", "c", "s"),
            "y",
            {"b": 3, "t": 5},
        ),
        work(rope(64, DynamicDim("t")), rows=DynamicDim("b * t")),
        "x W C S",
    ),
    Rewrite(
        Chain(
            "bias_in_front",
            INPUTS + " b[64]",
            "m0 = R.matmul(x, W); m = R.add(m0, b)\n" + Q4.removeprefix(Q) + turn("q", "c", "s"),
            "y",
        ),
        work(rope(64, 6), "bias"),
        "x W b C S",
    ),
    Rewrite(
        Chain(
            "turned_in_float32",
            "x[2,6,32] W[32,64] C[6,16]:float32 S[6,16]:float32",
            Q4
            + 'p = R.astype(q, "float32")\n'
            + turn("p", "c", "s", "z")
            + 'y = R.astype(z, "float16")',
            "y",
            dtype="float16",
        ),
        work(rope(64, 6), dtype="float16"),
        "x W C S",
    ),
    Rewrite(
        Chain("angles_of_the_dtype", INPUTS, Q4 + turn("q", "c", "s"), "y", dtype="float16"),
        work(rope(64, 6, "float16"), dtype="float16"),
        "x W C S",
    ),
    Rewrite(
        Chain(
            "halves_by_split",
            INPUTS,
            Q4
            + "p = R.split(q, 2, axis=-1); l = p[0]; u = p[1]\n"
            + 'n = R.multiply(u, R.const(-1.0, "float32")); r = R.concat((n, l), axis=3)\n'
            + "a = R.multiply(s, r); d = R.multiply(c, q); y = R.add(a, d)",
            "y",
        ),
        work(rope(64, 6)),
        "x W C S",
    ),
    Rewrite(
        Chain(
            "one_head",
            "x[6,32] W[32,16] C[6,16] S[6,16]",
            Q + turn("m", "C", "S", axis=1),
            "y",
        ),
        work(rope(16), n=16, rows=6),
        "x W C S",
    ),
]


@pytest.mark.parametrize("rewrite", REWRITES, ids=str)
def test_rewrites(rewrite: Rewrite) -> None:
    rewrite.check(MATMUL)


def test_what_moved_the_heads_follows_the_kernel() -> None:
    func, decision = fused(REWRITES[1].chain, MATMUL)
    assert decision.spelling == "matmul NN rope"
    made = [b for block in func.body.blocks for b in block.bindings]
    names = [b.var.name for b in made]
    assert names[-4:] == ["m_flat", "m", "q3", "y"]
    assert calls(func)[-4:] == ["call_tir", "reshape", "reshape", "permute_dims"]


CHAINS = [r.chain for r in REWRITES]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)


def test_heads_of_llama_go_to_the_kernel_with_the_least_price() -> None:
    """Its queries and keys, normalised, on an H200."""
    chain = Chain(
        "llama",
        "x[1,t,4096] g[4096] W[5120,4096] C[t,128] S[t,128]",
        H
        + "w = R.permute_dims(W, axes=[1, 0]); m = R.matmul(h, w)\n"
        + "q = R.reshape(m, R.shape([1, t, 40, 128]))\n"
        + WIDE
        + turn("q", "c", "s", half=64),
        "y",
        dtype="float16",
    )
    target = make_target("h200")
    given = {"target": target, "backend": "triton", "validate": False}
    _, (decision,) = run_pass(module([chain]), NORM_MATMUL, **given)
    assert decision.fused and decision.workload.outputs[0].rope.distance == 64
    families = {box.rows: plan.family for box, plan in decision.plans.boxes}
    assert "cuda" in families.values() and families[1] == "gemv"
    work, dev = decision.workload, device_of(target)
    offered = list(candidates(work, dev, "triton"))
    best = min(offered, key=lambda plan: predict(work, plan, dev, 777).seconds)
    assert best.family == "cuda"
