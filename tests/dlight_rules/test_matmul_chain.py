"""The rule of chains of matmuls: numbers of every kind of plan on this CPU, and its loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm.runtime import tensor
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import MatmulChainRule
from relax_fusion.errors import Decline
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import host_target, make_target
from relax_fusion.workload import DynamicDim, MatmulChain
from relax_fusion.workload.reference import unrounded

from ..support.chain_cases import ChainCase
from ..support.quick import loaded, quickly
from .test_contraction_panels import loops, multiply_adds

HOST = host_target()
BASE = MatmulChain(37, 96, 24, 56, ("nk", "nk"), (), (), "float32", "float32")
BLOCKS = TilePlan(12, 16, 32, reg_m=3, reg_n=16, lanes=8, family="chain_panels")
IN_A_ROW = TilePlan(4, 8, 24, reg_m=2, reg_n=8, lanes=8, family="chain_in_a_row")


def built(work: MatmulChain, table: PlanTable) -> tvm.runtime.Module:
    func = build_prim_func(work, table).with_attr("global_symbol", "main")
    schedule = MatmulChainRule().attempt(func, HOST)
    assert isinstance(schedule, tvm.s_tir.Schedule), schedule
    return loaded(quickly(schedule.mod))


def check(case: ChainCase, library: tvm.runtime.Module) -> None:
    arrays = case.inputs()
    out = tvm.runtime.empty(case.out_shape(), case.work.out_dtype)
    library["main"](*(tensor(a) for a in arrays.values()), out)
    case.check(arrays, out.numpy())


CASES = {
    "both_transposed": (BASE, BLOCKS),
    "sums_in_parts": (replace(BASE, k=256, r=64), replace(BLOCKS, block_k=32)),
    "as_they_lie": (replace(BASE, layouts=("kn", "kn")), replace(BLOCKS, reg_n=8, block_n=8)),
    "odd_columns": (replace(BASE, k=99, r=5, n=53), replace(BLOCKS, block_k=33)),
    "batched": (replace(BASE, batch=3, inner=("relu",)), BLOCKS),
    "half": (replace(BASE, dtype="float16", out_dtype="float32", layouts=("kn", "nk")), BLOCKS),
    "brain": (replace(BASE, dtype="bfloat16", out_dtype="bfloat16", batch=2), BLOCKS),
    "all_steps": (
        replace(BASE, r=20, inner=("bias", 0.5, "silu"), outer=("bias", 2.0, "residual")),
        BLOCKS,
    ),
    "in_a_row": (replace(BASE, rows=5, outer=(2.0, "residual")), IN_A_ROW),
    "in_a_row_kn": (
        replace(BASE, rows=5, layouts=("kn", "kn"), inner=("bias", "gelu"), dtype="float16"),
        IN_A_ROW,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    work, plan = CASES[name]
    check(ChainCase(work), built(work, PlanTable.single(plan)))


def test_dynamic_rows_in_every_range() -> None:
    work = replace(BASE, rows=DynamicDim("rows"), outer=("residual",))
    library = built(work, PlanTable(((4, IN_A_ROW), (None, BLOCKS))))
    for rows in (1, 4, 5, 12, 41):
        check(ChainCase(work, rows), library)


def test_dynamic_batch() -> None:
    work = replace(BASE, rows=DynamicDim("rows"), batch=DynamicDim("heads"))
    library = built(work, PlanTable.single(BLOCKS))
    for rows, batch in ((1, 1), (30, 3)):
        check(ChainCase(work, rows, batch), library)


def test_the_check_notices_an_intermediate_that_is_not_rounded() -> None:
    """A result of float32 shows whether the tensor between was float16."""
    work = replace(BASE, dtype="float16", out_dtype="float32")
    case = ChainCase(work)
    arrays = case.inputs()
    wide = case.reference(arrays, "float64", unrounded)
    with pytest.raises(AssertionError):
        case.check(arrays, wide.astype(np.float32))


def test_both_inner_loops_keep_their_tile_in_registers() -> None:
    target = Target({"kind": "llvm", "mcpu": "znver4"})
    work = replace(BASE, rows=64, k=256, r=32, n=256)
    plan = TilePlan(16, 32, 256, reg_m=8, reg_n=32, lanes=16, family="chain_panels")
    func = build_prim_func(work, PlanTable.single(plan)).with_attr("global_symbol", "main")
    library = tvm.compile(MatmulChainRule().apply(func, target, False).mod, target=target)
    found = [x for x in loops(library.mod.inspect_source("asm")) if multiply_adds(x) >= 16]
    inner = [x for x in found if multiply_adds(x) % 16 == 0][:2]
    assert len(inner) == 2
    for loop in inner:
        stores = [
            line for line in loop if "vmovups\t%zmm" in line and "(" in line.split("%zmm")[-1]
        ]
        assert not stores


def test_a_gpu_is_declined() -> None:
    func = build_prim_func(BASE, PlanTable.single(BLOCKS))
    assert isinstance(MatmulChainRule().attempt(func, make_target("h200")), Decline)
