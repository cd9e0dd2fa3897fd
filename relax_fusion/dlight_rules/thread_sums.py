"""Reductions over the threads of a GPU that TVM's lowering would leave out."""

from __future__ import annotations

from tvm import ir, s_tir, tirx

from ..matching.expressions import found_in, thread_tag, variables_of
from ..transforms.modules import module_of
from ..tvm_ir import SBlockRealize

_ALL_REDUCE = ir.Op.get("tirx.tvm_thread_allreduce")


def lost_reductions(func: tirx.PrimFunc) -> int:
    """Return how many reductions over threads a kernel would lose.

    TVM takes a block for one only where its indices are affine in the loops around it.  Where they
    are not, as where the number of thread blocks is odd and the index of one is halved, each thread
    goes on with its own part of the sum, and nobody is told.
    """
    threads = {
        loop.loop_var
        for loop in found_in(func.body, tirx.For)
        if thread_tag(loop).startswith("threadIdx")
    }
    meant = sum(_reduces_over(realize, threads) for realize in found_in(func.body, SBlockRealize))
    if not meant:
        return 0
    mod = module_of({ir.GlobalVar("main"): func})
    lowered = s_tir.transform.LowerCrossThreadReduction()(mod)["main"]
    calls = found_in(lowered.body, ir.Call)
    return max(0, meant - sum(call.op.same_as(_ALL_REDUCE) for call in calls))


def _reduces_over(realize: SBlockRealize, threads: set[tirx.Var]) -> bool:
    block = realize.block
    used = {
        var
        for axis, value in zip(block.iter_vars, realize.iter_values, strict=True)
        if axis.iter_type == tirx.IterVar.CommReduce
        for var in variables_of(value)
    }
    return block.init is not None and not threads.isdisjoint(used)
