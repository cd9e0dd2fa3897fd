"""RMSNorm and LayerNorm: operators, with the casts around them, and RMSNorm written out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tvm import relax

from ..errors import Reason
from ..workload import Norm
from .constants import binary, is_filled, scalar, squared
from .pattern import BlockView, guard
from .shapes import dtype_of, groups_of, known_shape, same_shape, shape_of

NORMS = ("relax.nn.rms_norm", "relax.nn.layer_norm")


@dataclass(frozen=True)
class Normed:
    """A normalisation found in the graph.

    `norm` describes it, `source` is its input (the sum, if there is one in front), `gamma` and
    `beta` its parameters, `covers` its bindings, `var` its result.
    """

    norm: Norm
    var: relax.Var
    source: relax.Expr
    gamma: relax.Expr
    beta: relax.Expr | None
    covers: tuple[relax.Var, ...]
    spelling: str


def normalisation(view: BlockView, var: relax.Expr) -> Normed | None:
    """Recognise the norm that defines `var`; refuse one that is not over the last axis.

    It may be of rows that were widened to float32, and rounded to their dtype; its gamma may be
    ``w + 1``; gamma and beta may have a row for each sequence, as adaLN's have.
    """
    if not isinstance(var, relax.Var) or var not in view.defs:
        return None
    rounding = view.call(var, "relax.astype")
    found = _operator(view, var if rounding is None else rounding.args[0])
    if found is not None and rounding is not None:
        found = _rounded(view, var, found)
    if found is None:
        return _decomposed_rms(view, var) or _modulated(view, var)
    return _with_parameters(view, found)


def is_rounded_norm(view: BlockView, var: relax.Var) -> bool:
    """Tell whether `var` is a norm that was rounded, whatever the dtype of its rows is."""
    rounding = view.call(var, "relax.astype")
    inner = rounding.args[0] if rounding is not None else None
    return inner is not None and normalisation(view, inner) is not None


def _operator(view: BlockView, var: relax.Expr) -> Normed | None:
    """Read an operator, its operands as they are."""
    call = view.call(var, *NORMS)
    if call is None or not isinstance(var, relax.Var):
        return None
    kind: Literal["rms", "layer"] = "rms" if call.op.name == "relax.nn.rms_norm" else "layer"
    source, gamma = call.args[0], call.args[1]
    shape = known_shape(source, "the normalised tensor")
    axes = [int(a) % len(shape) for a in call.attrs.axes]
    guard(axes == [len(shape) - 1], Reason.AXIS, f"the norm is over axes {axes}, not the last one")
    beta = call.args[2] if kind == "layer" else None
    if kind == "layer":
        guard(
            bool(call.attrs.center) and bool(call.attrs.scale),
            Reason.ATTRIBUTE,
            "layer_norm without center or scale",
        )
    norm = Norm(kind, float(call.attrs.epsilon), beta=beta is not None)
    return Normed(norm, var, source, gamma, beta, (var,), f"{kind}_norm")


def _rounded(view: BlockView, var: relax.Var, wide: Normed) -> Normed | None:
    """Read the norm `wide` of widened rows as one that gives `var`, of the dtype of the rows."""
    dtype, narrow = dtype_of(var), _narrow(view, wide.source, (wide.var, var))
    if narrow is None or dtype_of(wide.var) != "float32" or dtype_of(narrow[0]) != dtype:
        return None
    if dtype not in ("float16", "bfloat16"):
        return None
    source, covers = narrow
    return replace(wide, var=var, source=source, covers=covers)


def _narrow(
    view: BlockView, expr: relax.Expr, covers: tuple[relax.Var, ...]
) -> tuple[relax.Expr, tuple[relax.Var, ...]] | None:
    """Look through a cast: return what it is of, and `covers` with it if nothing else reads it."""
    cast = view.call(expr, "relax.astype")
    if cast is None or not view.memory.is_constant(cast.args[0]):
        return None
    return cast.args[0], (*_read_only_by(view, expr, covers), *covers)


def _with_parameters(view: BlockView, normed: Normed) -> Normed:
    """Look through the casts to float32 of gamma and beta, and the sum that gamma is."""
    dtype = dtype_of(normed.var)
    gamma, unit_offset, covers = _parameter(view, normed.gamma, dtype, normed.covers)
    beta = normed.beta
    if beta is not None:
        beta, shifted, more = _parameter(view, beta, dtype, covers)
        beta, covers = (normed.beta, covers) if shifted else (beta, more)
    norm = replace(normed.norm, unit_offset=unit_offset)
    return replace(normed, norm=norm, gamma=gamma, beta=beta, covers=covers)


def _parameter(
    view: BlockView, expr: relax.Expr, dtype: str, covers: tuple[relax.Var, ...]
) -> tuple[relax.Expr, bool, tuple[relax.Var, ...]]:
    """Read ``w`` or ``w + 1``, widened or not, as far as to the last tensor of `dtype`.

    Returns that tensor, whether 1 is added to it, and `covers` with what nothing else reads.
    """
    found, offset = (expr, False, covers), False
    while isinstance(expr, relax.Var):
        cast = view.call(expr, "relax.astype")
        less = None if offset else _less_one(view, expr)
        if cast is not None and dtype_of(expr) in ("float32", dtype):
            source = cast.args[0]
        elif less is not None:
            source, offset = less, True
        else:
            break
        if not view.memory.is_constant(source):
            break
        expr, covers = source, (*_read_only_by(view, expr, covers), *covers)
        if dtype_of(expr) == dtype:
            found = expr, offset, covers
    return found


def _less_one(view: BlockView, expr: relax.Expr) -> relax.Expr | None:
    """Return what `expr` is 1 more than."""
    for data, one in binary(view, expr, "relax.add"):
        if scalar(view, one) == 1.0 and same_shape(shape_of(data), shape_of(expr)):
            return data
    return None


def _read_only_by(
    view: BlockView, expr: relax.Expr, readers: tuple[relax.Var, ...]
) -> tuple[relax.Var, ...]:
    """Return a binding that `readers` alone read, nothing for one that others read too."""
    if not isinstance(expr, relax.Var) or view.escapes(expr):
        return ()
    return (expr,) if set(view.uses(expr)) <= set(readers) else ()


def _modulated(view: BlockView, var: relax.Var) -> Normed | None:
    """Recognise ``norm(x) * scale + shift`` of both as ``[b, 1, k]``, for rows ``[b, s, k]``."""
    for scaled, shift in ((var, None), *binary(view, var, "relax.add")):
        for rows, scale in binary(view, scaled, "relax.multiply"):
            if (shift is not None and view.only_user(scaled) is None) or not _is_bare(view, rows):
                continue
            found, given = normalisation(view, rows), [scale] if shift is None else [scale, shift]
            shape = known_shape(rows, "a norm")
            each = {groups_of(shape_of(p) or [], shape)[1] for p in given}
            if found is None or len(each) > 1 or 0 in each or not same_shape(shape_of(var), shape):
                continue
            norm = replace(found.norm, beta=shift is not None, each=each.pop())
            covers = tuple(dict.fromkeys((*found.covers, scaled, var)))
            spelling = f"{found.spelling}, a scale for each sequence"
            read = Normed(norm, var, found.source, scale, shift, covers, spelling)
            return _with_parameters(view, read)
    return None


def _is_bare(view: BlockView, rows: relax.Expr) -> bool:
    """Tell whether one reader has a norm over the last axis, whose gamma is 1 and beta 0."""
    cast = view.call(rows, "relax.astype")
    call = view.call(rows if cast is None else cast.args[0], *NORMS)
    if call is None or view.only_user(rows) is None:
        return False
    last = len(shape_of(call) or ()) - 1
    plain = [int(a) % (last + 1) for a in call.attrs.axes] == [last]
    values = zip(call.args[1:], (1.0, 0.0), strict=False)
    return plain and all(is_filled(view.definition(e), value) for e, value in values)


def _decomposed_rms(view: BlockView, var: relax.Var) -> Normed | None:
    """Recognise ``gamma * (x * rsqrt(mean(x^2) + eps))``, with x cast to float32 or not."""
    for scaled_x, gamma in binary(view, var, "relax.multiply"):
        covers: tuple[relax.Var, ...] = (var,)
        shape = shape_of(gamma)
        if shape is None or len(shape) != 1:
            continue
        cast = view.call(scaled_x, "relax.astype")
        if cast is not None:
            covers, scaled_x = (scaled_x, *covers), cast.args[0]
        for source, inverse in binary(view, scaled_x, "relax.multiply"):
            found = _inverse_rms(view, inverse, source)
            if found is None:
                continue
            eps, inner = found
            covers = (*inner, scaled_x, *covers)
            if dtype_of(source) == "float32":
                source, covers = _narrow(view, source, covers) or (source, covers)
            norm = Norm("rms", eps)
            read = Normed(norm, var, source, gamma, None, covers, "rms_decomposed")
            return _with_parameters(view, read)
    return None


def _inverse_rms(
    view: BlockView, inverse: relax.Expr, source: relax.Expr
) -> tuple[float, tuple[relax.Var, ...]] | None:
    """Read ``rsqrt(mean(source^2, -1, keepdims) + eps)``."""
    rsqrt = view.call(inverse, "relax.rsqrt")
    if rsqrt is None:
        return None
    for mean_var, eps_expr in binary(view, rsqrt.args[0], "relax.add"):
        eps, mean = scalar(view, eps_expr), view.call(mean_var, "relax.mean")
        if eps is None or mean is None or not mean.attrs.keepdims:
            continue
        rank = len(known_shape(source, "the normalised tensor"))
        axes = [int(a) % rank for a in mean.attrs.axis] if mean.attrs.axis is not None else []
        base = squared(view, mean.args[0])
        if base is not None and base.same_as(source):
            guard(axes == [rank - 1], Reason.AXIS, f"the mean is over axes {axes}, not the last")
            return eps, (mean.args[0], mean_var, rsqrt.args[0], inverse)
    return None
