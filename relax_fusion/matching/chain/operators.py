"""What each Relax operator computes, as formulas and statements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tvm import relax

from ...errors import Reason
from ...workload.graph import Combine
from ...workload.values import Const, apply, reads
from ..dequantized import refuse_dequantized
from ..operators import OPERATORS as _KNOWN
from ..operators import VIEWS
from ..pattern import guard
from ..shapes import is_one, known_shape, permutation, same_shape, shape_text
from .graph import Dims, Formula
from .writer import ChainWriter

Written = Callable[[ChainWriter, relax.Call], Formula]


def _map(name: str, writer: ChainWriter, call: relax.Call) -> Formula:
    """Write an operator on elements."""
    operands = writer.aligned(*(writer.of(a) for a in call.args))
    none = name == "divide" and operands[1].element == Const(0.0)
    guard(not none, Reason.ATTRIBUTE, "a divisor is the constant 0")
    return replace(operands[0], element=apply(name, *(f.element for f in operands)))


def _softplus(writer: ChainWriter, call: relax.Call) -> Formula:
    beta, threshold = float(call.attrs.beta), float(call.attrs.threshold)
    detail = f"a softplus has beta {beta:g} and threshold {threshold:g}; must be 1 and at least 20"
    guard(beta == 1 and threshold >= 20, Reason.ATTRIBUTE, detail)
    return _map("softplus", writer, call)


def _power(writer: ChainWriter, call: relax.Call) -> Formula:
    known = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt"}
    base, power = writer.aligned(*map(writer.of, call.args))
    exponent = power.element.value if isinstance(power.element, Const) else None
    guard(exponent in known, Reason.ATTRIBUTE, f"a power is {exponent}; must be 2, 0.5 or -0.5")
    assert exponent is not None
    return replace(base, element=apply(known[exponent], base.element))


def _clip(writer: ChainWriter, call: relax.Call) -> Formula:
    x = writer.of(call.args[0])
    least, most = (float(getattr(a, "value", a)) for a in call.args[1:3])
    return replace(x, element=apply("minimum", apply("maximum", x.element, least), most))


def _cast(writer: ChainWriter, call: relax.Call) -> Formula:
    return writer.of(call.args[0])


def _reduction(combine: Combine, writer: ChainWriter, call: relax.Call) -> Formula:
    """Write sums or maxima over some dimensions."""
    x = writer.of(call.args[0])
    axes = _axes(call.attrs.axis, len(x.dims))
    found = writer.reduced(combine, x, axes)
    kept = (d for n, d in enumerate(found.dims) if call.attrs.keepdims or n not in axes)
    return replace(found, dims=tuple(kept))


def _mean(writer: ChainWriter, call: relax.Call) -> Formula:
    x = writer.of(call.args[0])
    count = writer.count([n for a in _axes(call.attrs.axis, len(x.dims)) for n in x.dims[a]])
    total = _reduction("sum", writer, call)
    return replace(total, element=total.element / count)


def _softmax(writer: ChainWriter, call: relax.Call) -> Formula:
    """Write exponentials relative to the largest element, over their sum."""
    x = writer.stored(writer.of(call.args[0]), "float32")
    axes = _axes([call.attrs.axis], len(x.dims))
    top = apply("finite", writer.reduced("max", x, axes).element)
    weights = replace(x, element=apply("exp", x.element - top))
    weights = writer.stored(weights, "float32")
    writer.exponentials.update(read.tensor for read in reads(weights.element))
    return replace(x, element=weights.element / writer.reduced("sum", weights, axes).element)


def _norm(centred: bool, writer: ChainWriter, call: relax.Call) -> Formula:
    """Write a LayerNorm or an RMSNorm."""
    x = writer.stored(writer.of(call.args[0]))
    axes, rank = _axes(call.attrs.axes, len(x.dims)), len(x.dims)
    count = writer.count([n for a in axes for n in x.dims[a]])
    rows = x.element
    if centred:
        rows = rows - writer.reduced("sum", x, axes).element / count
    square = writer.reduced("sum", replace(x, element=rows * rows), axes).element
    value = rows * apply("rsqrt", square / count + float(call.attrs.epsilon))
    normed = replace(x, element=value)
    names = ["multiply"] * (not centred or bool(call.attrs.scale))
    names += ["add"] * (centred and bool(call.attrs.center))
    last = sorted(axes) == list(range(rank - len(axes), rank))
    detail = f"parameters of a norm lie along axes {sorted(axes)} of {rank}; must be the last"
    guard(last or not names, Reason.SHAPE, detail)
    parameters = call.args[1:] if not centred or call.attrs.scale else call.args[2:]
    for name, parameter in zip(names, parameters, strict=False):
        normed, other = writer.aligned(normed, writer.of(parameter))
        normed = replace(normed, element=apply(name, normed.element, other.element))
    return normed


def _matmul(writer: ChainWriter, call: relax.Call) -> Formula:
    refuse_dequantized(writer.view, call.args[1])
    left, right = writer.of(call.args[0]), writer.of(call.args[1])
    ranks = len(left.dims), len(right.dims)
    guard(min(ranks) > 1, Reason.SHAPE, f"ranks of a matmul are {ranks}; each must be at least 2")
    return writer.contracted(left, right)


def _transposed(writer: ChainWriter, call: relax.Call) -> Formula:
    x = writer.of(call.args[0])
    return replace(x, dims=tuple(x.dims[a] for a in permutation(call, len(x.dims))))


def _viewed(writer: ChainWriter, call: relax.Call) -> Formula:
    """Write a tensor in another shape: its axes, grouped anew; an operand has it at once."""
    shape = known_shape(call, "a result")
    if call.args[0] not in writer.inside:
        return writer.of(call.args[0], shape)
    x = writer.of(call.args[0])
    left = [name for dim in x.dims for name in dim]
    dims: list[tuple[str, ...]] = []
    for size in shape:
        dim: tuple[str, ...] = ()
        while left and not same_shape((writer.product(dim),), (size,)):
            dim = (*dim, left.pop(0))
        given = known_shape(call.args[0], "x")
        detail = (
            f"rows of {shape_text([size])} do not begin and end with those of {shape_text(given)}"
        )
        guard(same_shape((writer.product(dim),), (size,)), Reason.SHAPE, detail)
        dims.append(dim)
    guard(not left, Reason.SHAPE, "a tensor is split")
    return replace(x, dims=tuple(dims))


def _broadcast(writer: ChainWriter, call: relax.Call) -> Formula:
    x, shape = writer.of(call.args[0]), known_shape(call, "a result")
    dims: Dims = ((),) * (len(shape) - len(x.dims)) + x.dims
    wide = tuple(
        dim or (() if is_one(size) else (writer.axis(size),))
        for dim, size in zip(dims, shape, strict=True)
    )
    return replace(x, dims=wide)


def _axes(given: Any, rank: int) -> list[int]:
    return [int(a) % rank for a in (range(rank) if given is None else given)]


_REDUCING: dict[str, Written] = {
    "relax.sum": partial(_reduction, "sum"),
    "relax.max": partial(_reduction, "max"),
    "relax.mean": _mean,
    "relax.nn.softmax": _softmax,
    "relax.nn.layer_norm": partial(_norm, True),
    "relax.nn.rms_norm": partial(_norm, False),
    "relax.matmul": _matmul,
}

REDUCING = tuple(_REDUCING)
"""The operators that sum, or take a maximum."""

OPERATORS: dict[str, Written] = {
    **_REDUCING,
    **{f"relax.{name}": partial(_map, o.formula) for name, o in _KNOWN.items() if o.formula},
    "relax.nn.softplus": _softplus,
    "relax.power": _power,
    "relax.clip": _clip,
    "relax.astype": _cast,
    "relax.permute_dims": _transposed,
    **dict.fromkeys(VIEWS, _viewed),
    "relax.broadcast_to": _broadcast,
}
"""By the operator's name.  Functions of elements are those with a formula."""
