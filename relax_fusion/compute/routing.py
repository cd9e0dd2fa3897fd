"""The choice of experts: all steps of a row in one iteration, or in one block of a GPU."""

from __future__ import annotations

import re
from math import prod

from tvm import s_tir, tirx
from tvm.target import Target

from ..hardware.target import device_of, is_gpu

_ROWS = re.compile(r"_rows(\d+)")

IN_TURN_ATTR = "relax_fusion.in_turn"
"""PrimFunc attribute: its kernel begins when the one in front has ended.  Blocks that begin early
crowd the multiprocessors that are free by then, up to 16 on one: of 512 rows they took 13 us on an
H200, of 64 they took 3."""

LEAST_THREADS, MOST_THREADS = 32, 256
"""Threads of a block of a GPU: as many as a row is wide, within these bounds."""

UNROLLED = 16
"""Elements of a row that a thread looks at without a loop, so that their loads wait together."""


def scheduled(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Return the function with one loop over rows, of which ``_rows{n}`` in names tells the loops.

    A step begins where the one in front ends, for each row.  On a GPU, a block has a row, whose
    elements are those of its threads; what a step makes for the next is in shared memory.
    """
    sch = s_tir.Schedule(func)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    rows = []
    for block in blocks:
        named, loops = _ROWS.search(sch.get(block).name_hint), sch.get_loops(block)
        count = int(named[1]) if named is not None else 1
        rows.append(sch.fuse(*loops[:count]) if count > 1 else loops[0])
    row = sch.merge(*rows) if len(rows) > 1 else rows[0]
    if is_gpu(target):
        sch.bind(row, "blockIdx.x")
        count = sch.get(row).extent
        _over_threads(sch, blocks, {param.name for param in func.params})
    else:
        sch.parallel(row)
    made = sch.mod["main"].with_attr("op_pattern", 8)
    if not is_gpu(target):
        return made.with_attr("tirx.is_scheduled", 1)
    many = isinstance(count, tirx.IntImm) and int(count) > device_of(target).sm_count
    return made.with_attr(IN_TURN_ATTR, 1) if many else made


def _over_threads(sch: s_tir.Schedule, blocks: list[object], params: set[str]) -> None:
    """Give threads the elements that a step makes of a row, or those of which it makes one.

    Of the latter, each warp goes through all by itself: warps that added up together would meet
    three times for it.
    """
    steps = [_loops(sch, block) for block in blocks]
    widest = max(prod(int(sch.get(x).extent) for x in spatial) for spatial, _ in steps)
    threads = min(max(LEAST_THREADS, 1 << (widest - 1).bit_length()), MOST_THREADS)
    lanes = LEAST_THREADS  # of a warp
    for block, (spatial, reduced) in zip(blocks, steps, strict=True):
        last, is_output = block, sch.get(block).name_hint in params
        makes_one = prod(int(sch.get(x).extent) for x in spatial) == 1
        loops = reduced if makes_one and reduced else spatial
        if loops:
            fused = sch.fuse(*loops) if len(loops) > 1 else loops[0]
            if loops is reduced:
                _, thread = sch.split(fused, [None, lanes])
            else:
                _, warp, thread = sch.split(fused, [None, threads // lanes, lanes])
                sch.bind(warp, "threadIdx.y")
            sch.bind(thread, "threadIdx.x")
            if loops is spatial and reduced:
                _, together = sch.split(reduced[0], [None, UNROLLED])
                sch.unroll(together)
                last = sch.cache_write(block, 0, "local")
                sch.reverse_compute_at(last, thread)
        if not is_output:
            sch.set_scope(last, 0, "shared")


def _loops(sch: s_tir.Schedule, block: object) -> tuple[list[object], list[object]]:
    """Return the loops of a step over what it makes of a row, and over what it makes that of."""
    _, *loops = sch.get_loops(block)
    kinds = [v.iter_type for v in sch.get(block).iter_vars][-len(loops) or None :]
    spatial = [x for x, kind in zip(loops, kinds, strict=False) if kind != tirx.IterVar.CommReduce]
    return spatial, [x for x in loops if x not in spatial]
