"""Matmuls by experts: each row by the weight that its number says, read where it lies."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.target import Target

from ..hardware.target import is_gpu
from ..matching.expressions import is_number

COLUMNS = 64
"""Columns of a row that one task computes, or a block of a GPU, a thread each."""

LANES = 16
"""Parts of a dot product that a processor adds at once."""

PRODUCT = "expert_product"
"""The name of the blocks that multiply."""

OUTPUT = "expert_output"
"""The name of the block that makes the result."""


def scheduled(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Return the function with one loop over rows and tiles of columns, everything inside of it."""
    sch = s_tir.Schedule(func)
    if not is_gpu(target):
        _split_sums(sch)
    *rows, columns = sch.get_loops(sch.get_sblock(OUTPUT))
    width = sch.get(columns).extent
    tile = min(COLUMNS, int(width)) if isinstance(width, tirx.IntImm) else COLUMNS
    outer, inner = sch.split(columns, [None, tile])
    task = sch.fuse(*rows, outer)
    if is_gpu(target):
        sch.bind(task, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
    else:
        sch.parallel(task)
    at = inner if is_gpu(target) else task
    blocks = [b for b in sch.get_child_blocks(sch.get_sblock("root")) if _name(sch, b) != OUTPUT]
    for block in reversed(blocks):
        sch.compute_at(block, at)
        sch.set_scope(block, 0, "local")
    for block in () if is_gpu(target) else blocks:
        _in_lanes(sch, block)
    return sch.mod["main"].with_attrs({"tirx.is_scheduled": 1, "op_pattern": 8})


def _name(sch: s_tir.Schedule, block: object) -> str:
    return str(sch.get(block).name_hint)


def _split_sums(sch: s_tir.Schedule) -> None:
    """Make dot products along what lies next to each other sums of `LANES` parts."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        *_, depth = sch.get_loops(block)
        name, size = _name(sch, block), sch.get(depth).extent
        if name.startswith(PRODUCT) and name.endswith("nk") and int(size) % LANES == 0:
            _, part = sch.split(depth, [None, LANES])
            sch.rfactor(part, 2)


def _in_lanes(sch: s_tir.Schedule, block: object) -> None:
    """Compute parts of a sum at once, or columns where those lie next to each other."""
    name, (_, *inside) = _name(sch, block), sch.get_loops(block)
    if is_number(sch.get(block).iter_vars[-1].dom.extent, 1):  # it has no loop over that
        return
    if name.endswith("nk_rf"):
        part, *others = inside
        sch.reorder(*others, part)
        sch.vectorize(part)
        sch.decompose_reduction(block, others[-1])
    elif name.startswith(PRODUCT) and name.endswith("kn"):
        *_, columns, depth = inside
        sch.reorder(depth, columns)
        sch.vectorize(columns)
        sch.decompose_reduction(block, depth)
