"""The blocks of a function as rows and columns, where all of them agree on the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import s_tir, tirx

from ..matching.expressions import is_number, substitute, without_offset
from ..tvm_ir import SBlock, SBlockRealize, SBlockRV, structural_equal
from . import verbs


@dataclass(frozen=True)
class RowBlock:
    """A block whose variables are those of the rows, then those of the columns."""

    rv: SBlockRV
    leading: int
    """How many of its loops count rows."""
    columns: int | None
    """How many columns there are, None if that is dynamic; 1 for a block of one value per row."""
    reduces: bool
    """Whether it adds the columns up (or takes their maximum)."""


def is_plain(func: tirx.PrimFunc) -> bool:
    """Tell whether a function is a sequence of blocks in loops of their own."""
    if not isinstance(func.body, SBlockRealize) or func.body.block.match_buffers:
        return False
    body = func.body.block.body
    for nest in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        while isinstance(nest, tirx.For) and nest.kind == tirx.ForKind.SERIAL:
            nest = nest.body
        if not isinstance(nest, SBlockRealize) or nest.block.alloc_buffers:
            return False
        parts = nest.block.body
        stores = parts.seq if isinstance(parts, tirx.SeqStmt) else [parts]
        if not all(isinstance(part, tirx.BufferStore) for part in stores):
            return False
    return True


def _children(sch: s_tir.Schedule) -> list[SBlockRV]:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def inline(sch: s_tir.Schedule, func: tirx.PrimFunc, every: bool) -> None:
    """Put element-wise blocks into their readers; unless `every`, only those with one reader."""
    results = {p for p in func.params if tirx.is_buffer_var(p)}
    for block in _children(sch):
        written = sch.get(block).writes
        if verbs.is_reduction(sch, block) or any(w.source in results for w in written):
            continue
        if every or len(sch.get_consumers(block)) == 1:
            verbs.inline_if_possible(sch, block)


def count_rows_first(sch: s_tir.Schedule) -> None:
    """Let the blocks that use statistics of a part of an axis count their rows first.

    rewrite: ``for n, c: y[n, c] = f(s[n, c // 8])`` ->
    ``for n, g, i: y[n, g * 8 + i] = f(s[n, g])``
    """
    rows_of: dict[tirx.Var, Callable[[list[tirx.Expr]], list[tirx.Expr]]] = {}
    for block in _children(sch):
        found = sch.get(block)
        if verbs.is_reduction(sch, block):
            rows_of |= {w.source: list for w in found.writes}
            continue
        read = next((r for r in found.reads if r.source in rows_of), None)
        if read is None:
            continue
        rows = rows_of[read.source]([r.min for r in read.region])
        variables = [v.var for v in found.iter_vars]
        for written in found.writes:
            places = [r.min for r in written.region]
            rows_of[written.source] = partial(_at, rows, places)
        if any(isinstance(index, tirx.FloorDiv) for index in rows):
            order = _rows_first(rows, variables)
            if order is not None:
                sch.transform_block_layout(block, tirx.IndexMap(variables, order, None))


def _at(
    rows: list[tirx.Expr], places: list[tirx.Expr], indices: list[tirx.Expr]
) -> list[tirx.Expr]:
    """Return the row of an element, by its indices instead of `places`."""
    return [substitute(row, dict(zip(places, indices, strict=True))) for row in rows]


def _rows_first(rows: list[tirx.Expr], variables: list[tirx.Var]) -> list[tirx.Expr] | None:
    """Return the variables with the rows in front, and what is left of those in parts."""
    rows = [index for index in rows if not isinstance(index, tirx.IntImm)]
    parts = {i.a: i.b for i in rows if isinstance(i, tirx.FloorDiv)}
    whole = [index for index in rows if not isinstance(index, tirx.FloorDiv)]
    if not {*parts, *whole} <= set(variables):
        return None
    return [*rows, *(v % parts[v] if v in parts else v for v in variables if v not in whole)]


def blocks_of_rows(sch: s_tir.Schedule, contiguous: bool = True) -> list[RowBlock] | None:
    """Tell rows from columns in every block; None if they do not agree or nothing is reduced.

    Where `contiguous`, the first reduction must read a tensor row by row, each value once.
    """
    children = _children(sch)
    reductions = [b for b in children if verbs.is_reduction(sch, b)]
    if not reductions:
        return None
    first = sch.get(reductions[0]).iter_vars
    rows = _sizes(v for v in first if v.iter_type == tirx.IterVar.DataPar)
    columns = _sizes(v for v in first if v.iter_type == tirx.IterVar.CommReduce)
    if contiguous and not _runs_along_memory(sch.get(reductions[0])):
        return None
    found = []
    for block in children:
        variables = sch.get(block).iter_vars
        reduces = verbs.is_reduction(sch, block)
        leading = _leading(variables, rows)
        if leading is None or len(sch.get_loops(block)) != len(variables):
            return None
        kind = tirx.IterVar.CommReduce if reduces else tirx.IterVar.DataPar
        front, back = variables[:leading], variables[leading:]
        if any(v.iter_type != tirx.IterVar.DataPar for v in front):
            return None
        if any(v.iter_type != kind and not is_number(v.dom.extent, 1) for v in back):
            return None
        width = _sizes(back)
        if width and not _same(width, columns):
            return None
        count: int | None = 1
        for size in width:
            count = count * int(size) if count and isinstance(size, tirx.IntImm) else None
        found.append(RowBlock(block, leading, count, reduces))
    return found


def _runs_along_memory(reduction: SBlock) -> bool:
    """Tell whether it reads a tensor row by row, each value once; rows may begin behind others."""
    wide = [v for v in reduction.iter_vars if not is_number(v.dom.extent, 1)]
    reduced = [v.var for v in wide if v.iter_type == tirx.IterVar.CommReduce]
    for region in reduction.reads:
        extents = {v.var: v.dom.extent for v in reduction.iter_vars}
        found = [r.min for r in region.region if not isinstance(r.min, tirx.IntImm)]
        indices = [
            digit for index in map(without_offset, found) for digit in _digits(index, extents)
        ]
        used = {i for i in indices if isinstance(i, tirx.Var)}
        if len(used) == len(indices) and all(v.var in used for v in wide):
            return bool(reduced) and indices[-1].same_as(reduced[-1])
    return False


def _digits(index: tirx.Expr, extents: Mapping[tirx.Var, tirx.Expr]) -> tuple[tirx.Expr, ...]:
    """Return the variables of ``outer * size + inner``; any other index as it is."""
    if not isinstance(index, tirx.Add) or index.b not in extents:
        return (index,)
    outer, size = index.a, extents[index.b]
    if is_number(size, 1):
        return (outer,)
    if isinstance(outer, tirx.Mul) and structural_equal(outer.b, size):
        return outer.a, index.b
    return (index,)


def _sizes(variables: Iterable[tirx.IterVar]) -> list[tirx.Expr]:
    """Return the extents of variables, but for those of one value."""
    return [v.dom.extent for v in variables if not is_number(v.dom.extent, 1)]


def _same(a: Sequence[tirx.Expr], b: Sequence[tirx.Expr]) -> bool:
    equal = structural_equal
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


def _leading(variables: Sequence[tirx.IterVar], rows: Sequence[tirx.Expr]) -> int | None:
    """Return how many of the first variables make up the rows."""
    position = 0
    for size in rows:
        while position < len(variables) and is_number(variables[position].dom.extent, 1):
            position += 1
        if position == len(variables) or not _same([variables[position].dom.extent], [size]):
            return None
        position += 1
    return position
