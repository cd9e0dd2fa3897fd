"""Numbers and signature of the attention function, unscheduled and scheduled, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.runtime import tensor

from relax_fusion.compute import description
from relax_fusion.compute.attention import attention_prim_func
from relax_fusion.dlight_rules.attention import AttentionRule
from relax_fusion.errors import LoweringError
from relax_fusion.target import host_target
from relax_fusion.tile_plan import PlanTable, TilePlan
from relax_fusion.workload import DynamicDim

from ..gpu.attention_cases import BASE, Case, cases, numpy_dtype

PLAN = PlanTable.single(TilePlan(block_m=16, block_n=64, block_k=32, lanes=16))
REGISTERS = PlanTable.single(TilePlan(16, 64, 32, reg_m=4, reg_n=32, lanes=16))
BY_LENGTH = PlanTable(
    (
        (1, TilePlan(1, 64, 32, lanes=16)),
        (16, TilePlan(8, 32, 32, reg_m=2, lanes=8)),
        (None, TilePlan(16, 64, 32, reg_m=4, reg_n=16, lanes=16)),
    )
)

ALL = cases()
SOME = [c for c in ALL if c.name in ("tail_7x65", "bottom_right_65x33", "bias_1111", "cache")]
DYNAMIC = [c for c in ALL if c.name.startswith("dynamic")]


def run(func: tirx.PrimFunc, case: Case) -> None:
    """Compile `func` for this machine, run it on the inputs of `case` and judge the result."""
    library = tvm.compile(func.with_attr("global_symbol", "main"), target=host_target())
    arrays = case.inputs()
    garbage = np.full(case.out_shape(), np.nan, numpy_dtype(case.work.out_dtype))
    out = tensor(garbage)
    length = [case.lengths[2]] if case.work.kv_prefix else []
    library["main"](*(tensor(a) for a in arrays.values()), *length, out)
    case.check(arrays, out.numpy())


def scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Apply the rule for this machine."""
    return AttentionRule().apply(func, host_target(), False).mod["main"]


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_scheduled_numbers(case: Case) -> None:
    run(scheduled(attention_prim_func(case.work, PLAN)), case)


@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_unscheduled_numbers(case: Case) -> None:
    run(attention_prim_func(case.work, PLAN), case)


@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_register_tiles(case: Case) -> None:
    run(scheduled(attention_prim_func(case.work, REGISTERS)), case)


@pytest.mark.parametrize("case", DYNAMIC, ids=lambda c: c.name)
def test_ranges_of_the_query_length(case: Case) -> None:
    run(scheduled(attention_prim_func(case.work, BY_LENGTH)), case)


def test_static_length_meets_one_range() -> None:
    func = attention_prim_func(replace(BASE, q_len=9), BY_LENGTH)
    text = func.script()
    assert "tile_r1" in text and "tile_r0" not in text and "tile_r2" not in text


def test_signature_and_attributes() -> None:
    length = DynamicDim("n")
    dims = (True, False, True, True)
    work = replace(BASE, q_len=length, kv_len=length, kv_prefix=True, bias_dims=dims)
    work = replace(work, mask_dims=dims, alibi="float32", sinks="float16")
    func = attention_prim_func(work, BY_LENGTH)
    names = ["q", "k", "v", "bias", "mask", "slopes", "sinks", "n", "out"]
    assert [p.name for p in func.params] == names
    q, k, _, bias, mask, slopes, sinks, n, out = func.params
    assert [str(p.ty.dtype) for p in (mask, slopes, sinks)] == ["bool", "float32", "float16"]
    assert [int(p.ty.shape[0]) for p in (slopes, sinks)] == [BASE.q_heads] * 2
    assert q.ty.shape[1].same_as(n) and out.ty.shape[1].same_as(n)
    assert k.ty.shape[1].name == "kv_capacity"
    assert [str(s.ty.dtype) for s in bias.ty.shape] == ["int64"] * 4
    assert int(bias.ty.shape[1]) == 1
    assert func.attrs["op_pattern"] == 8
    assert func.attrs["tirx.noalias"]
    assert description(func) == (work, BY_LENGTH)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LoweringError, match="2 key/value heads do not divide 3 query heads"):
        attention_prim_func(replace(BASE, q_heads=3), PLAN)
