"""Every kind of movement on an axis of a tensor, as Relax operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

Emit = Callable[[relax.Expr], relax.Var]
Movement = Callable[[Emit, relax.Var, int], relax.Expr]


def _dims(x: relax.Var) -> list[Any]:
    return [int(d) if isinstance(d, tirx.IntImm) else d for d in x.ty.shape.values]


def _ones(x: relax.Var, axis: int, number: int) -> list[int]:
    return [number if n == axis else 1 for n in range(len(_dims(x)))]


def _backwards(step: int, _: Emit, x: relax.Var, axis: int) -> relax.Expr:
    return op.strided_slice(x, [axis], [-1], [-(2**31)], [-step])


def _padded(mode: str, _: Emit, x: relax.Var, axis: int) -> relax.Expr:
    widths = [n == axis for n in range(len(_dims(x))) for _ in range(2)]
    return op.nn.pad(x, list(map(int, widths)), mode)


def _rolled(emit: Emit, x: relax.Var, axis: int) -> relax.Expr:
    cut = emit(op.split(x, [1], axis))
    return op.concat([emit(relax.TupleGetItem(cut, n)) for n in (1, 0)], axis)


def _merged(_: Emit, x: relax.Var, axis: int) -> relax.Expr:
    shape, first = _dims(x), max(0, min(axis, len(_dims(x)) - 2))
    rest = shape[first + 2 :]
    whole = shape[first] * shape[first + 1] if len(shape) > 1 else shape[0]
    return op.reshape(x, [*shape[:first], whole, *rest])


def _cut(_: Emit, x: relax.Var, axis: int) -> relax.Expr:
    shape, size = _dims(x), _dims(x)[axis]
    parts = [2, size // 2] if isinstance(size, int) and size % 2 == 0 else [size, 1]
    return op.reshape(x, [*shape[:axis], *parts, *shape[axis + 1 :]])


def _gathered(_: Emit, x: relax.Var, axis: int) -> relax.Expr:
    return op.take(x, relax.const(np.array([1, 0, 1]), "int64"), axis)


def _last(emit: Emit, x: relax.Var, axis: int) -> relax.Expr:
    return relax.TupleGetItem(emit(op.split(x, [1], axis)), 1)


MOVEMENTS: dict[str, Movement] = {
    "flip": lambda _, x, axis: op.flip(x, axis),
    "backwards": partial(_backwards, 1),
    "every second backwards": partial(_backwards, 2),
    "every second": lambda _, x, axis: op.strided_slice(x, [axis], [1], [2**31 - 1], [2]),
    "tile": lambda _, x, axis: op.tile(x, _ones(x, axis, 2)),
    "repeat": lambda _, x, axis: op.repeat(x, 2, axis),
    "roll": _rolled,
    "take": _gathered,
    "permute": lambda _, x, axis: op.permute_dims(x, [*range(1, len(_dims(x))), 0]),
    "merge": _merged,
    "cut": _cut,
    "concat": lambda _, x, axis: op.concat([x, x], axis),
    "split": _last,
    **{f"{mode} pad": partial(_padded, mode) for mode in ("constant", "reflect", "replicate")},
    "circular pad": partial(_padded, "circular"),
}
"""By the name: what moves elements of a tensor along an axis of 3 or more elements."""
