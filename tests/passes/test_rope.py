"""Rotated heads: what follows their kernel, every range of rows, and the choice of a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion import make_target
from relax_fusion.estimator import candidates, predict
from relax_fusion.hardware.target import device_of

from ..support.cases import cases
from ..support.chains import Chain, assert_numbers, calls, compiled, fused, module, run_pass
from ..support.rope_chains import MATMUL, NORM_MATMUL, WIDE, H, turn


def test_what_moved_the_heads_follows_the_kernel() -> None:
    func, decision = fused(cases("FuseMatmulEpilogue.rope")["transposed_heads"].chain, MATMUL)
    assert decision.spelling == "matmul NN rope"
    made = [b for block in func.body.blocks for b in block.bindings]
    names = [b.var.name for b in made]
    assert names[-4:] == ["m_flat", "m", "q3", "y"]
    assert calls(func)[-4:] == ["call_tir", "reshape", "reshape", "permute_dims"]


@pytest.fixture(scope="module")
def merged():
    chain = cases("FuseRMSNormMatmul.rope")["norm_and_merged_projection"].chain
    mod = module([chain])
    return compiled(mod, [chain]), mod, chain


@pytest.mark.parametrize("sizes", [(1, 1), (1, 17), (3, 1), (2, 40), (3, 100)])
def test_every_range_of_rows(sizes: tuple[int, int], merged) -> None:
    vm, mod, chain = merged
    assert_numbers(vm, mod, replace(chain, sizes=dict(zip("bt", sizes, strict=True))))


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
