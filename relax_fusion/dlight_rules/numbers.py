"""Reductions of tensors to few numbers on the cores of a CPU, and what is computed with these."""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.target import Target

from ..compute.ranges import root_of
from ..errors import Decline
from ..hardware import DeviceSpec
from ..hardware.target import device_of, is_cpu
from ..matching.expressions import found_in, substitute
from ..tvm_ir import SBlock, SBlockRV, structural_equal
from ..workload import FLOAT_BYTES
from . import verbs
from .generic_matmul.rules import SERIAL_ELEMENTS, is_small, is_used_once
from .row_blocks import is_plain
from .safe_rule import SafeRule

PART = 16384
"""Elements that a task reduces at most: a second reduction finds them in a core's own cache."""

LEAST_PART = 1024
"""Parts of fewer elements are not worth their tasks: another size divides the tensor, or none."""

VECTORS = 4
"""Vectors of partial results: a core starts two operations in each of four cycles of latency."""


class NumbersRule(SafeRule):
    """Reduce tensors to fewer numbers than a CPU has cores in parts, which are spread over them.

    What is computed with these numbers, results among it, follows in the same function.

    rewrite::

        for i, k: s = max(s, x[i, k])    ->    parallel for part:
        for i, k: t = min(t, x[i, k])              for l in part: p[part], q[part] = max, min
        for i, k: y[i, k] = f(x, s, t)         for part: s, t = max(s, p[part]), min(t, q[part])
                                               parallel for i: for k: y[i, k] = f(x, s, t)

    leaves:
        functions with a reduction to more numbers; small reductions behind which no number is
        computed, and which have one result.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule, None for a function of another kind."""
        if not is_cpu(target) or not is_plain(func):
            return None
        dev, blocks = device_of(target), verbs.blocks_of(func)
        sums = [block for block in blocks if block.init is not None]
        if not sums or not all(_makes_few(block, dev) for block in sums):
            return None
        results = {w.source for block in blocks for w in block.writes} & set(func.params)
        has_steps = any({*_sizes(block)} == {1} for block in blocks)
        if len(results) == 1 and not has_steps and all(is_small(_sizes(b)) for b in sums):
            return None
        sch = s_tir.Schedule(func)
        _inline(sch)
        for block in sch.get_child_blocks(sch.get_sblock("root")):
            if not sch.get_loops(block):  # TVM 0.27 factors no reduction beside such a block
                sch.add_unit_loop(block)
        for block in sch.get_child_blocks(sch.get_sblock("root")):
            if not verbs.is_reduction(sch, block):
                _spread(sch, block, dev)
            else:
                _in_parts(sch, block, dev)
        return s_tir.Schedule(_together(sch.mod["main"]), enable_check=False)


def _makes_few(reduction: SBlock, dev: DeviceSpec) -> bool:
    """Tell whether a reduction is of one kind, and its results are fewer than the cores."""
    kept = [v.dom.extent for v in reduction.iter_vars if v.iter_type == tirx.IterVar.DataPar]
    sizes = [int(size) for size in kept if isinstance(size, tirx.IntImm)]
    plain = isinstance(reduction.body, tirx.BufferStore)
    return plain and len(sizes) == len(kept) and math.prod(sizes) < max(dev.sm_count, 2)


def _sizes(block: SBlock) -> list[int | None]:
    sizes = [v.dom.extent for v in block.iter_vars]
    return [int(size) if isinstance(size, tirx.IntImm) else None for size in sizes]


