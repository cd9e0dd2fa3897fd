"""Reductions over threads that TVM would leave out are seen, and their schedules refused."""

from __future__ import annotations

import pytest
from tvm import s_tir, tirx
from tvm.script import tirx as T
from tvm.target import Target

from relax_fusion import make_target
from relax_fusion.dlight_rules.apply import lost_reductions, schedule_by
from relax_fusion.dlight_rules.safe_rule import SafeRule


def halved(blocks: int) -> tirx.PrimFunc:
    """Return a kernel whose thread blocks add up halves of rows, two of them a row."""

    @T.prim_func(private=True, s_tir=True)
    def func(
        x: T.Buffer((T.int64(8), T.int64(2), T.int64(32)), "float32"),
        y: T.Buffer((T.int64(8), T.int64(2)), "float32"),
    ):
        for i in T.thread_binding(T.int64(blocks), "blockIdx.x"):
            for k in T.thread_binding(T.int64(32), "threadIdx.x"):
                with T.sblock("sum"):
                    row = T.axis.spatial(T.int64(8), i // T.int64(2))
                    half = T.axis.spatial(T.int64(2), i % T.int64(2))
                    r = T.axis.reduce(T.int64(32), k)
                    with T.init():
                        y[row, half] = T.float32(0)
                    y[row, half] = y[row, half] + x[row, half, r]

    return func


class _AsItIs(SafeRule):
    """Takes a function for a kernel."""

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule:
        return s_tir.Schedule(func)


@pytest.mark.parametrize(("blocks", "lost"), [(16, 0), (15, 1)])
def test_a_sum_that_tvm_would_not_see(blocks: int, lost: int) -> None:
    func = halved(blocks)
    assert lost_reductions(func) == lost
    schedule, told = schedule_by([_AsItIs()], "main", func, make_target("h200"))
    assert (schedule is None) == bool(lost)
    reasons = [decline.detail for _, decline in told.refusals]
    assert reasons == ["1 of its reductions over threads would be lost"] * lost
