"""Two matmuls of which the second reads the result of the first, and the steps after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import relax

from ..errors import Reason
from ..workload import Step
from .dequantized import refuse_dequantized
from .epilogue import epilogue
from .linear import Linear, linear, untransposed
from .movements import keeps_features, ungrouped
from .norms import normalisation
from .pattern import BlockView, KernelArg, Refused, Shape, guard, is_call
from .shapes import same_shape, shape_of, static


@dataclass(frozen=True)
class Side:
    """One of the two matmuls with the steps after it.

    Parameters
    ----------
    linear : Linear
        The matmul.
    batch : sequence of PrimExpr
        Leading dimensions that its weight has too; empty for a two-dimensional one.
    steps : tuple of str or float
        As in `relax_fusion.workload.Projection`.
    args : tuple of KernelArg
        Operands of the steps, in order.
    covers : tuple of relax.Var
        The bindings of the matmul and the steps.
    out : relax.Var
        The last of them.
    dtype : str
        Of that.
    """

    linear: Linear
    batch: Shape
    steps: tuple[Step, ...]
    args: tuple[KernelArg, ...]
    covers: tuple[relax.Var, ...]
    out: relax.Var
    dtype: str


def matmul_chain(view: BlockView, var: relax.Var) -> tuple[Side, Side] | None:
    """Recognise the chain that starts at the matmul `var`.

    Refuses one whose intermediate is read by anything else.
    """
    first = _matmul(view, var)
    if first is None or _is_normed(view, first[0].x):
        return None
    inner = _with_steps(view, *first, set(), lambda steps: "residual" not in steps)
    inner, lin = _reader(view, inner)
    second = None if lin is None else _matmul(view, lin)
    if second is None or not second[0].x.same_as(inner.out) or len(first[1]) != len(second[1]):
        return None
    users = [user.name for user in view.uses(inner.out)]
    guard(not view.escapes(inner.out), Reason.LEAKED, f"{inner.out.name} is a result")
    detail = f"{inner.out.name} is read by {', '.join(users)}; an intermediate has one reader"
    guard(len(users) == 1, Reason.MULTI_USE, detail)
    return inner, _with_steps(view, *second, set(inner.covers), lambda steps: True)


def _matmul(view: BlockView, var: relax.Expr) -> tuple[Linear, Shape] | None:
    """Recognise a projection, or a matmul of two batches of matrices."""
    try:
        found = linear(view, var)
        if found is None:
            return _batched(view, var)
        return (found, ()) if found.packed is None and isinstance(found.n, int) else None
    except Refused:
        return None  # FuseMatmulEpilogue says why


def _batched(view: BlockView, var: relax.Expr) -> tuple[Linear, Shape] | None:
    """Recognise ``matmul(x, W)``, W transposed or not, where both have the same batch."""
    call = view.call(var, "relax.matmul")
    if call is None or not isinstance(var, relax.Var):
        return None
    x, weight = call.args
    shape, x_shape = shape_of(weight), shape_of(x)
    if (
        shape is None
        or x_shape is None
        or len(shape) < 3
        or not same_shape(shape[:-2], x_shape[:-2])
    ):
        return None
    refuse_dequantized(view, weight)
    k, n = (static(d, "a size of the second operand") for d in shape[-2:])
    source, layout, covers = untransposed(view, weight)
    return Linear(var, x, source, layout, n, k, (*covers, var)), shape[:-2]


def _is_normed(view: BlockView, x: relax.Expr) -> bool:
    """Tell whether a matmul reads a norm, whose kernel takes it along."""
    try:
        return normalisation(view, ungrouped(view, x)[0]) is not None
    except Refused:
        return True


def _with_steps(
    view: BlockView,
    start: Linear,
    batch: Shape,
    forbidden: set[relax.Var],
    accepts: Callable[[tuple[Step, ...]], bool],
) -> Side:
    """Follow the steps after a matmul."""
    chain = epilogue(view, start, forbidden, accepts)
    steps, made = chain.projection.epilogue, (chain.covers, chain.out, chain.out_dtype)
    return Side(start, batch, steps, chain.args, *made)


def _reader(view: BlockView, inner: Side) -> tuple[Side, relax.Var | None]:
    """Return a matmul that reads the intermediate, behind reshapes that only group rows anew."""
    users = view.uses(inner.out)
    while len(users) == 1 and not view.escapes(inner.out) and not inner.batch:
        (user,) = users
        if view.call(user, "relax.reshape") is None or not keeps_features(inner.out, user):
            break
        inner = replace(inner, covers=(*inner.covers, user), out=user)
        users = view.uses(user)
    calls = (u for u in users if is_call(view.defs[u], "relax.matmul", "relax.call_tir"))
    return inner, next(calls, None)
