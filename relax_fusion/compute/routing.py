"""The choice of experts: all steps of a row in one iteration, or in one thread."""

from __future__ import annotations

import re

from tvm import s_tir, tirx
from tvm.target import Target

from ..hardware.target import is_gpu

_ROWS = re.compile(r"_rows(\d+)")

THREADS = 32
"""Threads of a block of a GPU, each of which has a row: steps wait for no other thread."""


def scheduled(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Return the function with one loop over rows, of which ``_rows{n}`` in names tells the loops.

    A step begins where the one in front ends, for each row.
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
        block, thread = sch.split(row, [None, THREADS])
        sch.bind(block, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
    else:
        sch.parallel(row)
    outputs = {param.name for param in sch.mod["main"].params}
    for each in blocks:
        if is_gpu(target) and sch.get(each).name_hint not in outputs:
            sch.set_scope(each, 0, "local")
    return sch.mod["main"].with_attrs({"tirx.is_scheduled": 1, "op_pattern": 8})
