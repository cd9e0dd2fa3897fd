"""Schedule verbs: small rewrites that the rules are composed of.

Each verb takes a schedule and blocks or loops in it, and says in ``rewrite:`` what it turns into
what.  None of them knows a tile number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV

from ..matching.expressions import found_in
from ..tvm_ir import SBlock, SBlockRV


def block_names(func: tirx.PrimFunc) -> list[str]:
    """Return the names of the blocks of a PrimFunc in program order, the root left out."""
    return [block.name_hint for block in blocks_of(func)]


def blocks_of(func: tirx.PrimFunc) -> list[SBlock]:
    """Return the blocks of a PrimFunc in program order, the root left out."""
    return [block for block in found_in(func.body, SBlock) if block.name_hint != "root"]


def extent(sch: s_tir.Schedule, loop: LoopRV) -> int | None:
    """Return the trip count of a loop, None if it is dynamic."""
    value = sch.get(loop).extent
    return int(value) if isinstance(value, tirx.IntImm) else None


def is_reduction(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Tell whether a block adds something up."""
    return sch.get(block).init is not None


def loops_below(sch: s_tir.Schedule, block: SBlockRV, outer: LoopRV) -> list[LoopRV]:
    """Return the loops of `block` inside `outer`."""
    loops = sch.get_loops(block)
    variables = [sch.get(loop).loop_var for loop in loops]
    position = next(n for n, v in enumerate(variables) if v.same_as(sch.get(outer).loop_var))
    return loops[position + 1 :]


def element_wise_kernel(sch: s_tir.Schedule, block: SBlockRV, threads: int, lanes: int = 1) -> None:
    """Give an element-wise block a GPU kernel of its own, where a thread stores a vector.

    rewrite: ``for i, j: S(i, j)`` ->
    ``for o: bind block: for t: bind thread: for l in lanes: S(fused(o, t), l)``
    """
    *outer, last = sch.get_loops(block)
    size = extent(sch, last)
    whole = size is not None and size % lanes == 0
    last, lane = sch.split(last, [None, lanes if whole else 1])
    grid, thread = sch.split(sch.fuse(*outer, last), [None, threads])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    sch.unroll(lane)
    if whole and lanes > 1:
        store_wide(sch, block, thread)


def inline_if_possible(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Put an element-wise block into its readers, if TVM can.

    rewrite: ``for i: b[i] = f(a[i])``; ``for i: c[i] = g(b[i])`` -> ``for i: c[i] = g(f(a[i]))``
    """
    with contextlib.suppress(s_tir.ScheduleError):
        sch.compute_inline(block)


def projections(sch: s_tir.Schedule) -> list[tuple[SBlockRV, SBlockRV]]:
    """Return the (accumulation, epilogue) blocks of every projection, norms of heads left out."""
    names = block_names(sch.mod["main"])
    count = sum(name.startswith("acc") for name in names)
    ends = (f"raw{i}" if f"raw{i}" in names else f"out{i}" for i in range(count))
    return [(sch.get_sblock(f"acc{i}"), sch.get_sblock(end)) for i, end in enumerate(ends)]


def reads_along(sch: s_tir.Schedule, block: SBlockRV, which: int, axis: int) -> bool:
    """Tell whether a tensor that a block reads is contiguous along an axis of its own.

    `which` is the number of the tensor, of those that have dimensions.  Where a tensor multiplies
    itself, its region may be told once; then there is no second one.
    """
    found = sch.get(block)
    regions = [read.region for read in found.reads if read.region]
    return which < len(regions) and bool(regions[which][-1].min.same_as(found.iter_vars[axis].var))


def split_lanes(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> SBlockRV:
    """Give every lane of a vector its own partial sum, and return the block of these.

    rewrite: ``for k: acc += f(k)`` ->
    ``for l in lanes: for ko: part[l] += f(ko * lanes + l)``; ``for l: acc += part[l]``

    The one that is given adds the partial sums up then.
    """
    reduction = sch.get_loops(block)[-1]
    _, lane = sch.split(reduction, [None, lanes])
    last = len(sch.get(block).writes[0].region)  # lanes must lie side by side to fill a vector
    return sch.rfactor(lane, last)


def accumulate_lanes(sch: s_tir.Schedule, partial: SBlockRV, outer: LoopRV) -> None:
    """Keep the partial sums of lanes, moved into a loop, in a vector register.

    rewrite: ``for l in lanes: for k: part[l] += f(k, l)`` ->
    ``vector l: part[l] = 0``, ``for k: vector l: part[l] += f(k, l)``
    """
    lane, *rest = loops_below(sch, partial, outer)  # in the order of its block variables
    sch.reorder(*rest, lane)
    for index in range(len(sch.get(partial).writes)):
        sch.set_scope(partial, index, "local")
    sch.vectorize(lane)
    sch.decompose_reduction(partial, rest[0])


def unroll_all(sch: s_tir.Schedule, loops: Sequence[LoopRV]) -> None:
    """Unroll every given loop.

    rewrite: ``for i in 4: S(i)`` -> ``S(0); S(1); S(2); S(3)``
    """
    for loop in loops:
        sch.unroll(loop)


def vectorise_inner(sch: s_tir.Schedule, loop: LoopRV, lanes: int) -> LoopRV:
    """Vectorise the inside of a loop by `lanes`, if it has so many iterations; return the outside.

    rewrite: ``for j in n: S(j)`` -> ``for jo in n / lanes: vector for ji in lanes: S(jo, ji)``
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


def load_wide(sch: s_tir.Schedule, block: SBlockRV, index: int, loop: LoopRV) -> None:
    """Bring what `block` reads of its operand `index` inside a loop into registers, as a vector.

    rewrite: ``for t: for l in 8: f(x[t, l])`` -> ``for t: v[0:8] = x[t, 0:8]; for l: f(v[l])``
    """
    copy = sch.cache_read(block, index, "local", [block])
    sch.compute_at(copy, loop, preserve_unit_loops=True)
    sch.vectorize(sch.get_loops(copy)[-1])


def store_wide(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV) -> None:
    """Store what `block` writes inside a loop as a vector.

    rewrite: ``for t: for l in 8: y[t, l] = f(l)`` ->
    ``for t: for l in 8: v[l] = f(l); y[t, 0:8] = v[0:8]``
    """
    copy = sch.cache_write(block, 0, "local")
    sch.reverse_compute_at(copy, loop, preserve_unit_loops=True)
    sch.vectorize(sch.get_loops(copy)[-1])
