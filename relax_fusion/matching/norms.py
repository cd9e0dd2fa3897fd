"""RMSNorm and LayerNorm: operators, and RMSNorm written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm import relax

from ..errors import Reason
from ..workload import Norm
from .constants import binary, scalar
from .pattern import BlockView, guard
from .shapes import dtype_of, known_shape, shape_of


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
    """Recognise the norm that defines `var`; refuse one that is not over the last axis."""
    if not isinstance(var, relax.Var) or var not in view.defs:
        return None
    call = view.call(var, "relax.nn.rms_norm", "relax.nn.layer_norm")
    if call is None:
        return _decomposed_rms(view, var)
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
            wide = view.call(source, "relax.astype")
            # A cast that another kernel has already made is this norm's input.
            free = isinstance(source, relax.Var) and view.is_free(source)
            if wide is not None and free and dtype_of(source) == "float32":
                covers, source = (source, *covers), wide.args[0]
            return Normed(Norm("rms", eps), var, source, gamma, None, covers, "rms_decomposed")
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
        square = mean.args[0]
        power = view.call(square, "relax.power")
        times = view.call(square, "relax.multiply")
        is_square = (
            power is not None
            and power.args[0].same_as(source)
            and scalar(view, power.args[1]) == 2.0
        ) or (times is not None and all(a.same_as(source) for a in times.args))
        squared = view.call(square, "relax.square")
        is_square = is_square or (squared is not None and squared.args[0].same_as(source))
        if is_square:
            guard(axes == [rank - 1], Reason.AXIS, f"the mean is over axes {axes}, not the last")
            return eps, (square, mean_var, rsqrt.args[0], inverse)
    return None
