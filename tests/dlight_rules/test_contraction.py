"""The contraction rule: numbers on this CPU, the CUDA source that comes out, and what it leaves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.runtime import tensor

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.few_rows import tiles as few_rows
from relax_fusion.estimator.tile_plan import PLAN_ATTR, PlanTable, TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import GatedFFN, Norm, NormMatmul

from ..support.contraction_cases import (
    BASE,
    DYNAMIC_ROWS,
    EACH,
    GATED,
    ROWS,
    THREE,
    Case,
    cases,
    dynamic_works,
    head_cases,
)
from ..support.quick import loaded, quick_host, quickly
from ..support.slow import sampled
from .compiled import cuda, cuda_source, divergent_barriers, kernels, scheduled, shared_bytes

Work = NormMatmul | GatedFFN
HOST = quick_host()


def spread(work: Work, gpu: bool, rows: int, offset: int = 0) -> TilePlan:
    """Return one of the candidates for `rows` rows: another one for another `offset`."""
    dev = device_of(make_target("h200") if gpu else HOST)
    found = list(candidates(work, dev, "tir"))
    lowest = max(rows, 2, min(p.block_m for p in found))
    found = [p for p in found if p.block_m <= lowest]
    return found[(len(found) * 5 // 8 + offset * 7) % len(found)]


def ranges(work: Work, gpu: bool) -> PlanTable:
    """Return plans for 1, up to 4, and more rows."""
    return PlanTable(
        ((1, spread(work, gpu, 1)), (4, spread(work, gpu, 4, 1)), (None, spread(work, gpu, 33, 2)))
    )


def built(work: Work, table: PlanTable) -> tvm.runtime.Module:
    return loaded(quickly(scheduled(work, table, HOST)))


def check(case: Case, library: tvm.runtime.Module) -> None:
    arrays = case.inputs()
    outs = [tvm.runtime.empty(shape, dtype) for shape, dtype in case.out_shapes()]
    library["main"](*(tensor(a) for a in arrays.values()), *outs)
    case.check(arrays, [o.numpy() for o in outs])


@pytest.mark.parametrize(
    "case", [*sampled(cases(), 4), *sampled(head_cases(), 3)], ids=lambda case: case.name
)
def test_numbers(case: Case) -> None:
    check(case, built(case.work, PlanTable.single(spread(case.work, False, case.rows))))


HEADS = replace(head_cases()[0].work, rows=ROWS)
SEQUENCES = replace(BASE, rows=ROWS, norm=EACH)
ON_CPUS = {**dynamic_works(), "heads": HEADS, "norm_of_sequences": SEQUENCES}


@pytest.mark.parametrize("work", ON_CPUS.values(), ids=ON_CPUS)
def test_dynamic_rows_in_every_range(work: Work) -> None:
    library = built(work, ranges(work, gpu=False))
    for rows in DYNAMIC_ROWS:
        check(Case(f"{rows} rows", work, rows), library)


@pytest.mark.parametrize("reg", [(1, 8), (2, 8), (4, 4), (8, 2)])
@pytest.mark.parametrize("blocks", [1, 4])
def test_register_tiles(reg: tuple[int, int], blocks: int) -> None:
    work = replace(BASE, rows=33)
    plan = TilePlan(
        reg[0] * blocks, 16, 64, reg_m=reg[0], reg_n=reg[1], lanes=4, family="cpu_tiles"
    )
    check(Case(f"{reg}", work), built(work, PlanTable.single(plan)))


def test_the_check_notices_an_error() -> None:
    case = Case("wrong", BASE)
    arrays = case.inputs()
    (good,) = (a.astype(np.float32) for a in case.reference(arrays, "float64"))
    case.check(arrays, [good])
    wrong = good.copy()
    wrong[3, 5] += 1e-3
    with pytest.raises(AssertionError, match=r"wrong, result 0: error 0\.001"):
        case.check(arrays, [wrong])


@cache
def gpu_cases() -> list[Case]:
    """Return the cases that have a GPU plan, less those that differ in an activation only."""
    activations = ("relu", "gelu", "silu", "tanh")
    found = [c for c in cases() if not c.name.endswith(activations) and c.work.k > 1]
    return [c for c in found if c.work.norm is None or not c.work.norm.each]  # Triton has those


@pytest.mark.parametrize("case", sampled(gpu_cases(), 8), ids=lambda case: case.name)
def test_cuda_compiles(case: Case) -> None:
    table = PlanTable.single(spread(case.work, True, case.rows))
    for kernel in kernels(cuda_source(case.work, table)):
        assert divergent_barriers(kernel) == 0
        assert shared_bytes(kernel) <= 49152


SUM = Norm("rms", 1e-5, residual=True, returns_sum=True)
TILE = TilePlan(16, 32, 16, reg_m=2, reg_n=2, lanes=4, num_warps=4, family="fma_tiles")
DOTS = TilePlan(1, 4, 64, reg_n=2, lanes=2, num_warps=2, family="dot_products")
KERNELS = [
    (BASE, TILE, 2),  # the norm once, then the projection
    (BASE, DOTS, 1),
    (replace(BASE, norm=None), TILE, 1),
    (replace(BASE, norm=None), DOTS, 1),
    (GATED, TILE, 2),
    (GATED, DOTS, 1),
    (replace(BASE, norm=SUM), TILE, 3),  # the addition in front
    (replace(BASE, norm=SUM), DOTS, 2),
    (replace(BASE, outputs=THREE), TILE, 4),  # several projections share the norm
    (replace(BASE, outputs=THREE), DOTS, 4),
    (replace(BASE, outputs=THREE, norm=None), DOTS, 3),
]


@pytest.mark.parametrize(("work", "plan", "count"), KERNELS)
def test_number_of_kernels(work: Work, plan: TilePlan, count: int) -> None:
    work = replace(work, rows=33)
    source = cuda_source(work, PlanTable.single(plan))
    assert len(kernels(source)) == count
    assert source.count("__global__") == 2 * count  # declared, then defined


@pytest.mark.parametrize("work", dynamic_works().values(), ids=dynamic_works())
def test_cuda_ranges(work: Work) -> None:
    table = ranges(work, gpu=True)
    source = cuda_source(work, table)
    outputs = len(work.outputs) if isinstance(work, NormMatmul) else 1
    # Only dot products of a single projection, and few rows on tensor cores, normalise their own.
    few = [p.family == few_rows.FAMILY and few_rows.normalises(p) for _, p in table.entries]
    dots = [p.block_m == 1 and outputs == 1 for _, p in table.entries]
    norms = sum(not (a or b) for a, b in zip(few, dots, strict=True))
    layout = "kn" if isinstance(work, NormMatmul) and work.outputs[0].layout == "kn" else "nk"
    norms = 3 if layout == "kn" else norms
    assert len(kernels(source)) == 3 * outputs + norms
    assert not any(divergent_barriers(kernel) for kernel in kernels(source))


GEMV = TilePlan(1, 8, 512, reg_n=2, lanes=8, num_warps=4, family="dot_products")


@pytest.mark.parametrize("merged", [True, False])
def test_a_row_is_dot_products_with_wide_loads(merged: bool) -> None:
    gated = replace(GATED, rows=1, k=1024, dtype="float16", out_dtype="float16", merged=merged)
    matmul = replace(BASE, rows=1, k=1024, dtype="float16", out_dtype="float16")
    for work in (gated, matmul):
        (kernel,) = kernels(cuda_source(work, PlanTable.single(GEMV)))
        assert "__launch_bounds__(128)" in kernel
        assert "*(uint4*)(w0" in kernel
        assert "__shfl_down_sync" in kernel
        assert shared_bytes(kernel) < (1024 + 64) * 4


def test_a_long_row_is_normalised_by_a_kernel_of_its_own() -> None:
    work = replace(BASE, rows=1, k=16384, dtype="float16", out_dtype="float16")
    assert len(kernels(cuda_source(work, PlanTable.single(GEMV)))) == 2


def test_neighbouring_blocks_share_their_columns() -> None:
    work = replace(BASE, rows=128, outputs=(replace(BASE.outputs[0], n=64),))
    plan = TilePlan(16, 32, 16, reg_m=2, reg_n=2, lanes=4, num_warps=4, family="fma_tiles")
    text = scheduled(work, plan, cuda()).script()
    assert 'T.thread_binding(T.int64(8), thread="blockIdx.x")' in text
    assert 'T.thread_binding(T.int64(2), thread="blockIdx.y")' in text


def test_other_functions_are_left_alone() -> None:
    x = te.placeholder((8,), "float32", "x")
    foreign = te.create_prim_func([x, te.compute((8,), lambda i: x(i) + x(i), "y")])
    func = build_prim_func(BASE, PlanTable.single(spread(BASE, False, 7)))
    for other in (
        foreign,
        func.without_attr(PLAN_ATTR),
        func.with_attr("relax_fusion.workload", "something else"),
    ):
        for target in (HOST, cuda()):
            assert FusedRule().apply(other, target, False) is None
