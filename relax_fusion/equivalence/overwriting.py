"""Operands that are overwritten: what a kernel reads at its place is not what the chain read.

Which tensors share memory is worked out here once more, apart from `relax_fusion.matching.effects`,
by which matchers and the order of kernels go: only names, views and in-place calls are followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from tvm import relax

from ..matching.effects import IN_PLACE, VIEWS, free_vars
from ..matching.pattern import BlockView, is_call
from ..matching.rebuild import order
from .region import Region

Roots: TypeAlias = frozenset[Any]

_NAMES = relax.Var | relax.Tuple | relax.TupleGetItem


def writers_of(view: BlockView) -> list[relax.Var]:
    """Return the in-place calls of a block."""
    return [b.var for b in view.bindings if is_call(b.value, *IN_PLACE)]


def overwritten(view: BlockView, region: Region, writers: list[relax.Var]) -> str | None:
    """Say which operand has another value where the kernel stands; None if none has."""
    if not writers:
        return None
    places = [view.index[v] for v in region.match.covers]
    reads = list(_reads(view, region))
    places += [at for at, _ in reads]
    between = [w for w in writers if min(places) < view.index[w] < max(places)]
    if not between:
        return None
    known: dict[relax.Var, Roots] = {}
    for binding in view.bindings:  # in order, so that no recursion is as deep as the block
        _roots(view, binding.var, known)
    changed = {w: _written(view, w, known) for w in between}
    clashes = [
        (w, at, r) for w in between for at, r in reads if changed[w] & _roots(view, r, known)
    ]
    in_order = order(view, [region.match]) if clashes else None
    if in_order is None:
        return None
    new = {item: n for n, item in enumerate(in_order) if isinstance(item, int)}
    kernel = next(n for n, item in enumerate(in_order) if not isinstance(item, int))
    for writer, at, read in clashes:
        number = view.index[writer]
        if (at < number) != (kernel < new.get(number, kernel)):
            when = "after" if at < number else "before"
            return f"{read.name} is read {when} {writer.name} writes its memory"
    return None


def _reads(view: BlockView, region: Region) -> Iterator[tuple[int, relax.Var]]:
    """Yield where leaves are read; another name, or a tuple, reads nothing itself."""
    named = {v: e for v, e in region.bindings if isinstance(e, _NAMES)}
    for var, value in region.bindings:
        stack = [] if var in named else list(free_vars(value))
        while stack:
            read = stack.pop()
            stack += free_vars(named[read]) if read in named else ()
            if read in region.leaves:
                yield view.index[var], read


def _written(view: BlockView, writer: relax.Var, known: dict[relax.Var, Roots]) -> Roots:
    """Return the tensors that an in-place call writes."""
    return _roots(view, view.defs[writer], known)


def _roots(view: BlockView, expr: relax.Expr, known: dict[relax.Var, Roots]) -> Roots:
    """Return the tensors whose memory a value may be in."""
    if isinstance(expr, relax.Var):
        if expr not in known:
            known[expr] = frozenset([expr])  # its own, unless its binding says otherwise
            if expr in view.defs:
                known[expr] = _roots(view, view.defs[expr], known) or known[expr]
        return known[expr]
    if isinstance(expr, relax.Tuple):
        return _union(_roots(view, f, known) for f in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        inner = _roots(view, expr.tuple_value, known)
        whole = inner == frozenset([expr.tuple_value])
        return frozenset([(expr.tuple_value, int(expr.index))]) if whole else inner
    if is_call(expr, *IN_PLACE):
        packed = expr.op.name == "relax.call_inplace_packed"
        args = expr.args[1:] if packed else expr.args[1].fields
        indices = [int(i) for i in expr.attrs.inplace_indices]
        return _union(_roots(view, args[i], known) for i in indices if i >= 0)
    if is_call(expr, *VIEWS):
        return _roots(view, expr.args[0], known)
    return frozenset()


def _union(found: Any) -> Roots:
    return frozenset().union(*found)
