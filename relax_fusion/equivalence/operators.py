"""Relax operators by numpy: floats are float64 throughout, integers and booleans what they are.

Tensors are arrays, tuples are tuples, sizes and numbers Python's own.  Shapes come from the types
that TVM inferred (`Called.shape`), so that an operator cannot contradict them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..matching.operators import OPERATORS as KNOWN

Array = np.ndarray[Any, Any]


class Uninterpreted(Exception):
    """Raised for what has no meaning here: an operator, or a form of it."""


class Misfit(ValueError):
    """Raised where a result has another shape than it should: sizes contradict each other."""


@dataclass(frozen=True)
class Called:
    """What an operator is told beside its operands."""

    attrs: Mapping[str, Any]
    """Attributes of the call, in Python's own types; sizes among them are as at run time."""
    shape: tuple[int, ...]
    dtype: str
    """Of the result, where it is one tensor."""
    whole: tuple[int | None, ...] = ()
    """The shape of the first operand as it was written, its sizes not shrunk."""

    def axes(self, name: str = "axis") -> tuple[int, ...] | None:
        """Return an attribute that names one axis, several, or (None) all."""
        found = self.attrs[name]
        return found if found is None or isinstance(found, tuple) else (found,)


def _is_integer(*arrays: Any) -> bool:
    return all(np.asarray(a).dtype.kind in "iub" for a in arrays)


def _divide(c: Called, a: Array, b: Array) -> Array:
    if not _is_integer(a, b):
        return a / b
    if np.any(np.asarray(b) == 0):
        raise Uninterpreted("a division of integers by zero")
    quotient = np.abs(a) // np.abs(b)  # towards zero
    return np.where((a < 0) != (b < 0), -quotient, quotient)


def _slice(c: Called, x: Array, axes: Any, begin: Any, end: Any, *strides: Any) -> Array:
    index: list[Any] = [slice(None)] * x.ndim
    steps = strides[0] if strides else (1,) * len(axes)
    for axis, first, last, step in zip(axes, begin, end, steps, strict=True):
        size = x.shape[axis]
        if step > 0:
            index[axis] = slice(first, last, step)
        else:
            last = last + size if last < 0 else last
            index[axis] = slice(first, None if last < 0 else last, step)
    return x[tuple(index)]


