"""Which rows of its operands rows of a result are made of, operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tvm import relax, tirx

from ..matching.bindings import items_of
from ..matching.expressions import variables_of
from ..matching.operators import VIEWS, named
from ..matching.pattern import is_call
from ..matching.shapes import is_one, permutation, product, same_shape, shape_of
from ..tvm_ir import Analyzer
from .rewriter import ITEM


@dataclass(frozen=True)
class Part:
    """Rows of an axis of a tensor: the `extent` ones from `begin` on, or those that a tensor says.

    `size` is how many there are.
    """

    source: relax.Var
    axis: int
    size: tirx.Expr
    extent: tirx.Expr
    begin: tirx.Expr | None = None
    by_number: relax.Call | None = None

    @property
    def is_last(self) -> bool:
        """Whether the rows are the last."""
        return self.begin is not None and same_shape([self.begin + self.extent], [self.size])

    def of(self, expr: relax.Expr, axis: int) -> relax.Expr:
        """Return the same rows of another tensor."""
        if self.by_number is not None:
            _, indices = self.by_number.args
            return relax.op.take(expr, indices, axis, self.by_number.attrs.mode)
        end = Analyzer().simplify(self.begin + self.extent)
        return relax.op.strided_slice(expr, [axis], [self.begin], [end], assume_inbound=True)


def part_of(binding: relax.Binding, sizes: Analyzer) -> Part | None:
    """Read a slice of neighbouring rows, or of rows by number; None for anything else."""
    call = binding.value
    if not is_call(call, "relax.strided_slice", "relax.take"):
        return None
    shape, after = shape_of(call.args[0]), shape_of(binding.var)
    is_read = isinstance(call.args[0], relax.Var) and isinstance(binding, relax.VarBinding)
    if not is_read or shape is None or after is None or len(shape) != len(after):
        return None
    if is_call(call, "relax.take"):
        axis = None if call.attrs.axis is None else int(call.attrs.axis) % len(shape)
        if axis is None or sizes.can_prove(after[axis] >= shape[axis]):
            return None
        return Part(call.args[0], axis, shape[axis], after[axis], by_number=call)
    axes, begins, _, *strides = ([*arg.fields] for arg in call.args[1:])
    if len(axes) != 1 or any(not is_one(s) for given in strides for s in given):
        return None
    axis, begin = int(axes[0]) % len(shape), begins[0]
    if isinstance(begin, tirx.IntImm) and int(begin) < 0:
        begin = Analyzer().simplify(begin + shape[axis])
    return Part(call.args[0], axis, shape[axis], after[axis], begin)


Value: TypeAlias = relax.Call | relax.TupleGetItem
AxesOf: TypeAlias = Callable[[Value, int, Part], "dict[int, int] | None"]
"""Takes an operator and an axis of its result; returns the axes of operands that have these rows,
by the operand's number, where those are all that is read of them; None if it mixes rows."""


def operands_of(value: relax.Expr) -> list[relax.Expr]:
    """Return what a value is made of, the fields of a tuple among them."""
    if not isinstance(value, relax.Call):
        return [value.tuple_value] if isinstance(value, relax.TupleGetItem) else []
    first = value.args[0] if value.args else None
    return items_of(first.fields) if isinstance(first, relax.Tuple) else items_of(value.args)


def rebuilt(value: Value, operands: list[relax.Expr], axis: int, part: Part) -> relax.Expr:
    """Return an operator of other operands, which have a part of the rows."""
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(operands[0], value.index)
    attrs = value.attrs
    if is_call(value, "relax.reshape", "relax.squeeze", "relax.broadcast_to"):
        shape = shape_of(value) or []
        shape[axis] = part.extent
        # A squeeze would take the axis of one row as well
        same = relax.op.broadcast_to if is_call(value, "relax.broadcast_to") else relax.op.reshape
        return same(operands[0], shape)
    if is_call(value, "relax.arange"):
        start, _, step = value.args
        first = start + part.begin * step
        return relax.op.arange(first, first + part.extent * step, step, attrs.dtype)
    if is_call(value, *_ATTENTION) and attrs.causal_mask is not None:
        last = {"causal_mask": "BottomRight", "window_size": attrs.window_size}
        return relax.op.nn.attention(*operands[:3], *operands[3:4] or [None], attrs.scale, **last)
    args = [relax.Tuple(operands)] if isinstance(value.args[0], relax.Tuple) else operands
    return relax.Call(value.op, args, attrs, value.ty_args)


def _elements(value: Value, axis: int, _: Part) -> dict[int, int] | None:
    """Of operands that are broadcast to one shape, counted from its end."""
    shape, found = shape_of(value), {}
    for i, operand in enumerate(operands_of(value)):
        if not isinstance(operand.ty, relax.TensorType):
            continue
        own = shape_of(operand)
        if own is None or shape is None:
            return None
        at = axis - len(shape) + len(own)
        if at >= 0 and not is_one(own[at]):
            found[i] = at
            if not same_shape([own[at]], [shape[axis]]):
                return None
    return found