def _inline(sch: s_tir.Schedule) -> None:
    """Compute what is read once where it is read."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        if not verbs.is_reduction(sch, block) and is_used_once(sch, block):
            verbs.inline_if_possible(sch, block)


def _spread(sch: s_tir.Schedule, block: SBlockRV, dev: DeviceSpec) -> None:
    """Spread the elements of a step over the cores, in vectors along the last axis."""
    loops = sch.get_loops(block)
    extents = [verbs.extent(sch, loop) for loop in loops]
    *outer, last = loops
    lanes = math.gcd(extents[-1] or 1, _lanes(sch.get(block), dev))
    sizes = [size for size in extents if size is not None]
    few = len(sizes) == len(extents) and math.prod(sizes[:-1]) < dev.sm_count
    if few and not is_small(extents):
        part, last = sch.split(last, [None, _part(sizes[-1], lanes, dev)])
        outer.append(part)
        lanes = math.gcd(verbs.extent(sch, last) or 1, lanes)
    if not is_small(extents):
        sch.parallel(sch.fuse(*outer) if outer else last)
    if outer or is_small(extents):
        verbs.vectorise_inner(sch, last, lanes)


def _lanes(block: SBlock, dev: DeviceSpec) -> int:
    """Return the elements of a vector; TVM 0.27 stores no vector of one bfloat16."""
    dtypes = {str(r.source.ty.dtype) for r in (*block.reads, *block.writes)}
    wide = max(FLOAT_BYTES.get(dtype, 4) for dtype in dtypes)
    return 1 if "bfloat16" in dtypes else dev.vector_bytes // max(wide, 4)


def _part(count: int, lanes: int, dev: DeviceSpec) -> int:
    """Return how many elements are a part: a divisor of all, of whole vectors, if one is near."""
    if count < SERIAL_ELEMENTS:
        return count
    most = max(min(PART, -(-count // dev.sm_count)) // lanes, 1)
    found = next(d for d in range(most, 0, -1) if count // lanes % d == 0) * lanes
    return found if found >= LEAST_PART else most * lanes


def _in_parts(sch: s_tir.Schedule, block: SBlockRV, dev: DeviceSpec) -> None:
    """Reduce parts, each in vectors, then their results.

    rewrite: ``for k: s += x[k]`` -> ``parallel for part: for k: vector l: v[l] += x[part, k, l];
    for l: p[part] += v[l]``, ``for part: s += p[part]``
    """
    found, loops = sch.get(block), sch.get_loops(block)
    kinds = [v.iter_type for v in found.iter_vars]
    reduced = [p for p, k in zip(loops, kinds, strict=True) if k == tirx.IterVar.CommReduce]
    kept = [p for p, k in zip(loops, kinds, strict=True) if k == tirx.IterVar.DataPar]
    *extents, width = (verbs.extent(sch, loop) for loop in reduced)
    lanes = math.gcd(width or 1, VECTORS * _lanes(found, dev)) if _runs_along(found) else 1
    is_serial = is_small(_sizes(found))
    if None in extents and width is not None:  # a row is a part, of which there may be any number
        part, inner = sch.fuse(*reduced[:-1]), reduced[-1]
    else:
        every = sch.fuse(*reduced)
        count = verbs.extent(sch, every)
        size = PART if count is None else _part(count, lanes, dev)
        # TVM 0.27 loses the guard of an uneven split where a block is moved
        lanes = lanes if count is not None and count % size == 0 else 1
        part, inner = sch.split(every, [None, size])
    sch.reorder(part, *kept, inner)
    parts = sch.rfactor(part, 0)
    own = sch.get_loops(parts)
    if lanes > 1:
        vectors = verbs.split_lanes(sch, parts, lanes)
        sch.compute_at(vectors, own[len(kept)], preserve_unit_loops=True)
    if not is_serial:
        sch.parallel(own[0])  # before the reduction is decomposed: its halves are no valid blocks
    if lanes > 1:
        verbs.accumulate_lanes(sch, vectors, own[len(kept)])


def _runs_along(block: SBlock) -> bool:
    """Tell whether neighbours along the last axis that is reduced are neighbours in memory."""
    last = block.iter_vars[-1]
    ends = [region.region[-1].min for region in block.reads if region.region]
    return last.iter_type == tirx.IterVar.CommReduce and any(e.same_as(last.var) for e in ends)


def _together(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Reduce the same parts in one loop, where no reduction is of what is computed in between.

    rewrite: ``for part: p``, ``s``, ``for part: q``, ``t`` -> ``for part: p; q``, ``s``, ``t``
    """
    root = func.body.block
    made: list[tirx.Stmt] = []
    for nest in root.body.seq if isinstance(root.body, tirx.SeqStmt) else [root.body]:
        place = _place(made, nest)
        if place is None:
            made.append(nest)
            continue
        first = made[place]
        second = substitute(nest.body, {nest.loop_var: first.loop_var})
        body = tirx.SeqStmt([first.body, second])
        made[place] = tirx.For(first.loop_var, first.min, first.extent, first.kind, body)
    body = made[0] if len(made) == 1 else tirx.SeqStmt(made)
    return func.with_body(root_of(body, root.alloc_buffers))


def _place(made: list[tirx.Stmt], nest: tirx.Stmt) -> int | None:
    """Return which loop over parts may have the body of another one, too; None if there is none."""
    reads = {r.source for block in found_in(nest, SBlock) for r in block.reads}
    reads -= {w.source for block in found_in(nest, SBlock) for w in block.writes}
    alike = (i for i, other in enumerate(made) if _is_of_parts(nest) and _is_of_parts(other))
    places = [i for i in alike if structural_equal(nest.extent, made[i].extent)]
    if not places:
        return None
    between = found_in(made[places[-1] :], SBlock)
    return None if reads & {w.source for block in between for w in block.writes} else places[-1]


def _is_of_parts(nest: tirx.Stmt) -> bool:
    """Tell whether a loop reduces parts in parallel."""
    is_parallel = isinstance(nest, tirx.For) and nest.kind == tirx.ForKind.PARALLEL
    return is_parallel and any(b.init is not None for b in found_in(nest, SBlock))
