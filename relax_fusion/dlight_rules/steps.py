"""Schedule verbs: small rewrites that the rules are composed of.

Each verb takes a schedule and blocks or loops in it, and says in ``rewrite:`` what it turns into
what.  None of them knows a tile number.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV


def block_names(func: tirx.PrimFunc) -> list[str]:
    """Return the names of the blocks of a PrimFunc in program order, the root left out."""
    names: list[str] = []

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, lambda block: names.append(block.name_hint)))
    return [n for n in names if n != "root"]


def extent(sch: s_tir.Schedule, loop: LoopRV) -> int | None:
    """Return the trip count of a loop, None if it is dynamic."""
    value = sch.get(loop).extent
    return int(value) if isinstance(value, tirx.IntImm) else None


def split_lanes(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> SBlockRV:
    """Give every lane of a vector its own partial sum.

    rewrite: ``for k: acc += f(k)`` ->
    ``for l in lanes: for ko: part[l] += f(ko * lanes + l)``; ``for l: acc += part[l]``

    Returns
    -------
    SBlockRV
        The block of the partial sums; `block` is left as the one that adds them up.
    """
    reduction = sch.get_loops(block)[-1]
    _, lane = sch.split(reduction, [None, lanes])
    last = len(sch.get(block).writes[0].region)  # lanes must lie side by side to fill a vector
    return sch.rfactor(lane, last)


def unroll_all(sch: s_tir.Schedule, loops: Sequence[LoopRV]) -> None:
    """Unroll every given loop.

    rewrite: ``for i in 4: S(i)`` -> ``S(0); S(1); S(2); S(3)``
    """
    for loop in loops:
        sch.unroll(loop)


def vectorise_inner(sch: s_tir.Schedule, loop: LoopRV, lanes: int) -> LoopRV:
    """Vectorise the inside of a loop by `lanes`, if it has that many iterations.

    rewrite: ``for j in n: S(j)`` -> ``for jo in n / lanes: vector for ji in lanes: S(jo, ji)``

    Returns
    -------
    LoopRV
        The outer loop.
    """
    if lanes == 1:
        return loop
    outer, inner = sch.split(loop, [None, lanes])
    sch.vectorize(inner)
    return outer


def chain_rows(sch: s_tir.Schedule, blocks: Sequence[SBlockRV], row: LoopRV) -> None:
    """Move each of `blocks`, in order, into the row loop of their common producer.

    rewrite: ``for i: A(i)``; ``for i: B(i)``; ``for i: C(i)`` -> ``for i: A(i); B(i); C(i)``
    """
    for block in blocks:
        sch.reverse_compute_at(block, row, preserve_unit_loops=True)


def bind_flat(sch: s_tir.Schedule, loops: Sequence[LoopRV], threads: Sequence[int]) -> None:
    """Spread the iterations of `loops` over a thread block of ``(y, x)`` threads.

    rewrite: ``for i, j: S(i, j)`` -> ``for o: bind y: bind x: S(fused(o, y, x))``
    """
    fused = sch.fuse(*loops)
    _, y, x = sch.split(fused, [None, *threads])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
