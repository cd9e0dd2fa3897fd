"""Attention on tensor cores: what its kernels compute, on numpy, and the CUDA source."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import AttentionRule
from relax_fusion.dlight_rules.tensor_cores.attention import KERNEL, emit
from relax_fusion.dlight_rules.tensor_cores.attention_results import COMBINE
from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.mma_attention import copy_lanes
from relax_fusion.estimator.families.tensor_cores import tiles as mma
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import Attention, DynamicDim
from relax_fusion.workload.reference import numpy_dtype

from ..support.attention_cases import Case, in_half
from .nodes import Node
from .test_attention import cuda, divergent_barriers, kernels
from .warps_on_cpu import Block, run_kernel

CASES = {case.name: case for case in in_half()}
SMALL = CASES["float16_to_float16"].work
H200 = device_of(make_target("h200"))
LLAMA = replace(
    SMALL, batch=1, q_len=2048, kv_len=2048, q_heads=32, kv_heads=8, head_dim=128, v_dim=128
)


def plan_of(work: Attention, **changes: int) -> TilePlan:
    """Return a plan of small tiles."""
    sizes = {"block_m": 32, "block_n": 32, "reg_m": 16, "num_stages": 2, **changes}
    return TilePlan(
        **sizes,
        block_k=work.head_dim,
        reg_n=sizes["block_n"],
        lanes=copy_lanes(work),
        num_warps=sizes["block_m"] // sizes["reg_m"],
        family=mma.FAMILY,
    )


def computed(case: Case, plan: TilePlan) -> np.ndarray:
    """Return the result of a case, by its kernel on numpy."""
    work = case.work
    func = emit(work, plan, cuda())
    tensors = {name: array.copy().reshape(-1) for name, array in case.inputs().items()}
    shape = case.out_shape()
    tensors["out"] = np.full(np.prod(shape), 77, numpy_dtype(work.out_dtype))
    sizes = {"kv_len": case.lengths[2], **case.sizes}
    for buffer in func.body.block.alloc_buffers:
        size = np.prod([int(Block({}, sizes).value(Node(n))) for n in buffer.ty.shape])
        tensors[buffer.name] = np.full(size, np.nan, np.float32)
    for name in (KERNEL, *([COMBINE] if plan.split_k > 1 else [])):
        run_kernel(func, name, tensors, sizes)
    return tensors["out"].reshape(shape)


def one(case: Case) -> Case:
    """Return a case of one sequence, and of as few heads as there may be: numpy is slow."""
    work, sizes = case.work, case.sizes
    if isinstance(work.batch, DynamicDim):
        return replace(case, sizes={**sizes, "batch": 1})
    return replace(case, work=replace(work, batch=1, q_heads=2, kv_heads=1))


NAMES = (
    *("tail_7x65", "odd_dims", "layout_bnsh_bsnh_bsnh", "bfloat16_to_bfloat16"),
    *("float16_to_float32", "dynamic_1x70x33", "dynamic_no_keys", "cache_window"),
    *("mask_hides_a_row", "everything", "merged", "merged_in_turns", "merged_values"),
)


@pytest.mark.parametrize("name", NAMES)
def test_numbers(name: str) -> None:
    case = one(CASES[name])
    case.check(case.inputs(), computed(case, plan_of(case.work)), stored=True)


@pytest.mark.parametrize(
    ("changes", "head_dim"),
    [
        # Two row tiles of a warp, whose queries are loaded again for each block of keys
        ({"block_m": 32, "reg_m": 32, "num_stages": 3}, 144),
        # More stages than blocks of keys
        ({"block_m": 16, "block_n": 16, "num_stages": 4}, 24),
    ],
)
def test_numbers_of_other_tiles(changes: dict[str, int], head_dim: int) -> None:
    work = replace(SMALL, batch=1, q_len=7, kv_len=35, q_heads=3, kv_heads=1)
    case = Case("tile", replace(work, head_dim=head_dim, v_dim=48, causal="bottom_right"))
    case.check(case.inputs(), computed(case, plan_of(case.work, **changes)), stored=True)


@pytest.mark.parametrize("name", ["window_decode", "sinks_far_apart", "cache_window"])
def test_parts_of_the_keys(name: str) -> None:
    case = one(CASES[name])
    plan = plan_of(case.work, block_m=16, block_n=16, split_k=3)
    case.check(case.inputs(), computed(case, plan), stored=True)


def source_and_host(work: Attention, table: PlanTable, target: Target) -> tuple[str, str]:
    """Return the CUDA source, and the code that launches it."""
    func = build_prim_func(work, table).with_attr("global_symbol", "main")
    library = tvm.compile(AttentionRule().apply(func, target, False).mod, target=target)
    return library.mod.imports[0].inspect_source(), library.mod.inspect_source("ll")


def test_kernels_use_the_tensor_cores() -> None:
    work = replace(LLAMA, head_dim=64, v_dim=64, causal="bottom_right")
    work = replace(work, dtype="bfloat16", out_dtype="bfloat16")
    plan = plan_of(work, block_m=64, block_n=32, reg_m=32)
    source, host = source_and_host(work, PlanTable.single(plan), cuda())
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in source
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in source
    assert "cp.async.cg.shared.global [%0], [%1], 16" in source
    assert str((64 + 2 * 2 * 32) * 64 * 2) in host  # queries, and two stages
    (kernel,) = kernels(source)
    assert kernel.count("__syncthreads") == 2  # queries have come; in the loop
    assert divergent_barriers(kernel) == 0
    assert kernel.count("exp2f(") == 32 + 4  # a score each, and the rows' ratios


def test_whole_blocks_of_keys_are_not_masked() -> None:
    for length, expected in ((64, False), (63, True)):
        work = replace(SMALL, causal="none", kv_len=length)
        source, _ = source_and_host(work, PlanTable.single(plan_of(work)), cuda())
        assert ("bounds_ptr[0] =" in source) == expected


def test_ranges_mix_families() -> None:
    length = DynamicDim("n")
    work = replace(SMALL, q_len=length, kv_len=length, causal="top_left")
    plain = TilePlan(1, 32, 32, num_warps=2)
    table = PlanTable(((1, plain), (None, plan_of(work))))
    source, _ = source_and_host(work, table, cuda())
    found = kernels(source)
    assert sorted("mma_sync" in kernel for kernel in found) == [False, True]


def test_nothing_is_launched_for_no_queries() -> None:
    length = DynamicDim("n")
    for work, times in ((SMALL, 0), (replace(SMALL, q_len=length, kv_len=length), 1)):
        target = cuda().with_host(Target("llvm"))  # optimised: the guard has one form
        _, host = source_and_host(work, PlanTable.single(plan_of(SMALL)), target)
        assert host.count("icmp sgt i64 %q_len, 0") == times


def test_all_plans_are_emitted() -> None:
    work = replace(SMALL, window=9, alibi="float32")
    found = list(candidates(work, H200))
    assert {plan.family for plan in found} == {mma.FAMILY} and len(found) > 40
    for plan in found[:: len(found) // 4]:
        func = build_prim_func(work, PlanTable.single(plan))
        assert AttentionRule().apply(func, cuda(), False) is not None
