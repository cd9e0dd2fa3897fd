"""Matmuls by experts: one loop over rows and tiles of columns, everything inside of it."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.target import Target

from ..compute import reference_prim_func
from ..estimator.tile_plan import TilePlan
from ..hardware.target import is_gpu
from ..matching.expressions import is_number
from ..workload import ExpertMatmul

_PRODUCT = "acc"
"""What the names of the statements begin with that multiply."""


def emit(work: ExpertMatmul, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernel: a tile of rows and columns is a task of a CPU, or a block of a GPU."""
    sch = s_tir.Schedule(reference_prim_func(work.graph))
    gpu = is_gpu(target)
    if plan.lanes > 1:
        _split_sums(sch, plan.lanes)
    *rows, columns = sch.get_loops(sch.get_sblock("out0"))
    tile = min(plan.block_n, work.n)
    outer, inner = sch.split(columns, [None, tile])
    if plan.block_m > 1:  # rows that share a tile of columns, whose weights stay in the caches
        tiles, row = sch.split(rows[0], [None, plan.block_m])
        sch.reorder(tiles, outer, row, *rows[1:], inner)
        task, row = sch.fuse(tiles, outer), [row, *rows[1:]][-1]
    else:
        task = row = sch.fuse(*rows, outer)
    if gpu:
        sch.bind(task, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
    else:
        sch.parallel(task)
    blocks = [b for b in sch.get_child_blocks(sch.get_sblock("root")) if _name(sch, b) != "out0"]
    for block in reversed(blocks):
        sch.compute_at(block, inner if gpu else row)
        sch.set_scope(block, 0, "local")
    depth = 1 if plan.block_m == 1 else 1 + len(rows)
    for block in () if gpu else blocks:
        _in_lanes(sch, block, depth, columns=work.layout == "kn" and tile > 1)
    return sch.mod["main"]


def _name(sch: s_tir.Schedule, block: object) -> str:
    return str(sch.get(block).name_hint)


def _split_sums(sch: s_tir.Schedule, lanes: int) -> None:
    """Make dot products along what lies next to each other sums of so many parts."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        if _name(sch, block).startswith(_PRODUCT):
            *_, depth = sch.get_loops(block)
            _, part = sch.split(depth, [None, lanes])
            sch.rfactor(part, 3)


def _in_lanes(sch: s_tir.Schedule, block: object, depth: int, columns: bool) -> None:
    """Compute parts of a sum at once, or columns where those lie next to each other.

    The block's own loops are those behind the first `depth`.
    """
    name, inside = _name(sch, block), sch.get_loops(block)[depth:]
    if is_number(sch.get(block).iter_vars[-1].dom.extent, 1):  # it has no loop over that
        return
    if name.endswith("_rf"):
        part, *others = inside
        sch.reorder(*others, part)
        sch.vectorize(part)
        sch.decompose_reduction(block, others[-1])
    elif name.startswith(_PRODUCT) and columns:
        *_, column, depth = inside
        sch.reorder(depth, column)
        sch.vectorize(column)
        sch.decompose_reduction(block, depth)
