"""The CPU schedule of contractions whose weights are repacked into panels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import s_tir, tirx

from ...estimator.families.cpu_tiles import CpuPlan
from ...tvm_ir import SBlockRV
from .. import steps
from .vector_transpose import is_moved, transpose_in_registers


def place_panels(
    sch: s_tir.Schedule,
    blocks: tuple[SBlockRV, SBlockRV],
    packed: Sequence[SBlockRV],
    plan: CpuPlan,
) -> SBlockRV:
    """Give tasks a panel each, which they pack and take through tiles of rows.

    rewrite::

        for panel, r, j: w_panels        ->    for panel in parallel:
        for i, j, k: acc                           for r, j: w_panels[panel, r, j]
        for i, j: out                              for tile of rows:
                                                       for k_part, i, j, k: partial
                                                       for i, j, k_part: acc += partial
                                                       for i: vectors j: out

    Returns
    -------
    SBlockRV
        The block of the partial sums.
    """
    acc, out = blocks
    k_part, _ = sch.split(sch.get_loops(acc)[-1], [None, plan.block_k])
    partial = sch.rfactor(k_part, 0)
    i, j, *inner = sch.get_loops(out)
    tile, i_reg = sch.split(i, [None, plan.reg_m])
    panel, j_reg = sch.split(j, [None, plan.reg_n])
    if plan.split_m > 1:
        part, tile = sch.split(tile, [plan.split_m, None])
        sch.reorder(panel, part, tile, i_reg, j_reg)
        panel = sch.fuse(panel, part)
    else:
        sch.reorder(panel, tile, i_reg, j_reg)
    sch.parallel(panel)
    sch.compute_at(acc, tile, preserve_unit_loops=True)
    sch.compute_at(partial, tile, preserve_unit_loops=True)
    for copied in packed:  # panels, and what they are made of
        sch.compute_at(copied, panel, preserve_unit_loops=True)
    sch.unroll(steps.vectorise_inner(sch, j_reg, plan.lanes))
    steps.unroll_all(sch, inner)
    return partial


def vectorised(
    sch: s_tir.Schedule,
    copies: Sequence[SBlockRV],
    sums: Sequence[tuple[SBlockRV, SBlockRV | None]],
    lanes: int,
) -> tirx.PrimFunc:
    """Return the function, its placed blocks in vector registers: the last step of a schedule.

    Parameters
    ----------
    copies : sequence of SBlockRV
        The blocks that repack operands.
    sums : sequence of (SBlockRV, SBlockRV or None)
        The sums, and the sums over parts of the reduction, where it is cut into such.
    """
    squares: dict[str, int] = {}
    for packed in copies:
        squares |= pack(sch, packed, lanes)
    for acc, partial in sums:
        accumulate_in_registers(sch, partial or acc, lanes)
        if partial is not None:
            add_parts(sch, acc, lanes)
    func = sch.mod["main"]
    for name, width in squares.items():
        func = transpose_in_registers(func, name, width)
    return func


def accumulate_in_registers(sch: s_tir.Schedule, partial: SBlockRV, lanes: int) -> None:
    """Keep a tile in vector registers over a part of the reduction.

    rewrite: ``for p, i, j, k: sum += x * w`` -> ``init; for k: unrolled i, p, j: vector l: sum``
    """
    p, i, j, k = sch.get_loops(partial)[-4:]
    j, lane = sch.split(j, [None, lanes])
    sch.reorder(k, i, p, j, lane)  # x[i, k] serves all vectors of its row, then makes room
    sch.set_scope(partial, 0, "local")
    sch.vectorize(lane)
    steps.unroll_all(sch, [i, p, j])
    sch.decompose_reduction(partial, k)


def add_parts(sch: s_tir.Schedule, acc: SBlockRV, lanes: int) -> None:
    """Add up the sums over parts of the reduction.

    rewrite: ``for part, p, i, j: acc += sum`` -> ``for p, i, j: init; for part: vector l: acc``
    """
    part, p, i, j = sch.get_loops(acc)[-4:]  # in the order of its block variables
    j, lane = sch.split(j, [None, lanes])
    sch.reorder(p, i, j, part, lane)
    sch.vectorize(lane)
    sch.decompose_reduction(acc, part)


def pack(sch: s_tir.Schedule, packed: SBlockRV, lanes: int) -> dict[str, int]:
    """Copy whole vectors: along the last axis where its elements lie side by side, else by squares.

    Returns
    -------
    dict of str to int
        Name and width of the blocks that copy squares, which are left to be transposed.
    """
    _, r, *parts, j = sch.get_loops(packed)[-len(sch.get(packed).iter_vars) :]
    if not steps.reads_along(sch, packed, 0, 1) or not is_moved(sch.get(packed).body.value):
        steps.vectorise_inner(sch, j, math.gcd(steps.extent(sch, j) or 1, lanes))
        return {}
    square = math.gcd(steps.extent(sch, r) or 1, steps.extent(sch, j) or 1, lanes)
    r, r_inner = sch.split(r, [None, square])
    j, j_inner = sch.split(j, [None, square])
    sch.reorder(*parts, j, r, r_inner, j_inner)
    if square == 1:
        return {}
    return {str(sch.get(sch.blockize(r_inner)).name_hint): square}
