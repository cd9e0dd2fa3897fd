"""Kernels that stream weights of four bits for one row: numbers without a GPU, plans, and code."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from relax_fusion.dlight_rules.tensor_cores import contraction
from relax_fusion.estimator import candidates, choose, footprint, violations
from relax_fusion.estimator.families.few_rows.packed import PackedPlan
from relax_fusion.hardware.target import make_target
from relax_fusion.workload import GatedFFN, NormMatmul, Packed, Projection
from relax_fusion.workload.reference import evaluate, numpy_dtype

from ..support.slow import sampled
from .compiled import compiled, divergent_barriers, kernels
from .generic_on_cpu import Launches, of_few_rows
from .nodes import Node
from .test_dependent import asked
from .test_packed_rows import GATED, H200, PLAIN, Q4, RMS, arrays

ONE = replace(PLAIN, rows=1)
BRAIN = replace(Q4, scale_dtype="bfloat16")


def matmul(k: int, n: int, packed: Packed = Q4, dtype: str = "float16") -> NormMatmul:
    output = Projection(n, "nk", ("residual",), packed=packed)
    return replace(ONE, k=k, outputs=(output,), dtype=dtype, out_dtype=dtype)


def streamed(work: NormMatmul | GatedFFN) -> list[PackedPlan]:
    found = candidates(work, H200, "tir")
    return [p for p in found if isinstance(p, PackedPlan) and p.residents]


def run(work, given, blocks: int = 1, warps: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Return what so many thread blocks compute, and what is wanted."""
    plan = replace(next(p for p in streamed(work) if p.num_warps == warps), residents=blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contraction, "device_of", lambda target: replace(H200, sm_count=1))
        func = contraction.emit(work, plan, make_target("h200"))
    (out,) = work.graph.outputs
    result = np.full(out.shape, np.nan, numpy_dtype(out.dtype))
    tensors = {n: a.copy().reshape(-1) for n, a in (given | {out.name: result}).items()}
    Launches(tensors, chosen=of_few_rows).run(Node(func.body))
    with np.errstate(all="ignore"):
        wanted = evaluate(work.graph, given)[out.name]
    return tensors[out.name].reshape(wanted.shape).astype("float64"), wanted


@pytest.mark.parametrize(
    ("work", "blocks", "warps"),
    [
        (matmul(2048, 64), 1, 4),
        (matmul(512, 16 * 19), 1, 4),  # sums are kept of eight tiles
        (replace(matmul(768, 16 * 7), norm=RMS), 3, 8),
        (matmul(3584, 48), 1, 7),
        (replace(GATED, rows=1, k=4352), 2, 4),
        (matmul(256, 24, Packed(4, 32, 8)), 1, 4),
        (matmul(256, 8, Packed(4, 32, 0)), 1, 4),
        (matmul(2048, 24, BRAIN, "bfloat16"), 1, 4),
    ],
    ids=["whole", "tiles", "blocks", "7 warps", "gated", "zero", "no zero", "bfloat16"],
)
def test_numbers(work, blocks: int, warps: int) -> None:
    got, wanted = run(work, arrays(work), blocks, warps)
    error = np.abs(got - wanted).max() / np.abs(wanted).max()
    assert error < (4e-3 if work.dtype == "bfloat16" else 1e-3)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "name", "bad"),  # each of them is in a quick one
    sampled(product(["float16", "bfloat16"], ["x", "w0_scale"], [np.inf, -np.inf, np.nan]), 5),
)
def test_what_is_not_finite(dtype: str, name: str, bad: float) -> None:
    """A scale beside numbers of one sign, and of both; an element of x beside weights of 0."""
    work = matmul(512, 16 * 9, Q4 if dtype == "float16" else BRAIN, dtype)
    given = arrays(work)
    given["x"] = np.abs(given["x"])
    given["w0"][:4] = 0x9ABCDEF8  # all are positive
    if name == "x":
        given["x"][0, 37] = bad
    else:
        given["w0_scale"][[1, 77, 140], 2] = bad
    got, wanted = run(work, given)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    there = np.isinf(wanted)
    assert there.any() != np.isnan(bad)
    np.testing.assert_array_equal(got[there], wanted[there])
    np.testing.assert_array_equal(np.isinf(got), there)
    others = np.isfinite(wanted)  # also of tiles behind those that were added up anew
    most = np.abs(wanted[others]).max(initial=0.0)
    np.testing.assert_allclose(got[others], wanted[others], atol=4e-3 * most)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (matmul(384, 64), "k is 384, no multiple of 256"),
        (matmul(512, 64, Packed(4, 64, 7)), "no groups of 32 fields of 4 bits in order"),
        (matmul(512, 64, Packed(8, 32, 127)), "no groups of 32 fields of 4 bits in order"),
    ],
)
def test_what_is_not_streamed_has_a_tile_a_block(work: NormMatmul, why: str) -> None:
    assert not streamed(work)
    (plan, *_) = streamed(matmul(512, 64))
    assert any(f"residents is 4, but {why}" in s for s in violations(plan, work, H200))
    assert any(p.keeps_row for p in candidates(work, H200, "tir") if isinstance(p, PackedPlan))


def test_the_fastest_that_were_timed_are_chosen() -> None:
    """Warps and blocks of a multiprocessor, by `2026-11-29-packed_row.log`."""
    works = {
        "qkv": replace(ONE, k=4096, norm=RMS, outputs=(Projection(6144, "nk", packed=Q4),)),
        "out": matmul(4096, 4096),
        "gate_up": replace(GATED, rows=1, k=4096, n=14336),
        "down": matmul(14336, 4096),
        "head": replace(ONE, k=4096, norm=RMS, outputs=(Projection(128256, "nk", packed=Q4),)),
    }
    chosen = {}
    for name, work in works.items():
        plan = choose(work, H200, always=True).plans.plan_for(1)
        chosen[name] = plan.num_warps, PackedPlan.of(plan).residents
        assert not [*violations(plan, work, H200)]
    four = dict.fromkeys(("qkv", "out", "gate_up"), (4, 4))
    assert chosen == {**four, "down": (7, 2), "head": (8, 1)}


def test_code() -> None:
    """Four blocks fit, no barrier is where threads diverge, and none waits before it has asked."""
    work = replace(GATED, rows=1, k=4096, n=14336)
    plan = streamed(work)[0]
    source, host = compiled(work, plan, make_target("h200"), fixed=True)
    assert asked(host) == {footprint(work, plan, H200).smem_bytes}
    (kernel,) = kernels(source)
    assert "__launch_bounds__(128, 4)" in kernel
    assert divergent_barriers(kernel) == 0
    assert "& (uint)2139095040) == (uint)2139095040" in kernel  # which NaN passes
    first = kernel.index("cp_async_commit")
    assert first < kernel.index("griddepcontrol_wait") < kernel.index("x_ptr", first)
