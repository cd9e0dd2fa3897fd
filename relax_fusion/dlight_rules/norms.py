"""Rows with their statistics: RMSNorm, LayerNorm, softmax, sums of rows, as TVM legalises them."""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target

from ..errors import Decline, Reason
from ..estimator.limits import VECTOR_LOAD_BYTES
from ..estimator.prediction import ceil_div, next_power
from ..hardware import DeviceSpec
from ..hardware.target import device_of, is_cpu, is_gpu
from ..matching.expressions import is_number, variables_of
from ..tvm_ir import Analyzer, SBlock, SBlockRV
from ..workload import FLOAT_BYTES
from . import verbs
from .generic_matmul.matmul import generic_matmul
from .row_blocks import RowBlock, blocks_of_rows, count_rows_first, inline, is_plain
from .safe_rule import SafeRule

VECTORS_PER_THREAD = 2
"""Vector loads that a thread should have to do before a row gets more threads: two are under way
at once.  Assumed, not measured."""

MOST_ROWS = 4
"""Rows of a thread block, each of which a warp has."""

ARITHMETIC_BYTES = 4
"""Statistics are computed in numbers of this many bytes: TVM 0.27 has no vector of eight floats."""


class NormRule(SafeRule):
    """Schedule functions that gather statistics of rows, and use them on the same rows.

    On a GPU a thread block has one row: its threads read vectors, and share the statistics; rows
    for which a warp is enough, as heads of queries are, have one each, and several a block.  On a
    CPU rows are spread over the cores, and a vector of partial sums runs along each.  A row may be
    a group of channels, with all that they have in space.

    rewrite::

        for i, k: s[i] += f(x[i, k])    ->    parallel for i:
        for i, k: y[i, k] = g(x, s[i])            for k: s += f(x[i, k])
                                                  for k: y[i, k] = g(x, s)

    leaves:
        functions without a reduction, and those which reduce another axis than the last ones; on
        a GPU also those that use statistics of a width only known at run time.

    Parameters
    ----------
    together : int
        The most rows of a thread block, 1, 2 or 4.
    """

    def __init__(self, together: int = MOST_ROWS):
        super().__init__()
        self.together = together

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule, None for a function that is not of this form."""
        if not (is_gpu(target) or is_cpu(target)) or not is_plain(func):
            return None
        sch = s_tir.Schedule(func)
        inline(sch, func, every=is_gpu(target))
        count_rows_first(sch)
        blocks = blocks_of_rows(sch)
        if blocks is None:
            return None
        device = device_of(target)
        if is_gpu(target):
            return _on_gpu(sch, blocks, device, self.together) or sch
        return _on_cpu(sch, blocks, device) or sch


class RowSumRule(SafeRule):
    """Schedule a matmul that `GenericMatmulRule` leaves on a CPU: each element sums up a row.

    Rows of the result, and columns of which only the run knows how many there are, are spread over
    the cores.  Factors are computed on the way, as those of a quantised lm_head are.

    rewrite::

        for j, k: w[j, k] = f(q[j, k])                 ->    parallel for i, j:
        for i, j, k: y[i, j] += x[i, k] * w[j, k]                for k: y += x[i, k] * f(q[j, k])
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule, None for a function of another kind."""
        if not is_cpu(target) or generic_matmul(func) is None:
            return None
        sch = s_tir.Schedule(func)
        inline(sch, func, every=True)
        blocks = blocks_of_rows(sch, contiguous=False)
        if blocks is None:
            return Decline(Reason.SCHEDULE, "its steps do not agree on what a row is")
        return _on_cpu(sch, blocks, device_of(target)) or sch


def _on_gpu(
    sch: s_tir.Schedule, blocks: list[RowBlock], dev: DeviceSpec, together: int
) -> Decline | None:
    """Give every row a thread block, or a warp of one where that is enough."""
    *before, last = blocks
    if before and any(b.columns is None for b in blocks):  # 108 us on an H200, TVM's rule 70
        return Decline(Reason.SHAPE, "vectors need a number of columns known when compiling")
    widest = max(b.columns or 1 for b in blocks)
    lanes = min(_lanes(sch, b) for b in blocks)
    wanted = next_power(ceil_div(widest, lanes * VECTORS_PER_THREAD))
    threads = max(dev.warp_size, min(wanted, dev.max_threads_per_block))
    one_warp = threads == dev.warp_size
    row = _bound_rows(sch, last, together if one_warp else 1)
    several = _into_rows(sch, [block.rv for block in before], row)
    if several is not None:
        return several
    results = {p for p in sch.mod["main"].params if tirx.is_buffer_var(p)}
    for block in before:
        whole_row = block.columns != 1 and not block.reduces
        if whole_row and sch.get(block.rv).writes[0].source not in results:
            return Decline(Reason.SCHEDULE, "a row between two steps is not kept in shared memory")
        if sch.get(block.rv).writes[0].source not in results:
            in_all = one_warp and block.columns != 1  # threads have the sum that they shuffled
            sch.set_scope(block.rv, 0, "local" if in_all else "shared")
    for block in blocks:
        refused = _spread(sch, block, verbs.loops_below(sch, block.rv, row), (threads, lanes))
        if refused is not None:
            return refused
    return None


def _bound_rows(sch: s_tir.Schedule, block: RowBlock, together: int) -> LoopRV:
    """Spread rows over blocks, up to `together` that are a part of an axis in each.

    That axis is cut before all are one: of symbolic sizes, TVM proves no part of a product whole.
    """
    loops = sch.get_loops(block.rv)[: block.leading]
    sizes = [sch.get(loop).extent for loop in loops]
    places = (_cut(n, sizes) for n in (4, 2) if n <= together)
    cut = next((place for place in places if place is not None), None)
    if cut is None:
        row, _ = _row_and_columns(sch, block)
        sch.bind(row, "blockIdx.x")
        return row
    place, part = cut
    outer, inner = sch.split(loops[place], [None, part])
    sch.bind(sch.fuse(*loops[:place], outer), "blockIdx.x")
    row = sch.fuse(inner, *loops[place + 1 :])
    sch.bind(row, "threadIdx.y")
    return row


def _cut(count: int, sizes: list[tirx.Expr]) -> tuple[int, int] | None:
    """Return which axis so many rows are parts of, and of what size; None if they are of none."""
    analyzer = Analyzer()
    for place in reversed(range(len(sizes))):
        if analyzer.can_prove_equal(tirx.floormod(sizes[place], count), 0):
            return place, count
        if not isinstance(sizes[place], tirx.IntImm) or count % int(sizes[place]):
            return None
        count //= int(sizes[place])
    return None


def _row_and_columns(sch: s_tir.Schedule, block: RowBlock) -> tuple[LoopRV, list[LoopRV]]:
    """Make one loop of those that count rows."""
    loops = sch.get_loops(block.rv)
    if not block.leading:
        return sch.add_unit_loop(loops[0] if loops else block.rv), loops
    return sch.fuse(*loops[: block.leading]), loops[block.leading :]


def _lanes(sch: s_tir.Schedule, block: RowBlock) -> int:
    """Return the elements of a vector that divide the last axis, and which TVM can compute with.

    They divide the rows of what is read and written, too: padded to chunks, other rows begin in
    the middle of a vector, and TVM finds no size for one that is guarded by a symbolic end.
    """
    found = sch.get(block.rv)
    wide = [v.dom.extent for v in found.iter_vars if not is_number(v.dom.extent, 1)]
    last = int(wide[-1]) if wide and isinstance(wide[-1], tirx.IntImm) else 1
    regions = [r for r in (*found.reads, *found.writes) if _has_columns(found, r)]
    sizes = [FLOAT_BYTES.get(str(r.source.ty.dtype), 8) for r in regions]
    most = VECTOR_LOAD_BYTES // max(ARITHMETIC_BYTES, *sizes, 1)
    rows = [r.source.ty.shape[-1] for r in regions]
    ends = [int(size) if isinstance(size, tirx.IntImm) else 1 for size in rows]
    ends = [size for size in ends if size == 1 or size >= last]  # not of statistics
    return most if block.columns == 1 else math.gcd(last, most, *ends)


def _has_columns(block: SBlock, region: tirx.BufferRegion) -> bool:
    """Tell whether a region moves along the columns."""
    return bool(region.region) and block.iter_vars[-1].var in variables_of(region.region[-1].min)


def _spread(
    sch: s_tir.Schedule, block: RowBlock, loops: list[LoopRV], tile: tuple[int, int]
) -> Decline | None:
    """Spread the columns of a row over the threads, each taking vectors in turn."""
    threads, lanes = tile
    loop = sch.fuse(*loops) if loops else sch.add_unit_loop(block.rv)
    if block.columns == 1:  # one value: one thread has it
        _, thread = sch.split(loop, [None, threads])
        sch.bind(thread, "threadIdx.x")
        return None
    _, thread, lane = sch.split(loop, [None, threads, lanes])
    sch.bind(thread, "threadIdx.x")
    if lanes == 1:
        return None
    if not block.reduces:
        sch.vectorize(lane)
        return None
    sch.unroll(lane)
    for index, region in enumerate(sch.get(block.rv).reads):
        if _has_columns(sch.get(block.rv), region):
            copy = sch.cache_read(block.rv, index, "local", [block.rv])
            sch.compute_at(copy, thread, preserve_unit_loops=True)
            copied = verbs.loops_below(sch, copy, thread)
            if any(verbs.extent(sch, loop) is None for loop in copied):
                return Decline(Reason.LAYOUT, "TVM cannot tell how much of a window a vector has")
            sch.vectorize(sch.fuse(*copied))
    return None


def _fills(sch: s_tir.Schedule, block: RowBlock) -> bool:
    """Tell whether a block stores one number everywhere: TVM 0.27 stores no vector of a bfloat16.

    Like ``x - x``, it may be one only when it is simplified.
    """
    store = sch.get(block.rv).body
    return isinstance(Analyzer().simplify(store.value), tirx.FloatImm | tirx.IntImm)


def _on_cpu(sch: s_tir.Schedule, blocks: list[RowBlock], dev: DeviceSpec) -> Decline | None:
    """Spread the rows over the cores, and let vectors run along each."""
    partial = {b.rv: _partial_sums(sch, b, dev) for b in blocks if b.reduces}
    ordered = [rv for b in blocks for rv in (partial.get(b.rv), b.rv) if rv is not None]
    row, _ = _row_and_columns(sch, blocks[-1])
    several = _into_rows(sch, ordered[:-1], row)
    if several is not None:
        return several
    sch.parallel(row)  # before reductions are decomposed: their halves alone are no valid blocks
    for block in blocks:
        lanes = _vector_lanes(sch, block, dev)
        if block.reduces and partial[block.rv] is not None:
            verbs.accumulate_lanes(sch, partial[block.rv], row)
        elif not block.reduces and block.columns != 1 and not _fills(sch, block):
            verbs.vectorise_inner(sch, sch.fuse(*verbs.loops_below(sch, block.rv, row)), lanes)
    return None


def _into_rows(sch: s_tir.Schedule, blocks: list[SBlockRV], row: LoopRV) -> Decline | None:
    """Move blocks into the loop over rows that has all their readers, the last of them first.

    What nothing reads there would be computed for all rows in each.
    """
    for block in reversed(blocks):
        if not sch.get_consumers(block):
            return Decline(Reason.SCHEDULE, "it has several results")
        sch.compute_at(block, row, preserve_unit_loops=True)
    return None


def _vector_lanes(sch: s_tir.Schedule, block: RowBlock, dev: DeviceSpec) -> int:
    """Return the elements of a vector that divide the innermost columns."""
    element = max(FLOAT_BYTES.get(str(r.source.ty.dtype), 8) for r in sch.get(block.rv).writes)
    innermost = verbs.extent(sch, sch.get_loops(block.rv)[-1]) if block.columns else None
    return math.gcd(innermost or 1, dev.vector_bytes // element)


def _partial_sums(sch: s_tir.Schedule, block: RowBlock, dev: DeviceSpec) -> SBlockRV | None:
    lanes = _vector_lanes(sch, block, dev)
    return verbs.split_lanes(sch, block.rv, lanes) if lanes > 1 else None
