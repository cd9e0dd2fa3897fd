"""Numbers and signature of the attention function, unscheduled and scheduled, on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.runtime import tensor

from relax_fusion.compute import attention_prim_func, build_prim_func, description
from relax_fusion.compute.activations import tanh
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.dlight_rules.cpu.vector_math import with_vector_math
from relax_fusion.errors import LoweringError
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import host_target
from relax_fusion.workload import DynamicDim
from relax_fusion.workload.reference import numpy_dtype

from ..support.attention_cases import BASE, Case, cases, shared_cases
from ..support.quick import loaded, quickly
from ..support.slow import quick_if

PLAN = PlanTable.single(
    TilePlan(block_m=16, block_n=64, block_k=32, lanes=16, family="cpu_attention")
)
REGISTERS = PlanTable.single(
    TilePlan(16, 64, 32, reg_m=4, reg_n=32, lanes=16, family="cpu_attention")
)
BY_LENGTH = PlanTable(
    (
        (1, TilePlan(1, 64, 32, lanes=16, family="cpu_attention")),
        (16, TilePlan(8, 32, 32, reg_m=2, lanes=8, family="cpu_attention")),
        (None, TilePlan(16, 64, 32, reg_m=4, reg_n=16, lanes=16, family="cpu_attention")),
    )
)

ALL = [*cases(), *shared_cases()]
NAMES = "tail_7x65", "bottom_right_65x33", "bias_1111", "cache", "shared", "shared_odd"
SOME = [c for c in ALL if c.name in NAMES]
DYNAMIC = [c for c in ALL if c.name.startswith("dynamic")]
REPEATED = ("tail_1x63", "tail_7x64", "tail_33x130", "layout_bnsh_bnsh_bnsh", "head_dim_96")
REPEATED += ("top_left_40x40", "top_left_1x70", "bottom_right_40x40", "bias_0011", "bias_1001")
REPEATED += ("mask_1001", "window_100_bottom_right", "dynamic_3x1x130", "dynamic_square")
"""Sizes and dims between those of other cases."""


def quick(some: list[Case]) -> list[Any]:
    return quick_if(lambda case: case.name not in REPEATED, some)


def compiled(func: tirx.PrimFunc) -> Callable[..., None]:
    """Compile `func` for this machine."""
    return loaded(quickly(func.with_attr("global_symbol", "main")))["main"]


def run(func: tirx.PrimFunc, case: Case) -> None:
    """Compile `func`, run it on the inputs of `case` and judge the result."""
    arrays = case.inputs()
    garbage = np.full(case.out_shape(), np.nan, numpy_dtype(case.work.out_dtype))
    out = tensor(garbage)
    length = [case.lengths[2]] if case.work.kv_prefix else []
    compiled(func)(*(tensor(a) for a in arrays.values()), *length, out)
    case.check(arrays, out.numpy())


def scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Apply the rule for this machine."""
    return FusedRule().apply(func, host_target(), False).mod["main"]


@pytest.mark.parametrize("case", quick(ALL), ids=lambda c: c.name)
def test_scheduled_numbers(case: Case) -> None:
    run(scheduled(build_prim_func(case.work, PLAN)), case)


@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_unscheduled_numbers(case: Case) -> None:
    run(build_prim_func(case.work, PLAN), case)


@pytest.mark.parametrize("case", SOME, ids=lambda c: c.name)
def test_register_tiles(case: Case) -> None:
    run(scheduled(build_prim_func(case.work, REGISTERS)), case)


@pytest.mark.parametrize("case", quick(DYNAMIC), ids=lambda c: c.name)
def test_ranges_of_the_query_length(case: Case) -> None:
    run(scheduled(build_prim_func(case.work, BY_LENGTH)), case)


def test_tensors_beyond_2_31_elements(tmp_path: Path) -> None:
    # A file with holes: positions that are not read take no memory.
    capacity, keys = (1 << 31) // BASE.head_dim + 5, 7
    stored = np.memmap(tmp_path / "kv", "float16", "w+", shape=(2, capacity, 1, BASE.head_dim))
    stored[:, :keys] = np.random.default_rng(3).standard_normal((2, keys, 1, BASE.head_dim))
    work = replace(BASE, q_len=1, q_heads=1, kv_heads=1, kv_prefix=True, dtype="float16")
    case = Case("large", replace(work, kv_len=keys), {"kv_capacity": keys})
    arrays = {**case.inputs(), "k": stored[:, :keys], "v": stored[:, :keys]}
    cache = tvm.runtime.from_dlpack(np.asarray(stored))
    out = tensor(np.full(case.out_shape(), np.nan, "float32"))
    kernel = compiled(scheduled(build_prim_func(case.work, PLAN)))
    kernel(tensor(arrays["q"]), cache, cache, keys, out)
    case.check(arrays, out.numpy())


def test_tanh_of_gpus() -> None:
    sizes = np.logspace(-8, 2.2, 5000, dtype="float32")
    values = np.array([*-sizes, *sizes, np.nan, np.inf, -np.inf, -0.0], "float32")
    x = te.placeholder(values.shape, "float32", "x")
    y = te.compute(values.shape, lambda i: tanh(x(i)), "y")
    got = tensor(np.zeros_like(values))
    compiled(te.create_prim_func([x, y]))(tensor(values), got)
    exact = np.tanh(values.astype("float64"))
    np.testing.assert_allclose(got.numpy(), exact, rtol=4 * np.finfo("float32").eps)


def test_no_library_is_called_for_single_elements() -> None:
    work = replace(BASE, softcap=5.0)
    func = with_vector_math(scheduled(build_prim_func(work, PLAN)))
    func = func.with_attr("global_symbol", "main")
    assembly = tvm.compile(func, target=host_target()).mod.inspect_source("asm")
    assert not re.search(r"\b(expf|exp2f|tanhf|powf)\b", assembly)


@pytest.mark.parametrize(("window", "causal"), [(20, "bottom_right"), (20, "top_left")])
def test_keys_that_no_query_sees_are_not_visited(window: int, causal: str) -> None:
    # NaN in a value reaches every query that its block of keys is multiplied for.
    work = replace(BASE, q_len=16, kv_len=512, window=window, causal=causal)
    case = Case("far", work)
    arrays = case.inputs()
    first = 512 - 16 - window if causal == "bottom_right" else 0
    seen = slice(first // 64 * 64, 512 if causal == "bottom_right" else 64)
    far = np.ones(512, bool)
    far[seen] = False
    hidden = {**arrays, "v": arrays["v"].copy(), "k": arrays["k"].copy()}
    hidden["v"][:, far] = hidden["k"][:, far] = np.nan
    got = tensor(np.full(case.out_shape(), np.nan, "float32"))
    compiled(scheduled(build_prim_func(work, PLAN)))(*map(tensor, hidden.values()), got)
    case.check(arrays, got.numpy())


def test_static_length_meets_one_range() -> None:
    text = scheduled(build_prim_func(replace(BASE, q_len=9), BY_LENGTH)).script()
    assert text.count('T.sblock("tile")') == 1 and "T.vectorized(T.int64(8))" in text


def test_signature_and_attributes() -> None:
    length = DynamicDim("n")
    dims = (True, False, True, True)
    work = replace(BASE, q_len=length, kv_len=length, kv_prefix=True, bias_dims=dims)
    work = replace(work, mask_dims=dims, alibi="float32", sinks="float16")
    func = build_prim_func(work, BY_LENGTH)
    names = ["q", "k", "v", "bias", "mask", "slopes", "sinks", "q_len", "out"]
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
        attention_prim_func(replace(BASE, q_heads=3), PLAN.boxes[0][1])
