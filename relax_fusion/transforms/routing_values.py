"""Functions of elements around a choice of experts, as formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tvm import relax, tirx

from ..compute.activations import ACCUMULATE, activate
from ..matching.pattern import BlockView
from ..matching.places import MOVES, Place, moved_place
from ..matching.shapes import dtype_of, is_one, shape_of
from ..tvm_ir import GenericConst


def sizes(expr: relax.Expr) -> list[Any]:
    """Return the sizes of a tensor of known rank."""
    return list(shape_of(expr) or ())


Element: TypeAlias = Callable[[relax.Expr, Place], tirx.Expr]
"""Returns an element of a tensor that is not computed here."""

ARITHMETIC: dict[str, Callable[..., tirx.Expr]] = {
    "relax.add": lambda x, y: x + y,
    "relax.subtract": lambda x, y: x - y,
    "relax.multiply": lambda x, y: x * y,
    "relax.divide": tirx.div,
    "relax.maximum": tirx.max,
    "relax.minimum": tirx.min,
}
FUNCTIONS = {
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
    "relax.nn.silu": "silu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.relu": "relu",
}


class Formula:
    """The elements of what is computed of a tensor.

    Parameters
    ----------
    view : BlockView
        The block.
    inside : collection of relax.Var
        What is computed here.
    leaf : callable
        Returns an element of anything else.
    """

    def __init__(self, view: BlockView, inside: Sequence[relax.Var], leaf: Element):
        self.view, self.inside, self.leaf = view, {hash(v) for v in inside}, leaf

    def at(self, expr: relax.Expr, place: Place) -> tirx.Expr:
        """Return an element."""
        if isinstance(expr, GenericConst) and not expr.ty.shape:
            return tirx.const(expr.value.numpy().item(), dtype_of(expr))
        if hash(expr) not in self.inside:
            return self.leaf(expr, place)
        value = self.view.defs[expr]
        name, args = value.op.name, value.args
        if name in ARITHMETIC:
            return ARITHMETIC[name](*(self._broadcast(a, place) for a in args))
        if name in MOVES:
            moved = moved_place(value, place)
            assert moved is not None, "refused by `_is_step`"
            return self.at(args[0], moved)
        if name == "relax.where":
            chosen, this, other = (self._broadcast(a, place) for a in args)
            return tirx.Select(chosen, this, other)
        if name == "relax.full_like":
            return self.at(args[1], ())
        return _function(value, self.at(args[0], place))

    def _broadcast(self, expr: relax.Expr, place: Place) -> tirx.Expr:
        shape = sizes(expr)
        zero = tirx.IntImm("int64", 0)
        behind = place[len(place) - len(shape) :]
        at = tuple(zero if is_one(d) else p for d, p in zip(shape, behind, strict=True))
        return self.at(expr, at)


def _function(call: relax.Call, x: tirx.Expr) -> tirx.Expr:
    """Return a function of one element, in float32 if it is an activation."""
    name, dtype = call.op.name, dtype_of(call)
    if name in ("relax.bitwise_not", "relax.logical_not"):
        return tirx.Not(x)
    if name == "relax.astype":
        return x != tirx.const(0, str(x.ty.dtype)) if dtype == "bool" else x.astype(dtype)
    return activate(FUNCTIONS[name], x.astype(ACCUMULATE)).astype(dtype)
