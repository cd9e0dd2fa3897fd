"""Reductions that are no rows of memory: windows, as of pools, and sums over leading axes."""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target

from ..errors import Decline, Reason
from ..hardware.target import device_of, is_cpu, is_gpu
from ..matching.expressions import variables_of
from ..tvm_ir import SBlock, SBlockRV
from ..workload import FLOAT_BYTES
from . import verbs
from .generic_matmul.rules import is_small, is_used_once
from .row_blocks import inline, is_plain
from .safe_rule import SafeRule

WINDOW = 64
"""Elements that one thread of a GPU adds up; more are spread over threads by other rules."""

THREADS = 256


class WindowRule(SafeRule):
    """Give every element of a pool or the like to one thread, with all that is reduced for it.

    On a GPU rules for rows, TVM's and ours, would give a block of threads to each element.

    rewrite::

        for i, k: t[i] = max(t[i], x[2 * i + k])   ->    for i in threads:
        for i: y[i] = t[i] + b[i]                            for k: t = max(t, x[2 * i + k])
                                                             y[i] = t + b[i]

    leaves:
        functions with no reduction or several, one of more than `WINDOW` elements, or at places
        that do not move with the element of the result; on a GPU those with several results.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule, None for a function of another kind."""
        if not (is_gpu(target) or is_cpu(target)) or not is_plain(func):
            return None
        sch = s_tir.Schedule(func)
        sums = [b for b in verbs.blocks_of(func) if b.init is not None]
        if len(sums) != 1 or not _is_window(sums[0]):
            return None
        if is_cpu(target):
            return _on_cpu(sch, device_of(target).vector_bytes)
        inline(sch, func, every=True)
        return _on_gpu(sch)


class ReductionRule(SafeRule):
    """Spread what no other rule takes over the cores of a CPU, step by step, as sums of columns.

    rewrite::

        for i, k: t[i] += x[k, i]    ->    parallel for io: for k: vector for ii: t += x[k, io, ii]
        for i: y[i] = f(t[i])              parallel for i: y[i] = f(t[i])

    leaves:
        functions without a reduction.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule, None for a function of another kind."""
        has_sums = any(block.init is not None for block in verbs.blocks_of(func))
        if not is_cpu(target) or not is_plain(func) or not has_sums:
            return None
        return _on_cpu(s_tir.Schedule(func), device_of(target).vector_bytes)


def _is_window(reduction: SBlock) -> bool:
    """Tell whether it takes few elements, at places that the element of the result moves."""
    reduced = [v for v in reduction.iter_vars if v.iter_type == tirx.IterVar.CommReduce]
    sizes = [v.dom.extent for v in reduced]
    if not all(isinstance(size, tirx.IntImm) for size in sizes):
        return False
    places = [r.min for region in reduction.reads for r in region.region]
    moved = [variables_of(p) for p in places if not isinstance(p, tirx.Var)]
    slides = any(not found.isdisjoint(v.var for v in reduced) for found in moved)
    return slides and math.prod(map(int, sizes)) <= WINDOW


def _on_gpu(sch: s_tir.Schedule) -> s_tir.Schedule | Decline:
    """Bind the elements of the last step, and compute the others where it reads them."""
    *before, last = sch.get_child_blocks(sch.get_sblock("root"))
    thread = sch.fuse(*_spatial(sch, last))
    grid, thread = sch.split(thread, [None, THREADS])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    for block in reversed(before):
        if not sch.get_consumers(block):
            return Decline(Reason.SCHEDULE, "it has several results")
        sch.compute_at(block, thread, preserve_unit_loops=True)
        for index in range(len(sch.get(block).writes)):
            sch.set_scope(block, index, "local")
    return sch


def _spatial(sch: s_tir.Schedule, block: SBlockRV) -> list[LoopRV]:
    """Return the loops in front of the first one that reduces."""
    loops = sch.get_loops(block)
    kinds = [v.iter_type for v in sch.get(block).iter_vars]
    first = next((i for i, k in enumerate(kinds) if k != tirx.IterVar.DataPar), len(loops))
    return loops[:first] or [sch.add_unit_loop(loops[0] if loops else block)]


def _on_cpu(sch: s_tir.Schedule, vector_bytes: int) -> s_tir.Schedule | Decline:
    """Spread the loops of each step over the cores, and let vectors run along the last."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        if not verbs.is_reduction(sch, block) and is_used_once(sch, block):
            verbs.inline_if_possible(sch, block)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        loops = sch.get_loops(block)
        if len(loops) != len(sch.get(block).iter_vars):
            return Decline(Reason.SCHEDULE, "a loop is no variable of its block")
        extents = [verbs.extent(sch, loop) for loop in loops]
        spatial = _spatial(sch, block)
        reduced = loops[len(spatial) :]
        *outer, last = spatial
        dtypes = {str(r.source.ty.dtype) for r in sch.get(block).writes}
        wide = vector_bytes // max(FLOAT_BYTES.get(dtype, 8) for dtype in dtypes)
        # TVM 0.27 stores no vector of one bfloat16, as sums begin with
        lanes = 1 if "bfloat16" in dtypes else math.gcd(verbs.extent(sch, last) or 1, wide)
        if reduced and lanes > 1 and not is_small(extents):
            last, lane = sch.split(last, [None, lanes])
            sch.reorder(last, *reduced, lane)
            sch.parallel(sch.fuse(*outer, last))
            sch.vectorize(lane)
        elif not is_small(extents):
            sch.parallel(sch.fuse(*outer) if outer else last)
    return sch
