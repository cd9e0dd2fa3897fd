"""Rules for PrimFuncs that no pass of ours made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import tvm
from tvm import te, tirx

from relax_fusion import host_target, make_target
from relax_fusion.dlight_rules import CPUSpatialRule, ScalarMatmulRule
from relax_fusion.dlight_rules.verbs import block_names


def elementwise(rows: int, columns: int) -> tirx.PrimFunc:
    x = te.placeholder((rows, columns), "float32", "x")
    return te.create_prim_func([x, te.compute(x.shape, lambda i, j: x[i, j] + 1.0, "y")])


def matmul(m: int, dtype: str = "float16") -> tirx.PrimFunc:
    x = te.placeholder((1, m, 256), dtype, "x")
    w = te.placeholder((128, 256), dtype, "w")
    k = te.reduce_axis((0, 256), "k")
    out = te.compute((1, m, 128), lambda b, i, j: te.sum(x[b, i, k] * w[j, k], axis=k), "out")
    return te.create_prim_func([x, w, out])


def test_large_elementwise_functions_are_spread_over_the_cores() -> None:
    text = CPUSpatialRule().apply(elementwise(512, 512), host_target(), False).mod.script()
    assert "T.parallel" in text


def test_small_ones_stay_on_one_core() -> None:
    text = CPUSpatialRule().apply(elementwise(8, 8), host_target(), False).mod.script()
    assert "T.parallel" not in text


def steps_of(read: Callable[..., tirx.Expr], shape: tuple[int, ...]) -> list[str]:
    """Return the steps that are left of an exponential and one that reads it."""
    x = te.placeholder((16, 16), "float32", "x")
    first = te.compute(x.shape, lambda i, j: te.exp(x[i, j]), "first")
    func = te.create_prim_func([x, te.compute(shape, partial(read, first), "last")])
    return block_names(CPUSpatialRule().apply(func, host_target(), False).mod["main"])


def test_a_step_is_computed_where_it_is_read() -> None:
    assert steps_of(lambda first, i, j: first[i, j] * 2.0, (16, 16)) == ["last"]
    assert steps_of(lambda first, i, j: first[j, i], (16, 8)) == ["last"]


def test_no_step_is_computed_more_often_than_before() -> None:
    twice = steps_of(lambda first, i, j: first[i, j] + first[i, 15 - j], (16, 16))
    repeated = steps_of(lambda first, b, i, j: first[i, j], (4, 16, 16))
    assert twice == repeated == ["first", "last"]


def test_what_is_only_moved_is_read_where_it_lies() -> None:
    x = te.placeholder((16, 16), "float32", "x")
    moved = te.compute(x.shape, lambda i, j: x[j, i], "moved")
    last = te.compute((4, *x.shape), lambda b, i, j: moved[i, j] + moved[i, 15 - j], "last")
    func = te.create_prim_func([x, last])
    left = CPUSpatialRule().apply(func, host_target(), False).mod["main"]
    assert block_names(left) == ["last"]


def test_the_cpu_rule_takes_only_elementwise_functions_of_a_cpu() -> None:
    assert CPUSpatialRule().apply(matmul(4), host_target(), False) is None
    assert CPUSpatialRule().apply(elementwise(512, 512), make_target("h200"), False) is None


@pytest.mark.parametrize("m", [33, 512])
def test_float16_matmul_for_hopper_has_no_tensor_core_intrinsic(m: int) -> None:
    schedule = ScalarMatmulRule().apply(matmul(m), make_target("h200"), False)
    text = schedule.mod.script()
    assert "wmma" not in text and "threadIdx.x" in text


def test_the_matmul_rule_leaves_what_is_no_matmul() -> None:
    assert ScalarMatmulRule().apply(elementwise(4, 4), make_target("h200"), False) is None


def test_names_are_kept() -> None:
    out = CPUSpatialRule().apply(elementwise(512, 512), host_target(), False).mod
    assert isinstance(out, tvm.IRModule) and [g.name_hint for g in out.get_global_vars()] == [
        "main"
    ]
