"""Reductions to few numbers, in parts that cores share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax, s_tir
from tvm.target import Target

from relax_fusion import host_target, make_target
from relax_fusion.dlight_rules import NumbersRule

from ..support.generic_cases import Input, check, fused, run

op = relax.op


def by_range(x: Any) -> Any:
    least, most = op.min(x), op.max(x)
    scale = op.divide(op.subtract(most, least), relax.const(255.0))
    return op.round(op.divide(op.subtract(x, least), scale))


def by_range_steps(x: np.ndarray) -> np.ndarray:
    least, most = x.min(), x.max()
    return np.round((x - least) / ((most - least) / np.float32(255.0)))


def centred(x: Any) -> Any:
    """The second reduction is of what the first one gives."""
    left = op.subtract(x, op.mean(x))
    return op.sum(op.multiply(left, left))


CASES = {
    "even parts": (Input((96, 512)), by_range, by_range_steps, ("parallel", "vectorized")),
    "one row": (Input((1, 49152)), by_range, by_range_steps, ("parallel", "vectorized")),
    "rows that only the run knows": (
        Input(("s", 512)),
        by_range,
        by_range_steps,
        ("parallel", "vectorized"),
    ),
    "a length that only the run knows": (
        Input(("s", "t")),
        by_range,
        by_range_steps,
        ("parallel",),
    ),
    "no part is even": (Input((32771,)), by_range, by_range_steps, ("parallel",)),
    "few elements": (Input((7, 16)), by_range, by_range_steps, ("vectorized",)),
    "one behind the other": (
        Input((96, 512)),
        centred,
        lambda x: ((x - x.mean()) ** 2).sum(),
        ("parallel", "vectorized"),
    ),
    "bfloat16": (
        Input((96, 512), "bfloat16"),
        op.max,
        lambda x: x.astype("float32").max(),
        ("parallel",),
    ),
    "along another axis": (
        Input((1, 40000, 1)),
        lambda x: op.max(x, axis=1),
        lambda x: x.max(1),
        ("parallel",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    given, emit, steps, marks = CASES[name]
    func = fused((given,), emit)
    schedule = NumbersRule().attempt(func, host_target())
    assert isinstance(schedule, s_tir.Schedule)
    text = schedule.mod.script()
    assert all(f"T.{mark}" in text for mark in marks)
    arrays, got = run(schedule.mod["main"], host_target(), func)
    check(got, steps, arrays)


def test_reductions_of_the_same_parts_have_one_loop() -> None:
    parts = {"even parts": 2, "one behind the other": 3, "rows that only the run knows": 2}
    for name, loops in parts.items():
        given, emit, *_ = CASES[name]
        schedule = NumbersRule().attempt(fused((given,), emit), host_target())
        assert schedule.mod.script().count("T.parallel") == loops, name


def test_fewer_rows_than_cores() -> None:
    target = Target({**host_target().export(), "num-cores": 8})
    func = fused((Input((4, 16384)),), lambda x: op.max(x, axis=-1))
    schedule = NumbersRule().attempt(func, target)
    assert isinstance(schedule, s_tir.Schedule) and "vectorized" in schedule.mod.script()
    arrays, got = run(schedule.mod["main"], target, func)
    check(got, lambda x: x.max(-1), arrays)


def test_leaves() -> None:
    rows = fused((Input((512, 96)),), lambda x: op.sum(x, axis=-1))
    row = fused((Input((1, 96)),), lambda x: op.sum(x, axis=-1))
    spread = fused((Input((96, 96)),), op.exp)
    for func in (rows, row, spread):
        assert NumbersRule().attempt(func, host_target()) is None
    assert NumbersRule().attempt(fused((Input((96, 512)),), op.max), make_target("h200")) is None
