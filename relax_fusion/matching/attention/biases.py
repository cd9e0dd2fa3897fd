"""What a kernel adds to the scores, or bounds them by: one tensor, as the graph adds it up."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax
from tvm.relax.expr import _update_type

from ...errors import Reason
from ...workload import BiasOp, MaskDims
from ..bounds import FAR
from ..pattern import KernelArg, guard
from ..shapes import dtype_of, same_shape, shape_of
from .aligned import Aligned
from .hiding import Reading
from .scores import Clamp, Most, Shift

Operand = tuple[KernelArg, MaskDims]
_FLOAT = "float32"


def bias_of(found: Reading) -> tuple[Operand | None, BiasOp]:
    """Return what is added to the scores, or bounds them, by steps that `hiding.read` returned.

    Several biases are one tensor of float32, made in front of the kernel.  So is a number in place
    of scores, which are nothing beside it if it is below `FAR`, or never below it.
    """
    fills = [fill for _, parts in found for fill in parts.fills]
    near = any(filler > FAR for *_, filler in fills)
    added = [at for step, parts in found if not isinstance(step, Most) for at, _ in parts.biases]
    bounds = [at for step, parts in found if isinstance(step, Most) for at, _ in parts.biases]
    count = len(bounds) + (len(fills) + len(added) if near else bool(added or fills))
    detail = f"{count} masks are added to the scores or bound them; a kernel takes one"
    guard(count < 2, Reason.ATTRIBUTE, detail)
    shifted = near and any(isinstance(step, Shift) for step, _ in found)
    guard(not shifted, Reason.ATTRIBUTE, "scores are replaced behind the largest is taken off")
    made: Operand | None = None
    for step, parts in found:
        for at, factor in parts.biases:
            term = _times(at, factor)
            made = term if made is None else _sum(made, term)
        for at, value, filler in parts.fills:
            made = _filled(at.arg(), value, filler, made, math.inf if near else 0.0)
        if isinstance(step, Clamp) and made is not None:
            made = _clamped(made, step)
    return made, "min" if bounds or near else "add"


def _times(at: Aligned, factor: float) -> Operand:
    """Return a bias as an operand, multiplied by what its sum with the scores is."""
    expr = at.at.expr
    if factor == 1.0:
        return at.arg()
    number = relax.const(factor, dtype_of(expr))
    value = relax.op.negative(expr) if factor == -1.0 else relax.op.multiply(expr, number)
    return at.arg(relax.BlockBuilder().normalize(value))


def _sum(a: Operand, b: Operand) -> Operand:
    value = _call(relax.op.add, *(_widened(each) for each in (a, b)))
    return _operand(value, a, b)


def _filled(
    mask: Operand, kept: bool, filler: float, bias: Operand | None, nothing: float
) -> Operand:
    number = relax.const(filler, _FLOAT)
    rest = relax.const(nothing, _FLOAT) if bias is None else _widened(bias)
    sides = (rest, number) if kept else (number, rest)
    return _operand(_call(relax.op.where, _shaped(mask), *sides), mask, *([bias] if bias else []))


def _clamped(bias: Operand, clamp: Clamp) -> Operand:
    value = _widened(bias)
    for end, op in zip(clamp.ends, (relax.op.maximum, relax.op.minimum), strict=True):
        value = _call(op, value, relax.const(end, _FLOAT)) if math.isfinite(end) else value
    return _operand(value, bias)


def _operand(value: relax.Expr, *of: Operand) -> Operand:
    """Return what was made of operands, with all their dimensions."""
    dims = tuple(map(any, zip(*(dims for _, dims in of), strict=True)))
    return KernelArg(value, tuple(shape_of(value) or ())), (dims[0], dims[1], dims[2], dims[3])


def _shaped(operand: Operand) -> relax.Expr:
    expr, shape = operand[0].expr, operand[0].shape or ()
    return expr if same_shape(shape_of(expr), shape) else _call(relax.op.reshape, expr, shape)


def _widened(operand: Operand) -> relax.Expr:
    expr = _shaped(operand)
    return expr if dtype_of(expr) == _FLOAT else _call(relax.op.astype, expr, _FLOAT)


def _call(op: Callable[..., relax.Call], *args: object) -> relax.Call:
    """Return a call with its type, whose operands may be calls."""
    stand_ins = [relax.Var("made", a.ty) if isinstance(a, relax.Call) else a for a in args]
    call = relax.BlockBuilder().normalize(op(*stand_ins))
    nested = [
        next((a for s, a in zip(stand_ins, args, strict=True) if given.same_as(s)), given)
        for given in call.args
    ]
    made = relax.Call(call.op, nested, call.attrs)
    _update_type(made, call.ty)
    return made
