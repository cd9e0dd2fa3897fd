"""PrimFuncs computed by numpy, of the form that TVM's legaliser emits: a stage for each buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import ir, tirx

from ..matching.expressions import BINARY
from ..matching.stages import Stage, read_stages
from ..tvm_ir import TensorLoad
from ..workload.reference import erf, numpy_dtype
from .operators import Array, Uninterpreted
from .sizes import Shrink, Sizes

_CALLS: Mapping[str, Callable[..., Any]] = {
    "tirx.exp": np.exp,
    "tirx.tanh": np.tanh,
    "tirx.sqrt": np.sqrt,
    "tirx.rsqrt": lambda x: 1 / np.sqrt(x),
    "tirx.erf": erf,
    "tirx.sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tirx.shift_left": np.left_shift,
    "tirx.shift_right": np.right_shift,
    "tirx.bitwise_and": np.bitwise_and,
    "tirx.bitwise_or": np.bitwise_or,
}


def computed(func: tirx.PrimFunc, arrays: Sequence[Array], shrink: Shrink) -> Any:
    """Compute the outputs of a PrimFunc, one or several: the parameters behind those of the inputs.

    `arrays`: its inputs, floats in float64.
    `shrink`: what becomes of its static sizes.
    Raises `Uninterpreted` if it is of another form.
    """
    stages = read_stages(func)
    params = list(func.params)
    if stages is None or not all(isinstance(p.ty, tirx.BufferType) for p in params):
        raise Uninterpreted("the body of a PrimFunc")
    symbols: dict[ir.Var, int] = {}
    for param, array in zip(params, arrays, strict=False):
        dims = zip(param.ty.shape, array.shape, strict=True)
        symbols.update((dim, size) for dim, size in dims if isinstance(dim, ir.Var))
    run = _Run(dict(zip(params, arrays, strict=False)), Sizes(symbols, shrink))
    for stage in stages:
        run.execute(stage)
    made = tuple(run.buffers[p] for p in params[len(arrays) :])
    return made if len(made) > 1 else made[0]


@dataclass
class _Run:
    """The buffers so far, the variables of the stage at hand, and how many choices are open."""

    buffers: dict[ir.Var, Array]
    sizes: Sizes
    places: dict[ir.Var, Array] = field(default_factory=dict)
    choices: int = 0

    def execute(self, stage: Stage) -> None:
        """Compute a stage."""
        axes = (*stage.spatial, *stage.reduced)
        lengths = [self.sizes.of(stage.extents[v]) for v in axes]
        for n, (var, length) in enumerate(zip(axes, lengths, strict=True)):
            self.places[var] = np.arange(length).reshape((-1,) + (1,) * (len(axes) - n - 1))
        if not stage.reduced:
            self.buffers[stage.buffer] = np.array(np.broadcast_to(self.value(stage.value), lengths))
            return
        value = stage.value
        sums = isinstance(value, tirx.Add) and isinstance(value.a, TensorLoad)
        if not sums or not value.a.source.same_as(stage.buffer) or stage.init is None:
            raise Uninterpreted("a reduction of a PrimFunc that is no sum")
        terms = np.broadcast_to(self.value(value.b), lengths)
        total = terms.sum(axis=tuple(range(len(stage.spatial), len(axes))))
        self.buffers[stage.buffer] = total + self.value(stage.init)

    def value(self, expr: Any) -> Any:
        """Compute an element at every place."""
        name = type(expr).__name__
        if isinstance(expr, tirx.IntImm | tirx.FloatImm):
            return expr.value
        if isinstance(expr, ir.Var):
            return self.places[expr] if expr in self.places else self.sizes.of(expr)
        if isinstance(expr, TensorLoad):
            return self.load(expr)
        if isinstance(expr, tirx.Cast):
            inner, dtype = np.asarray(self.value(expr.value)), str(expr.ty.dtype)
            return inner.astype("float64" if "float" in dtype else dtype)
        if name in BINARY:
            return BINARY[name](self.value(expr.a), self.value(expr.b))
        if isinstance(expr, tirx.Div) and "float" in str(expr.ty.dtype):
            return self.value(expr.a) / self.value(expr.b)
        if isinstance(expr, tirx.Select):
            sides = (self.value(expr.true_value), self.value(expr.false_value))
            return np.where(self.value(expr.condition), *sides)
        if name == "Call" and expr.op.same_as(_CHOICE):
            return self.choice(*expr.args)
        called = expr.op.name if name == "Call" and isinstance(expr.op, ir.Op) else name
        if called == "tirx.reinterpret":
            given, kind = expr.args[0], numpy_dtype(str(expr.ty.dtype))
            stored = np.asarray(self.value(given)).astype(numpy_dtype(str(given.ty.dtype)))
            return stored.view(kind).astype(kind if kind.kind in "iu" else "float64")
        if called not in _CALLS:
            raise Uninterpreted(f"{called} in a PrimFunc")
        return _CALLS[called](*map(self.value, expr.args))

    def load(self, load: TensorLoad) -> Any:
        """Read a tensor; where a choice may be for another value, also beside it."""
        array, places = self.buffers[load.source], [self.value(i) for i in load.indices]
        if self.choices:
            ends = zip(places, array.shape, strict=True)
            places = [np.clip(place, 0, size - 1) for place, size in ends]
        return array[tuple(places)]

    def choice(self, condition: tirx.Expr, *sides: tirx.Expr) -> Any:
        """Compute both sides of an `if_then_else`, of which one is not executed."""
        chosen = self.value(condition)
        self.choices += 1
        values = [self.value(side) for side in sides]
        self.choices -= 1
        return np.where(chosen, *values)


_CHOICE = ir.Op.get("prim.if_then_else")