def _product(value: Value, axis: int, part: Part) -> dict[int, int] | None:
    """Of a matmul: rows of the first operand, or matrices of both."""
    first, rank = shape_of(value.args[0]), len(shape_of(value) or ())
    if first is None or len(first) < 2 or len(shape_of(value.args[1]) or ()) < 2:
        return None
    if axis == rank - 2:
        return {0: len(first) - 2}
    return _elements(value, axis, part) if axis < rank - 2 else None


def _attention(value: Value, axis: int, part: Part) -> dict[int, int] | None:
    """Of queries, if all see the same keys, or if they are the last, which see all."""
    queries, keys = (shape_of(v) for v in value.args[:2])
    if axis != 1 or queries is None or keys is None:
        return None
    causal = value.attrs.causal_mask
    aligned = str(causal) == "BottomRight" or same_shape(queries[1:2], keys[1:2])
    if causal is not None and not (part.is_last and aligned):
        return None
    if causal is None and value.attrs.window_size is not None:
        return None
    if len(value.args) < 4:
        return {0: 1}
    bias = shape_of(value.args[3])
    if (
        bias is None
        or len(bias) != 4
        or not (is_one(bias[2]) or same_shape(bias[2:3], queries[1:2]))
    ):
        return None
    return {0: 1} if is_one(bias[2]) else {0: 1, 3: 2}


def _regrouped(value: Value, axis: int, _: Part) -> dict[int, int] | None:
    """Of an axis that a view leaves as it is, behind as many elements."""
    before, after = shape_of(value.args[0]) or [], shape_of(value)
    if after is None:
        return None
    kept = [product(after[:axis]), after[axis]]
    at = (i for i, n in enumerate(before) if same_shape([product(before[:i]), n], kept))
    return next(({0: i} for i in at), None)


def _counted(value: Value, _: int, part: Part) -> dict[int, int] | None:
    """Of numbers that are counted, those of neighbours."""
    whole = all("int" in str(number.ty.dtype) for number in value.args)
    return {} if whole and part.begin is not None else None


def _reduced(value: Value, axis: int, part: Part) -> dict[int, int] | None:
    """Of what all workers have, if rows follow from the shape, which is the same for all."""
    if part.begin is None:
        return None
    read = variables_of(part.begin) | variables_of(part.extent)
    return {0: axis} if read <= variables_of(value.ty.shape) else None


def _permuted(value: Value, axis: int, _: Part) -> dict[int, int] | None:
    return {0: permutation(value, len(shape_of(value) or ()))[axis]}


def _of_others(value: Value, axis: int, _: Part) -> dict[int, int] | None:
    """Of what an operator does along other axes, which are all kept."""
    shape = shape_of(operands_of(value)[0]) or []
    if is_call(value, "relax.strided_slice"):
        given = value.args[1].fields
    else:
        attrs = value.attrs
        given = attrs.axes if hasattr(attrs, "axes") else attrs.axis
    if given is None or not shape:
        return None
    axes = {int(a) % len(shape) for a in (given if hasattr(given, "__len__") else [given])}
    if is_call(value, *named("reduction")) and not value.attrs.keepdims:
        return {0: [a for a in range(len(shape)) if a not in axes][axis]}
    numbers = range(len(operands_of(value)) if is_call(value, "relax.concat") else 1)
    return None if axis in axes else dict.fromkeys(numbers, axis)


_ATTENTION = ("relax.nn.attention", "relax.nn.attention_bias")
PRODUCTS = ("relax.matmul", *_ATTENTION)
"""A slice moves if one of these is behind it."""

_PLAIN = named("arithmetic", "comparison", "test", "logic", "bits", "choice", "cast", "broadcast")
_LIKE = ("relax.full_like", "relax.ones_like", "relax.zeros_like")
POSITIONAL = (*_PLAIN, *_LIKE, *VIEWS, "relax.permute_dims", "relax.arange")
_NORMS = ("relax.nn.rms_norm", "relax.nn.layer_norm", *named("softmax"))
RULES: dict[str, AxesOf] = {
    **dict.fromkeys((*_PLAIN, *named("function", "rounding"), *_LIKE), _elements),
    **dict.fromkeys((*_NORMS, *named("reduction", "slice", "split", "flip")), _of_others),
    **dict.fromkeys(VIEWS, _regrouped),
    **dict.fromkeys(_ATTENTION, _attention),
    "relax.arange": _counted,
    "relax.ccl.allreduce": _reduced,
    "relax.concat": _of_others,
    "relax.permute_dims": _permuted,
    "relax.matmul": _product,
    ITEM: lambda _, axis, __: {0: axis},
}
