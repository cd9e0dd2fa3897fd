"""Relax functions evaluated by numpy in float64: what the compiled ones are measured against.

Nothing is rounded between the operators, so a cast is the identity.  Where `evaluate` is given a
generator of noise, it moves what operators make by as much as rounding would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.sym import Analyzer

from ..accuracy import nudged

Values = dict[Any, Any]
_KERNELS = "kernels"

_erf = np.vectorize(math.erf, otypes=["float64"])


def evaluate(
    func: relax.Function,
    inputs: list[np.ndarray | int],
    kernels: Mapping[str, Callable[..., np.ndarray]] | None = None,
    noise: np.random.Generator | None = None,
) -> list[np.ndarray]:
    """Run `func` on float64 copies of `inputs`; always return a list of results.

    Parameters
    ----------
    func : relax.Function
        The function.
    inputs : list of numpy.ndarray or int
        Its arguments.
    kernels : mapping of str to callable, optional
        What the PrimFuncs of those names compute.
    noise : numpy.random.Generator, optional
        Moves every float that an operator makes by about half a rounding step of its dtype.
    """
    values: Values = {_KERNELS: kernels or {}}
    for param, given in zip(func.params, inputs, strict=True):
        values[param] = np.asarray(given, "float64")
        if isinstance(param.ty, relax.TensorType):
            for dim, size in zip(param.ty.shape.values, values[param].shape, strict=True):
                if isinstance(dim, tirx.Var):
                    values[dim] = size
        elif isinstance(param.ty, relax.ShapeType):
            values.update(zip(param.ty.values, given, strict=True))
    for block in func.body.blocks:
        for binding in block.bindings:
            value = _value(binding.value, values)
            values[binding.var] = value if noise is None else _moved(binding.var, value, noise)
    result = _value(func.body.body, values)
    return list(result) if isinstance(result, tuple) else [result]


def _moved(var: relax.Var, value: Any, noise: np.random.Generator) -> Any:
    """Move a result; whole numbers are as rounding leaves them."""
    if not isinstance(var.ty, relax.TensorType) or "float" not in str(var.ty.dtype):
        return value
    moved = nudged(np.asarray(value, "float64"), str(var.ty.dtype), noise)
    return np.where(value == np.round(value), value, moved)


def _value(expr: relax.Expr, values: Values) -> Any:
    if expr in values:
        return values[expr]
    if isinstance(expr, ir.GenericConst):
        return expr.value.numpy().astype("float64")
    if isinstance(expr, relax.Tuple):
        return tuple(_value(f, values) for f in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return _value(expr.tuple_value, values)[int(expr.index)]
    if isinstance(expr, tirx.FloatImm):
        return float(expr)
    if isinstance(expr, relax.ShapeExpr):
        return tuple(size(d, values) for d in expr.values)
    if isinstance(expr, relax.Call) and expr.op.name == "relax.call_tir":
        return values[_KERNELS][expr.args[0].name_hint](*_value(expr.args[1], values))
    if isinstance(expr, relax.Call):
        args = [_value(a, values) for a in expr.args]
        return _OPS[expr.op.name.removeprefix("relax.")](expr.attrs, *args)
    return size(expr, values)


def size(dim: Any, values: Values) -> int:
    """Return the value of a symbolic size."""
    if isinstance(dim, ir.Expr):
        known = (ir.Var, lambda var: tirx.IntImm("int64", values[var]))
        dim = Analyzer().simplify(tvm_ffi.structural_map(dim, known))
    return int(dim)


def _norm(x: np.ndarray, gamma: np.ndarray, eps: float, axes: tuple[int, ...]) -> np.ndarray:
    mean = np.mean(x * x, axis=axes, keepdims=True)
    return x / np.sqrt(mean + eps) * gamma


def _layer_norm(attrs: Any, x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    axes = tuple(int(a) for a in attrs.axes)
    normal = _norm(x - np.mean(x, axis=axes, keepdims=True), np.ones(()), attrs.epsilon, axes)
    return normal * (gamma if attrs.scale else 1.0) + (beta if attrs.center else 0.0)


def _softmax(attrs: Any, x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - np.max(x, axis=attrs.axis, keepdims=True))
    return exp / np.sum(exp, axis=attrs.axis, keepdims=True)


def _split(attrs: Any, x: np.ndarray) -> tuple[np.ndarray, ...]:
    parts = attrs.indices_or_sections
    parts = [int(p) for p in parts] if hasattr(parts, "__len__") else int(parts)
    return tuple(np.split(x, parts, axis=int(attrs.axis)))


def _slice(_: Any, x: np.ndarray, axes: tuple, begin: tuple, end: tuple, *rest: Any) -> np.ndarray:
    strides = rest[0] if rest else (1,) * len(axes)
    index = [slice(None)] * x.ndim
    for axis, first, last, step in zip(axes, begin, end, strides, strict=True):
        index[int(axis)] = slice(int(first), int(last), int(step))
    return x[tuple(index)]


def _attention(attrs: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, *bias: Any) -> np.ndarray:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if attrs.scale is None else float(attrs.scale)
    scores = q @ k.swapaxes(-1, -2) * scale + (bias[0] if bias else 0.0)
    if attrs.causal_mask is not None:
        corner = k.shape[2] - q.shape[2] if attrs.causal_mask == "BottomRight" else 0
        scores = np.where(np.tril(np.ones(scores.shape[-2:]), corner) > 0, scores, -np.inf)
    exp = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return (exp / exp.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)


_OPS: dict[str, Callable[..., Any]] = {
    "add": lambda _, a, b: a + b,
    "subtract": lambda _, a, b: a - b,
    "multiply": lambda _, a, b: a * b,
    "divide": lambda _, a, b: a / b,
    "maximum": lambda _, a, b: np.maximum(a, b),
    "minimum": lambda _, a, b: np.minimum(a, b),
    "where": lambda _, c, a, b: np.where(c != 0, a, b),
    "clip": lambda _, a, low, high: np.clip(a, low, high),
    "max": lambda at, a: np.max(a, tuple(map(int, at.axis)), keepdims=bool(at.keepdims)),
    "less": lambda _, a, b: a < b,
    "less_equal": lambda _, a, b: a <= b,
    "greater": lambda _, a, b: a > b,
    "greater_equal": lambda _, a, b: a >= b,
    "equal": lambda _, a, b: a == b,
    "logical_and": lambda _, a, b: np.logical_and(a, b),
    "bitwise_and": lambda _, a, b: np.logical_and(a, b),
    "logical_or": lambda _, a, b: np.logical_or(a, b),
    "logical_not": lambda _, a: np.logical_not(a),
    "arange": lambda _, first, end, step: np.arange(first, end, step, dtype="float64"),
    "full": lambda _, shape, value: np.full(shape, value),
    "full_like": lambda _, a, value: np.full_like(a, value, dtype="float64"),
    "ones": lambda _, shape: np.ones(shape),
    "tril": lambda _, a, k: np.tril(a, int(k)),
    "triu": lambda _, a, k: np.triu(a, int(k)),
    "broadcast_to": lambda _, a, shape: np.broadcast_to(a, shape),
    "tile": lambda at, a: np.tile(a, [int(r) for r in at.repeats]),
    "squeeze": lambda at, a: np.squeeze(a, tuple(int(i) for i in at.axis)),
    "power": lambda _, a, b: a**b,
    "square": lambda _, a: a * a,
    "rsqrt": lambda _, a: 1 / np.sqrt(a),
    "tanh": lambda _, a: np.tanh(a),
    "erf": lambda _, a: _erf(a),
    "sigmoid": lambda _, a: 1 / (1 + np.exp(-a)),
    "astype": lambda _, a: a,
    "mean": lambda at, a: np.mean(a, tuple(map(int, at.axis)), keepdims=bool(at.keepdims)),
    "matmul": lambda _, a, b: a @ b,
    "reshape": lambda _, a, shape: a.reshape(shape),
    "permute_dims": lambda at, a: a.transpose(at.axes and [int(i) for i in at.axes]),
    "concat": lambda at, parts: np.concatenate(parts, int(at.axis)),
    "expand_dims": lambda at, a: np.expand_dims(a, tuple(int(i) for i in at.axis)),
    "negative": lambda _, a: -a,
    "exp": lambda _, a: np.exp(a),
    "repeat": lambda at, a: np.repeat(a, int(at.repeats), int(at.axis)),
    "split": _split,
    "strided_slice": _slice,
    "nn.silu": lambda _, a: a / (1 + np.exp(-a)),
    "nn.relu": lambda _, a: np.maximum(a, 0),
    "nn.gelu": lambda _, a: a * 0.5 * (1 + _erf(a / math.sqrt(2))),
    "nn.gelu_tanh": lambda _, a: (
        0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
    ),
    "nn.softmax": _softmax,
    "nn.rms_norm": lambda at, x, g: _norm(x, g, at.epsilon, tuple(map(int, at.axes))),
    "nn.layer_norm": _layer_norm,
    "nn.attention": _attention,
    "nn.attention_bias": _attention,
}