def _split(c: Called, x: Array) -> tuple[Array, ...]:
    parts, axis = c.attrs["indices_or_sections"], c.attrs["axis"]
    if isinstance(parts, int):
        step = -(-x.shape[axis] // parts)
        parts = tuple(range(step, x.shape[axis], step))
    return tuple(np.split(x, parts, axis=axis))


_PADS: Mapping[str, Any] = {
    "constant": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}


def _pad(c: Called, x: Array) -> Array:
    widths, mode = np.reshape(c.attrs["pad_width"], (-1, 2)), c.attrs["pad_mode"]
    values = {"constant_values": c.attrs["pad_value"]} if mode == "constant" else {}
    return np.pad(x, widths, _PADS[mode], **values)


def _gather_nd(c: Called, x: Array, indices: Array) -> Array:
    if int(c.attrs.get("batch_dims", 0)):
        raise Uninterpreted("gather_nd with dimensions of a batch")
    places = np.moveaxis(indices, -1, 0)
    for place, size in zip(places, x.shape, strict=False):
        if ((place < 0) | (place >= size)).any():
            raise Uninterpreted("gather_nd beyond the tensor")
    return np.asarray(x[tuple(places)])


def _take(c: Called, x: Array, indices: Any) -> Array:
    axis = c.attrs["axis"]
    found, size = np.asarray(indices), x.size if axis is None else x.shape[axis]
    if np.any((found < -size) | (found >= size)):
        raise Uninterpreted("take beyond the end")
    return np.take(x, found, axis=axis)


def _cumsum(c: Called, x: Array) -> Array:
    if c.attrs["exclusive"]:
        raise Uninterpreted("an exclusive cumsum")
    return np.cumsum(x, axis=c.attrs["axis"], dtype=x.dtype if x.dtype.kind == "f" else "int64")


def _reduced(function: Callable[..., Array]) -> Callable[..., Array]:
    def reduce(c: Called, x: Array) -> Array:
        return function(x, axis=c.axes(), keepdims=c.attrs["keepdims"])

    return reduce


def _softmax(c: Called, x: Array) -> Array:
    axis = c.attrs["axis"]
    exp = np.exp(x - np.max(x, axis=axis, keepdims=True, initial=-np.inf))
    return exp / np.sum(exp, axis=axis, keepdims=True)


def _softplus(c: Called, x: Array) -> Array:
    beta, threshold = c.attrs["beta"], c.attrs["threshold"]
    return np.where(beta * x > threshold, x, np.logaddexp(0, beta * x) / beta)


def _along(c: Called, x: Array, parameter: Array) -> Array:
    """Return a norm's parameter with as many dimensions as `x`, its own along the norm's axes."""
    own = {axis % x.ndim for axis in c.attrs["axes"]}
    return np.expand_dims(parameter, [axis for axis in range(x.ndim) if axis not in own])


def _rms_norm(c: Called, x: Array, gamma: Array) -> Array:
    axes = c.axes("axes")
    square = np.mean(x * x, axis=axes, keepdims=True)
    return x / np.sqrt(square + c.attrs["epsilon"]) * _along(c, x, gamma)


def _layer_norm(c: Called, x: Array, gamma: Array, beta: Array) -> Array:
    axes = c.axes("axes")
    x = x - np.mean(x, axis=axes, keepdims=True)
    x = x / np.sqrt(np.mean(x * x, axis=axes, keepdims=True) + c.attrs["epsilon"])
    x = x * _along(c, x, gamma) if c.attrs["scale"] else x
    return x + _along(c, x, beta) if c.attrs["center"] else x


def _attention(c: Called, q: Array, k: Array, v: Array, *bias: Array) -> Array:
    scale = c.attrs["scale"]
    if scale is None:
        width = c.whole[3]
        if width is None:
            raise Uninterpreted("an attention with heads of unknown width")
        scale = width**-0.5
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * scale + (bias[0] if bias else 0.0)
    kind, window = c.attrs["causal_mask"], c.attrs["window_size"]
    distance = np.arange(k.shape[2])[None, :] - np.arange(q.shape[2])[:, None]
    if kind == "BottomRight":
        distance = distance - (k.shape[2] - q.shape[2])
    elif kind not in (None, "TopLeft"):
        raise Uninterpreted(f"the mask {kind}")
    if kind is not None:
        scores = np.where(distance <= 0, scores, -np.inf)
    if window is not None:
        scores = np.where(distance > -window, scores, -np.inf)
    exp = np.exp(scores - np.max(scores, axis=-1, keepdims=True, initial=-np.inf))
    return (exp / exp.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)


def _packed_attention(c: Called, q: Array, k: Array, v: Array, *rest: Any) -> Array:
    """Attend within each of several sequences that lie one after the other."""
    starts, parts = [np.asarray(s).reshape(-1) for s in rest[:2]], []
    for number in range(len(starts[0]) - 1):
        of_q, of_k = (slice(s[number], s[number + 1]) for s in starts)
        parts.append(_attention(c, q[:, of_q], k[:, of_k], v[:, of_k]))
    return np.concatenate(parts, axis=1)


def _matmul(c: Called, a: Array, b: Array) -> Array:
    if _is_integer(a, b):
        return np.matmul(a.astype("int64"), b.astype("int64"))
    return np.matmul(a, b)


def _full(value: float | None = None) -> Callable[..., Array]:
    def full(c: Called, *args: Any) -> Array:
        given = args[1] if value is None else value
        return np.full(c.shape, given, c.dtype if _is_integer(given) else None)

    return full


def _topk(c: Called, x: Array) -> Any:
    axis, k, largest = c.attrs["axis"], int(c.attrs["k"]), bool(c.attrs["largest"])
    order = np.argsort(-x if largest else x, axis=axis, kind="stable")
    order = order if k < 1 else np.take(order, range(k), axis=axis)
    values = np.take_along_axis(x, order, axis=axis)
    kind = c.attrs["ret_type"]
    return (values, order) if kind == "both" else values if kind == "values" else order


def _concat(c: Called, parts: Sequence[Array]) -> Array:
    axis = c.attrs["axis"]
    if axis is None:
        return np.concatenate([p.reshape(-1) for p in parts])
    return np.concatenate(parts, axis)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda c, *args: function(*args)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{name: _plain(known.numpy) for name, known in KNOWN.items() if known.numpy is not None},
    **{name: _plain(getattr(np, name)) for name in ("arange", "triu", "tril")},
    "index_tensor": lambda c, x, places: x[tuple(places)],
    **dict.fromkeys(
        ("reshape", "flatten", "squeeze", "memory.ensure_zero_offset"),
        lambda c, x, *_: np.reshape(x, c.shape),
    ),
    **{name: _reduced(getattr(np, name)) for name in ("max", "min", "sum", "mean", "prod")},
    "variance": _reduced(np.var),
    **dict.fromkeys(("nn.attention", "nn.attention_bias"), _attention),
    **dict.fromkeys(("full", "full_like"), _full()),
    **dict.fromkeys(("ones", "ones_like"), _full(1)),
    **dict.fromkeys(("zeros", "zeros_like"), _full(0)),
    **dict.fromkeys(("hint_on_device", "to_vdevice", "stop_lift_params"), _plain(lambda x, *_: x)),
    "nn.attention_var_len": _packed_attention,
    "broadcast_to": lambda c, x, *_: np.broadcast_to(x, c.shape),
    "concat": _concat,
    "cumsum": _cumsum,
    "divide": _divide,
    "expand_dims": lambda c, x: np.expand_dims(x, c.axes() or ()),
    "flip": lambda c, x: np.flip(x, c.attrs["axis"]),
    "matmul": _matmul,
    "nn.layer_norm": _layer_norm,
    "nn.pad": _pad,
    "nn.rms_norm": _rms_norm,
    "nn.softmax": _softmax,
    "nn.softplus": _softplus,
    "permute_dims": lambda c, x: np.transpose(x, c.attrs["axes"]),
    "repeat": lambda c, x: np.repeat(x, c.attrs["repeats"], c.attrs["axis"]),
    "shape_of": lambda c, x: x.shape,
    "shape_to_tensor": lambda c, sizes: np.asarray(sizes, "int64"),
    "split": _split,
    "stack": lambda c, parts: np.stack(parts, c.attrs["axis"] or 0),
    "strided_slice": _slice,
    "gather_nd": _gather_nd,
    "take": _take,
    "tensor_to_shape": lambda c, x: tuple(map(int, x)),
    "tile": lambda c, x: np.tile(x, c.attrs["repeats"]),
    "topk": _topk,
}
"""What each operator, without ``relax.``, makes of a `Called` and its operands."""

SIZES_IN = {"split": ("indices_or_sections",), "repeat": ("repeats",), "tile": ("repeats",)}
"""Attributes that are sizes."""
