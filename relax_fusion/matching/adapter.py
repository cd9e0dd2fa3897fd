"""Adapters of low rank beside a projection: ``x W + s (x A) B`` (LoRA)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm import relax

from ..errors import Reason
from ..workload import Adapter
from .constants import binary, is_factor, scaled
from .epilogue import FusedProjection, epilogue, extended
from .linear import Linear, linear
from .movements import keeps_features, ungrouped
from .pattern import BlockView, KernelArg, Refused, guard
from .shapes import dtype_of, same_shape, shape_of

LEAST_ELEMENTS = 8
"""Kernels copy so many elements at once: rank and features are multiples of it."""


@dataclass(frozen=True)
class _LowRank:
    """``outer * ((inner * x A) B)`` and its bindings."""

    a: Linear
    b: Linear
    inner: float
    outer: float
    covers: tuple[relax.Var, ...]


def adapted(view: BlockView, lin: Linear, forbidden: set[relax.Var]) -> FusedProjection | None:
    """Recognise a projection to which an adapter of the same rows is added; None where none is.

    `lin`: the projection, whose biases may come before the sum.
    `forbidden`: results of the same kernel: a step that needs one of them cannot be part of it.
    Raises `Refused` if an adapter is added that no kernel can take along.
    """
    chain = epilogue(view, lin, forbidden, lambda steps: set(steps) <= {"bias"})
    total, chain = _sum_behind(view, chain)
    if total is None:
        return None
    for first, other in binary(view, total, "relax.add"):
        low = _low_rank(view, other) if first.same_as(chain.out) else None
        if low is None or not _reads_alike(view, low.a.x, lin.x):
            continue
        _check(lin, low)
        form = Adapter(int(low.a.n), low.a.layout, low.inner * low.outer)
        chain = replace(
            chain,
            projection=replace(chain.projection, adapter=form),
            covers=tuple(dict.fromkeys((*chain.covers, *low.covers, total))),
            out=total,
            adapter=(KernelArg(low.a.weight), KernelArg(low.b.weight)),
        )
        return extended(view, chain, forbidden)
    return None


def _sum_behind(
    view: BlockView, chain: FusedProjection
) -> tuple[relax.Var | None, FusedProjection]:
    """Return the sum that alone reads a chain, behind reshapes that only group rows anew."""
    user = view.only_user(chain.out)
    while user is not None and view.call(user, "relax.reshape") is not None:
        if not keeps_features(chain.out, user):
            break
        chain = replace(chain, covers=(*chain.covers, user), out=user)
        user = view.only_user(user)
    alike = user is not None and same_shape(shape_of(user), shape_of(chain.out))
    return (user if alike and dtype_of(user) == dtype_of(chain.linear.x) else None), chain


def _low_rank(view: BlockView, expr: relax.Expr) -> _LowRank | None:
    """Recognise two matmuls in a row, with numbers that multiply."""
    try:
        outer, expr, behind = _unscaled(view, expr)
        b = linear(view, expr)
        if b is None:
            return None
        inner, expr, between = _unscaled(view, b.x)
        a = linear(view, expr)
    except Refused:
        return None  # FuseMatmulEpilogue says why
    if a is None:
        return None
    covers = (*a.covers, *between, *b.covers, *behind)
    return _LowRank(a, b, inner, outer, covers)


def _unscaled(view: BlockView, expr: relax.Expr) -> tuple[float, relax.Expr, tuple[relax.Var, ...]]:
    """Look through factors, and reshapes that only group rows anew."""
    covers: tuple[relax.Var, ...] = ()
    factor = 1.0
    while True:
        expr, path = ungrouped(view, expr)
        covers = (*path, *covers)
        found = scaled(view, expr)
        if found is None or not isinstance(expr, relax.Var):
            return factor, expr, covers
        covers = (expr, *covers)
        expr, factor = found[0], factor * found[1]


def _reads_alike(view: BlockView, first: relax.Expr, second: relax.Expr) -> bool:
    """Tell whether two matmuls read the same rows."""
    (first, _), (second, _) = ungrouped(view, first), ungrouped(view, second)
    return first.same_as(second)


def _check(lin: Linear, low: _LowRank) -> None:
    """Refuse sizes, layouts and factors that no kernel has."""
    for what, size in (("rank of an adapter", low.a.n), ("width of a weight with one", lin.n)):
        fits = isinstance(size, int) and size % LEAST_ELEMENTS == 0
        detail = f"the {what} is {size}, must be a multiple of {LEAST_ELEMENTS}"
        guard(fits, Reason.SHAPE, detail)
    packed = any(each.packed is not None for each in (lin, low.a, low.b))
    guard(not packed, Reason.LAYOUT, "a weight beside an adapter, or one of its own, is packed")
    lies = f"the weight lies as {lin.layout}, the adapter's second one as {low.b.layout}"
    guard(lin.layout == low.b.layout, Reason.LAYOUT, f"{lies}; one kernel reads both alike")
    # Exactly in front of the tensor between the matmuls, which is rounded (R6 of numerics.md)
    exact = math.frexp(abs(low.outer))[0] == 0.5
    detail = f"{low.outer:g} multiplies the adapter's result, must be a power of two"
    guard(exact and is_factor(low.inner * low.outer), Reason.ATTRIBUTE, detail)
