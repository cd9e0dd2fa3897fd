"""Norms behind projections: rows that are normalised, added to a residual, and projected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm import relax

from ..workload import Norm, PostNorm
from .constants import binary
from .norms import Normed, normalisation
from .pattern import BlockView, KernelArg, KernelOut, Match, Refused
from .projections import Prologue, Rows, norm_prologue, plain_prologue, readers_of
from .shapes import dtype_of, same_shape, shape_of


def prologues(view: BlockView, normed: Normed, readers: set[relax.Var]) -> list[Prologue]:
    """Return `norm_prologue`, behind one that also normalises what the residual is added to.

    That norm stands behind another projection, and nothing but the sum reads it.
    """
    plain = norm_prologue(view, normed, readers)
    first = _with_first(view, plain, normed.source)
    return [plain] if first is None else [first, plain]


def sum_prologues(view: BlockView, x: relax.Expr, readers: set[relax.Var]) -> list[Prologue]:
    """Return `plain_prologue`, behind one that makes x, if that is a norm plus a residual.

    The sum becomes an output of the kernel where anything else reads it; there is none where other
    projections do.
    """
    plain = plain_prologue(x)
    if not isinstance(x, relax.Var) or _operands(view, x) is None:
        return [plain]
    if any(lin.var not in readers for lin in readers_of(view, x)):
        return [plain]
    is_read = bool(set(view.uses(x)) - readers) or view.escapes(x)
    source, norm = plain.source, Norm("none", 0.0, residual=True, returns_sum=is_read)
    outs = {"x_sum": KernelOut(x, (source.rows, source.k), dtype_of(x))} if is_read else {}
    first = _with_first(view, Prologue(source, norm, {}, outs, (x,), "sum"), x)
    return [plain] if first is None else [first, plain]


def built(found: Sequence[Prologue], build: Callable[[Prologue], list[Match]]) -> list[Match]:
    """Return the matches of prologues of which there is one; refuse as the last of them."""
    matches = list[Match]()
    for before in found:
        try:
            matches += build(before)
        except Refused:
            if before is found[-1]:
                raise
    return matches


def _with_first(view: BlockView, before: Prologue, total: relax.Expr) -> Prologue | None:
    """Take along the norm that the sum in front is of; None if there is none."""
    operands = _operands(view, total)
    if before.norm is None or not before.norm.residual or operands is None:
        return None
    normed, other = operands
    x, residual = Rows.of(normed.source).arg(), Rows.of(other).arg()
    args = {**before.args, "x": x, "residual": residual, "gamma_first": KernelArg(normed.gamma)}
    first = PostNorm(normed.norm.eps, normed.norm.unit_offset)
    norm, covers = replace(before.norm, first=first), (*normed.covers, *before.covers)
    spelling = f"norm, {before.spelling}"
    return replace(before, norm=norm, args=args, covers=covers, spelling=spelling)


def _operands(view: BlockView, total: relax.Expr) -> tuple[Normed, relax.Expr] | None:
    """Read a sum of an RMSNorm that nothing else reads, and of a tensor like it."""
    for rows, other in binary(view, total, "relax.add"):
        if not isinstance(rows, relax.Var) or view.only_user(rows) is None:
            continue
        try:
            found = normalisation(view, rows)
        except Refused:
            continue
        if found is None or found.norm.kind != "rms":
            continue
        width = (shape_of(total) or [])[-1:]
        tensors = found.source, rows, other, total
        alike = all(same_shape(shape_of(t), shape_of(total)) for t in tensors)
        one_dtype = len({*map(dtype_of, (*tensors, found.gamma))}) == 1
        if alike and one_dtype and same_shape(shape_of(found.gamma), width):
            return found, other
    return None
