"""Tensor-core kernels of contractions: index maths, numbers without a GPU, and the code of them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm

from relax_fusion.compute import contraction_prim_func
from relax_fusion.dlight_rules.tensor_cores import layout as mma_layout
from relax_fusion.dlight_rules.tensor_cores.contraction import with_mma
from relax_fusion.estimator import candidates, footprint, violations
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import GatedFFN, Norm, NormMatmul
from relax_fusion.workload.reference import numpy_dtype

from ..support.contraction_cases import (
    COLUMNS,
    HALF,
    HALF_GATED,
    POST,
    POST_SUM,
    ROWS,
    Case,
    plain,
    tensor_core_cases,
)
from ..support.slow import sampled
from .compiled import cuda, cuda_source, divergent_barriers, kernels, library_of, scheduled
from .generic_on_cpu import Launches
from .nodes import Node

Work = NormMatmul | GatedFFN
SUM = Norm("rms", 1e-5, residual=True, returns_sum=True)


def plans(work: Work, family: str = "mma") -> list[TilePlan]:
    """Return the plans of a family for a workload."""
    found = candidates(work, device_of(make_target("h200")), "tir")
    return [plan for plan in found if plan.family == family]


def small_plans(work: Work, family: str = "mma") -> list[TilePlan]:
    """Return the smallest plan, and the smallest whose pipeline is longest and deepest."""
    ordered = sorted(
        plans(work, family), key=lambda p: (p.block_m * p.block_n, p.block_k, p.num_stages)
    )
    least = [p for p in ordered if p.block_m * p.block_n == ordered[0].block_m * ordered[0].block_n]
    return [least[0], least[-1]]


def computed(case: Case, plan: TilePlan) -> list[np.ndarray]:
    """Return the results of a case, by its kernels on numpy."""
    func = with_mma(contraction_prim_func(case.work, plan, gpu=True), plan)
    arrays = [array.copy().reshape(-1) for array in case.inputs().values()]
    shapes = [(shape, numpy_dtype(dtype)) for shape, dtype in case.out_shapes()]
    results = [np.zeros(np.prod(shape), dtype) for shape, dtype in shapes]
    tensors = {p.name: a for p, a in zip(func.params, [*arrays, *results], strict=True)}
    Launches(tensors, case.sizes).run(Node(func.body))
    return [result.reshape(shape) for result, (shape, _) in zip(results, shapes, strict=True)]


@pytest.mark.parametrize("case", sampled(tensor_core_cases(), 4), ids=lambda case: case.name)
def test_numbers(case: Case) -> None:
    for plan in small_plans(case.work):
        case.check(case.inputs(), computed(case, plan))


NK = [c for c in tensor_core_cases() if plans(c.work, "wgmma")]


@pytest.mark.parametrize("case", sampled(NK, 3), ids=lambda case: case.name)
def test_numbers_of_warp_groups(case: Case) -> None:
    case.check(case.inputs(), computed(case, small_plans(case.work, "wgmma")[0]))


@pytest.mark.parametrize("stages", [3, 4, 6])
def test_warp_groups_keep_their_pipeline_full(stages: int) -> None:
    work = replace(HALF, rows=70, k=8 * 64 - 8, outputs=(plain(64),))
    plan = replace(plans(work, "wgmma")[0], block_m=64, block_n=64, reg_n=64, num_warps=4)
    case = Case("deep", work)
    case.check(case.inputs(), computed(case, replace(plan, num_stages=stages)))


@pytest.mark.parametrize(
    "name", sampled(["k_70_kn", "nk", "gated_separate", "bfloat16", "rope", "steps"], 2)
)
def test_clusters_add_up_parts_of_the_reduction(name: str) -> None:
    """With 23 slices of k in four parts, and with one and a half steps in two."""
    case = next(c for c in tensor_core_cases() if c.name == f"tensor_{name}")
    for family, split, k in (("mma", 4, 360), ("wgmma", 2, 96)):
        long = Case(name, replace(case.work, k=k + case.work.k % 8, rows=41))
        dev = device_of(make_target("h200"))
        parts = [replace(plan, split_k=split) for plan in plans(long.work, family)]
        for plan in [p for p in parts if not violations(p, long.work, dev)][:1]:
            long.check(long.inputs(), computed(long, plan))


def test_sums_may_need_more_room_than_operands() -> None:
    plan = replace(plans(HALF)[0], block_n=128, block_k=32, reg_n=64)
    plan = replace(plan, block_m=64, reg_m=64, num_stages=2, num_warps=2, split_k=2)
    assert footprint(HALF, plan, device_of(make_target("h200"))).smem_bytes == 4 * 64 * 128
    case = Case("sums", HALF)
    case.check(case.inputs(), computed(case, plan))


def test_rows_may_be_dynamic() -> None:
    case = Case("dynamic", replace(HALF, rows=ROWS), 41)
    case.check(case.inputs(), computed(case, small_plans(case.work)[0]))


@pytest.mark.parametrize("family", ["mma", "wgmma"])
@pytest.mark.parametrize("columns", [3, 137])
def test_columns_may_be_dynamic(family: str, columns: int) -> None:
    work = replace(HALF, rows=41, outputs=(plain(COLUMNS, "bias", "residual"),))
    case = Case("dynamic", work, dynamic_columns=columns)
    case.check(case.inputs(), computed(case, small_plans(work, family)[0]))


@pytest.mark.parametrize("pieces", [2, 4, 6, 8, 12, 16, 24, 32])
def test_lines_of_a_matrix_lie_in_different_banks(pieces: int) -> None:
    for row in range(16):
        places = {mma_layout.swizzled(row, piece, pieces) for piece in range(pieces)}
        assert places == set(range(pieces))
    for first in (0, 8):
        for piece in range(pieces):
            lines = range(first, first + 8)
            at = {(r * pieces + mma_layout.swizzled(r, piece, pieces)) % 8 for r in lines}
            assert len(at) == 8


@pytest.mark.parametrize(("warp_n", "run"), [(16, 4), (32, 8), (48, 4), (64, 8)])
def test_a_lane_holds_runs_of_neighbouring_columns(warp_n: int, run: int) -> None:
    assert mma_layout.run_length(warp_n, "nk") == run
    assert mma_layout.run_length(warp_n, "kn") == 2
    columns = [mma_layout.column_of(line, run) for line in range(warp_n)]
    assert sorted(columns) == list(range(warp_n))
    for quarter in range(4):  # lanes that differ in lane // 4 alone hold the same columns
        held = [columns[8 * i + 2 * quarter + e] for i in range(warp_n // 8) for e in range(2)]
        starts = held[::run]
        assert held == [start + e for start in starts for e in range(run)]


@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (8, 2), (21, 4)])
def test_every_tile_has_one_block(tiles: tuple[int, int]) -> None:
    found = [mma_layout.grouped(i, tiles, min) for i in range(tiles[0] * tiles[1])]
    assert sorted(found) == [(r, c) for r in range(tiles[0]) for c in range(tiles[1])]


def source_and_host(work: Work, plan: TilePlan, target: tvm.target.Target) -> tuple[str, str]:
    """Return the CUDA source, and the code that launches it."""
    library = library_of(work, plan, target)
    return library.mod.imports[0].inspect_source(), library.mod.inspect_source("ll")


def test_kernels_use_the_tensor_cores_and_all_of_their_shared_memory() -> None:
    plan = TilePlan(
        128, 128, 64, reg_m=64, reg_n=32, lanes=8, num_stages=3, num_warps=8, family="mma"
    )
    for dtype, name in (("float16", "f16"), ("bfloat16", "bf16")):
        work = replace(HALF, rows=ROWS, k=512, outputs=(plain(256),), dtype=dtype, out_dtype=dtype)
        source, host = source_and_host(work, plan, cuda())
        assert f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32" in source
        assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in source
        # Kernels of other types may be in the same program, which would see one array
        assert re.findall(r"extern __shared__ .* (\w+)\[", source) == [f"stages_{dtype}_ptr"]
        assert "cp.async.cg.shared.global [%0], [%1], 16" in source
        assert "cp.async.wait_group 1;" in source
        assert str((128 + 128) * 64 * 2 * 3) in host  # what is asked for at the launch
        assert "*(uint4*)(out0_ptr" in source  # results leave 16 bytes at a time
        (kernel,) = kernels(source)
        assert kernel.count("__syncthreads") == 2  # before the loop, and in it


NORMS = {
    "sum": SUM,
    "layer": Norm("layer", 1e-5, beta=True, returns_norm=True),
    "post": replace(SUM, first=POST),
    "post_sum": POST_SUM,
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("k", [512, 98])
def test_one_kernel_adds_and_normalises_rows(norm: Norm, k: int) -> None:
    work = replace(HALF, rows=ROWS, k=k, norm=norm)
    source, _ = source_and_host(work, plans(work)[-1], cuda())
    first, _ = kernels(source)
    assert divergent_barriers(first) == 0
    assert ("*(uint4*)(x_local" in first) == (k == 512)


def test_nothing_is_launched_for_no_rows() -> None:
    """TVM takes a grid of no blocks for one of one block, which would read a row."""
    work = replace(HALF, k=512, norm=SUM)
    for rows, times in ((ROWS, 1), (77, 0)):
        target = cuda().with_host(
            tvm.target.Target("llvm")
        )  # optimised: the guard has one form then
        _, host = source_and_host(replace(work, rows=rows), plans(work)[0], target)
        assert host.count("icmp sgt i64 %rows, 0") == times


def test_all_plans_of_a_gated_pair_are_emitted() -> None:
    work = replace(HALF_GATED, rows=ROWS, k=256, n=256)
    found = plans(work)
    assert len(found) > 30
    for plan in found[:: len(found) // 6]:
        assert scheduled(work, plan, cuda())


def test_ranges_mix_dot_products_and_tensor_cores() -> None:
    work = replace(HALF, rows=ROWS, k=1024, norm=SUM)
    dots = next(p for p in candidates(work, device_of(cuda()), "tir") if p.block_m == 1)
    table = PlanTable(((1, dots), (None, plans(work)[0])))
    found = kernels(cuda_source(work, table))
    assert sum("mma_sync" in kernel for kernel in found) == 1
    assert sum("__shfl_down_sync" in kernel for kernel in found) == 2  # a norm, and the products
