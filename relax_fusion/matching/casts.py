"""Casts on purpose: what a graph narrows and widens again is rounded, in a kernel too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm import relax

from ..errors import Reason
from ..workload import FLOAT_BYTES
from .pattern import BlockView, guard
from .shapes import dtype_of

_MOVES = tuple(
    f"relax.{name}"
    for name in (
        *("reshape", "permute_dims", "expand_dims", "squeeze"),
        *("split", "strided_slice", "concat", "broadcast_to"),
    )
)


def narrows(view: BlockView, expr: relax.Expr) -> bool:
    """Tell whether `expr` is a cast to a narrower float, of what was not as narrow before."""
    cast = view.call(expr, "relax.astype")
    source, width = expr, FLOAT_BYTES.get(dtype_of(expr), 0)
    while cast is not None and width:
        source = cast.args[0]
        if FLOAT_BYTES.get(dtype_of(source), 0) <= width:
            return False
        cast = view.call(source, "relax.astype", *_MOVES)
    return source is not expr


def refuse_kept_roundings(view: BlockView, covers: Sequence[relax.Var]) -> None:
    """Refuse a chain that keeps in float32 what its graph narrows and widens again."""
    inside = set(covers)
    for var in covers:
        if not narrows(view, var):
            continue
        wide = [u.name for u in _behind(view, var, inside) if _widens(view, u, var)]
        detail = f"{var.name} is rounded to {dtype_of(var)}, and read as more by {', '.join(wide)}"
        guard(not wide, Reason.DTYPE, detail)


def _behind(view: BlockView, var: relax.Var, inside: set[relax.Var]) -> Iterator[relax.Var]:
    """Yield what reads a variable inside a chain, movements of it looked through."""
    for user in view.uses(var):
        if user in inside:
            yield user
            moved = isinstance(view.defs[user], relax.Var | relax.Tuple | relax.TupleGetItem)
            if moved or view.call(user, *_MOVES) is not None:
                yield from _behind(view, user, inside)


def _widens(view: BlockView, user: relax.Var, var: relax.Var) -> bool:
    cast = view.call(user, "relax.astype") is not None
    return cast and FLOAT_BYTES.get(dtype_of(user), 0) > FLOAT_BYTES[dtype_of(var)]
