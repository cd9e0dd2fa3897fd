"""Tensor programs as data: drawn once, built as Relax, and evaluated in float64 by numpy.

A `Graph` is a list of `Node`s in order of execution.  Everything that runs on it (`to_relax`,
`evaluate`, `arrays`) reads the same nodes, so that a program is compared with its own definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax, tirx


@dataclass(frozen=True)
class Size:
    """A dimension: a number times the product of some symbols."""

    factor: int
    symbols: tuple[str, ...] = ()

    def __mul__(self, other: Size) -> Size:
        return Size(self.factor * other.factor, tuple(sorted(self.symbols + other.symbols)))

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the value under an assignment of the symbols."""
        return self.factor * math.prod(sizes[s] for s in self.symbols)

    def __str__(self) -> str:
        return "*".join([*([str(self.factor)] if self.factor != 1 else []), *self.symbols]) or "1"


Shape = tuple[Size, ...]


def const(value: int) -> Size:
    """Return a dimension that is known when the program is compiled."""
    return Size(value)


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy type called `name`, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True)
class Node:
    """One value: an operator, the numbers of the nodes that it reads, its attributes, its type."""

    op: str
    args: tuple[int, ...]
    shape: Shape
    dtype: str
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        attrs = "".join(f", {k}={v}" for k, v in self.attrs.items())
        shape = ", ".join(map(str, self.shape))
        return f"{self.op}({', '.join(f'%{a}' for a in self.args)}{attrs}): [{shape}] {self.dtype}"


@dataclass(frozen=True)
class Graph:
    """A function.

    Parameters
    ----------
    nodes : tuple of Node
        In order of execution; nodes of the op ``param`` are the function's parameters.
    outputs : tuple of int
        The nodes that it returns; a tuple if there are several.
    runs : tuple of mapping
        Values of the symbols, one mapping for each run.
    cut : int, optional
        The node at which a second dataflow block begins.
    dataflow : bool
        Whether the bindings are in dataflow blocks at all.
    seed : int
        Of the contents of parameters and constants.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    runs: tuple[Mapping[str, int], ...] = ({},)
    cut: int | None = None
    dataflow: bool = True
    seed: int = 0

    @property
    def dynamic(self) -> bool:
        """Whether any parameter has a symbolic size."""
        return any(d.symbols for n in self.nodes for d in n.shape)

    def __str__(self) -> str:
        lines = [f"  %{i} = {n}" for i, n in enumerate(self.nodes)]
        runs = "; ".join(str(dict(r)) for r in self.runs)
        tail = f"  return {', '.join(f'%{o}' for o in self.outputs)}"
        head = f"graph at {runs}, cut {self.cut}, dataflow {self.dataflow}"
        return "\n".join([head, *lines, tail])


# --- contents --------------------------------------------------------------------------------


def arrays(graph: Graph, sizes: Mapping[str, int], attempt: int) -> dict[int, np.ndarray]:
    """Draw the contents of parameters (fresh for each attempt) and constants (always the same)."""
    drawn = {}
    for i, node in enumerate(graph.nodes):
        if node.op in ("param", "const"):
            key = [graph.seed, i, attempt if node.op == "param" else 0, *sorted(sizes.values())]
            rng = np.random.default_rng(key if node.op == "param" else key[:3])
            shape = tuple(d.at(sizes) for d in node.shape)
            drawn[i] = _content(rng, node.attrs["kind"], shape).astype(numpy_dtype(node.dtype))
    return drawn


def _content(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape)
    if kind == "gamma":
        return 1.0 + 0.2 * noise
    if kind == "weight":
        return noise / math.sqrt(max(shape[0], 1) if len(shape) == 2 else 1)
    if kind == "weight_nk":
        return noise / math.sqrt(max(shape[1], 1))
    if kind == "zeros":
        return noise * (rng.random((*shape[:-1], 1)) < 0.5)
    if kind == "shifted":
        return noise + 3.0
    if kind in ("hidden", "infinite", "seen"):
        # The first key stays visible: what a row without keys means differs among front ends.
        hide = rng.random(shape) < 0.4
        hide[..., 0] = False
        if kind == "seen":
            return ~hide
        return np.where(hide, -np.inf if kind == "infinite" else -3e4, 0.0)
    return noise


# --- float64 ---------------------------------------------------------------------------------


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def _rms_norm(x: np.ndarray, gamma: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    axes = tuple(attrs["axes"])
    return x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + attrs["eps"]) * gamma


def _layer_norm(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, attrs: Mapping[str, Any]
) -> np.ndarray:
    axes = tuple(attrs["axes"])
    centred = x - x.mean(axis=axes, keepdims=True)
    spread = np.sqrt((centred * centred).mean(axis=axes, keepdims=True) + attrs["eps"])
    return centred / spread * gamma + beta


def _attention(args: list[np.ndarray], attrs: Mapping[str, Any]) -> np.ndarray:
    q, k, v = (a.transpose(0, 2, 1, 3) for a in args[:3])
    scale = q.shape[-1] ** -0.5 if attrs["scale"] is None else attrs["scale"]
    scores = q @ k.swapaxes(-1, -2) * scale
    if len(args) > 3:
        scores = scores + args[3]
    if attrs["causal"] is not None:
        rows, keys = scores.shape[-2:]
        offset = keys - rows if attrs["causal"] == "BottomRight" else 0
        visible = np.arange(keys)[None, :] <= np.arange(rows)[:, None] + offset
        scores = np.where(visible, scores, -np.inf)
    return (_softmax(scores, -1) @ v).transpose(0, 2, 1, 3)


_ERF = np.vectorize(math.erf, otypes=[float])

UNARY: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[Any], Any]]] = {
    "silu": (lambda x: x / (1 + np.exp(-x)), relax.op.nn.silu),
    "gelu": (lambda x: 0.5 * x * (1 + _ERF(x / math.sqrt(2))), relax.op.nn.gelu),
    "gelu_tanh": (
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        relax.op.nn.gelu_tanh,
    ),
    "relu": (lambda x: np.maximum(x, 0), relax.op.nn.relu),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), relax.op.sigmoid),
    "erf": (_ERF, relax.op.erf),
    "tanh": (np.tanh, relax.op.tanh),
    "rsqrt": (lambda x: 1 / np.sqrt(x), relax.op.rsqrt),
    "square": (np.square, relax.op.square),
    "negative": (np.negative, relax.op.negative),
}
"""Element-wise functions: in float64, and as Relax."""

BINARY: dict[str, tuple[Callable[..., np.ndarray], Callable[..., Any]]] = {
    "add": (np.add, relax.op.add),
    "subtract": (np.subtract, relax.op.subtract),
    "multiply": (np.multiply, relax.op.multiply),
    "divide": (np.divide, relax.op.divide),
    "maximum": (np.maximum, relax.op.maximum),
    "minimum": (np.minimum, relax.op.minimum),
    "power": (np.power, relax.op.power),
}
"""Element-wise functions of two tensors, with broadcasting."""


def evaluate(
    graph: Graph, given: Mapping[int, np.ndarray], sizes: Mapping[str, int]
) -> list[np.ndarray]:
    """Compute the outputs in float64; casts round nothing."""
    values: dict[int, Any] = {}
    for i, node in enumerate(graph.nodes):
        if i in given:
            values[i] = given[i].astype(np.float64)
        else:
            values[i] = _apply(node, [values[a] for a in node.args], sizes)
    return [values[o] for o in graph.outputs]


def _apply(node: Node, args: list[Any], sizes: Mapping[str, int]) -> Any:
    op, attrs = node.op, node.attrs
    if op in UNARY:
        return UNARY[op][0](args[0])
    if op in BINARY:
        return BINARY[op][0](*args)
    if op == "scalar":
        # What the program says, rounded as it is: the value is part of the program.
        return np.asarray(attrs["value"], numpy_dtype(node.dtype)).astype(np.float64)
    if op == "rms_norm":
        return _rms_norm(args[0], args[1], attrs)
    if op == "layer_norm":
        return _layer_norm(args[0], args[1], args[2], attrs)
    if op == "attention":
        return _attention(args, attrs)
    if op == "item":
        return args[0][attrs["index"]]
    return _MOVES[op](args, attrs, tuple(d.at(sizes) for d in node.shape))


def _slice(x: np.ndarray, attrs: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    axis, begin = attrs["axis"], attrs["begin"]
    index = [slice(None)] * x.ndim
    index[axis] = slice(begin, begin + shape[axis])
    return x[tuple(index)]


def _distance(attrs: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return how far each key stands behind each query."""
    queries, keys = shape
    first = keys - queries if attrs["corner"] == "bottom" else 0
    return np.arange(keys)[None] - np.arange(first, first + queries)[:, None]


def _band(attrs: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    distance, window = _distance(attrs, shape), attrs["window"]
    return (distance <= 0) & (True if window is None else distance > -window)


_MOVES: dict[str, Callable[..., Any]] = {
    "where": lambda a, attrs, shape: np.where(a[0], a[1], a[2]),
    "concat": lambda a, attrs, shape: np.concatenate(a, attrs["axis"]),
    "broadcast_to": lambda a, attrs, shape: np.broadcast_to(a[0], shape),
    "distance": lambda a, attrs, shape: _distance(attrs, shape).astype(np.float64),
    "band": lambda a, attrs, shape: _band(attrs, shape).astype(np.float64),
    "matmul": lambda a, attrs, shape: a[0] @ a[1],
    "mean": lambda a, attrs, shape: a[0].mean(axis=attrs["axis"], keepdims=attrs["keepdims"]),
    "softmax": lambda a, attrs, shape: _softmax(a[0], attrs["axis"]),
    "astype": lambda a, attrs, shape: a[0],
    "alias": lambda a, attrs, shape: a[0],
    "reshape": lambda a, attrs, shape: a[0].reshape(shape),
    "permute_dims": lambda a, attrs, shape: a[0].transpose(attrs["axes"]),
    "split": lambda a, attrs, shape: np.split(a[0], attrs["at"], axis=attrs["axis"]),
    "strided_slice": lambda a, attrs, shape: _slice(a[0], attrs, shape),
    "repeat": lambda a, attrs, shape: np.repeat(a[0], attrs["times"], axis=attrs["axis"]),
}


# --- Relax -----------------------------------------------------------------------------------


def to_relax(builder: relax.BlockBuilder, graph: Graph, name: str) -> None:
    """Add the graph as a function to the module that `builder` makes."""
    symbols = {s: tirx.Var(s, "int64") for n in graph.nodes for d in n.shape for s in d.symbols}
    content = arrays(graph, dict.fromkeys(symbols, 1), 0)

    def dim(size: Size) -> Any:
        factors: list[Any] = [symbols[s] for s in size.symbols]
        if size.factor != 1 or not factors:
            factors.append(tirx.IntImm("int64", size.factor))
        return math.prod(factors[1:], start=factors[0])

    exprs: dict[int, Any] = {}
    params = []
    for i, node in enumerate(graph.nodes):
        if node.op == "param":
            shape = [dim(d) for d in node.shape]
            exprs[i] = relax.Var(f"p{i}", relax.TensorType(shape, node.dtype))
            params.append(exprs[i])
        elif node.op == "const":
            exprs[i] = relax.const(content[i], node.dtype)
        elif node.op == "scalar":
            exprs[i] = relax.const(node.attrs["value"], node.dtype)
    with builder.function(name, params):
        end = len(graph.nodes)
        pieces = [(0, end)] if graph.cut is None else [(0, graph.cut), (graph.cut, end)]
        for begin, stop in pieces:
            _block(builder, graph, (begin, stop), exprs, dim)
        results = [exprs[o] for o in graph.outputs]
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))


def _block(
    builder: relax.BlockBuilder,
    graph: Graph,
    span: tuple[int, int],
    exprs: dict[int, Any],
    dim: Callable[[Size], Any],
) -> None:
    """Emit the nodes of a span, in a dataflow block of which the later nodes read the results."""
    begin, stop = span
    later = {a for n in graph.nodes[stop:] for a in n.args} | set(graph.outputs)

    def emit(escaping: bool) -> None:
        for i in range(begin, stop):
            node = graph.nodes[i]
            if i in exprs:
                continue
            value = _call(node, [exprs[a] for a in node.args], dim)
            publish = escaping and i in later
            exprs[i] = builder.emit_output(value) if publish else builder.emit(value)

    if not any(i not in exprs for i in range(begin, stop)):
        return
    if not graph.dataflow:
        emit(False)
        return
    with builder.dataflow():
        emit(True)


def _call(node: Node, args: list[Any], dim: Callable[[Size], Any]) -> Any:
    op, attrs = node.op, node.attrs
    if op in UNARY:
        return UNARY[op][1](args[0])
    if op in BINARY:
        return BINARY[op][1](*args)
    if op == "attention":
        scale = attrs["scale"]
        imm = None if scale is None else tirx.FloatImm(node.dtype, scale)
        return relax.op.nn.attention(*args, scale=imm, causal_mask=attrs["causal"])
    if op == "strided_slice":
        axis, begin = attrs["axis"], attrs["begin"]
        end = dim(node.shape[axis]) + begin
        return relax.op.strided_slice(
            args[0], axes=[axis], begin=[begin], end=[end], assume_inbound=attrs["inbound"]
        )
    return _BUILD[op](args, node, dim)


def _distances(n: Node, dim: Callable[[Size], Any]) -> Any:
    """Subtract positions of queries from those of keys, as int64."""
    queries, keys = map(dim, n.shape)
    first = keys - queries if n.attrs["corner"] == "bottom" else tirx.IntImm("int64", 0)
    rows = relax.op.expand_dims(relax.op.arange(first, first + queries, 1, "int64"), [1])
    columns = relax.op.expand_dims(relax.op.arange(0, keys, 1, "int64"), [0])
    return relax.op.subtract(columns, rows)


def _comparison(n: Node, dim: Callable[[Size], Any]) -> Any:
    distance = _distances(n, dim)
    seen = relax.op.less_equal(distance, relax.const(0, "int64"))
    if n.attrs["window"] is None:
        return seen
    inside = relax.op.greater(distance, relax.const(-n.attrs["window"], "int64"))
    return relax.op.logical_and(seen, inside)


_BUILD: dict[str, Callable[..., Any]] = {
    "where": lambda a, n, dim: relax.op.where(*a),
    "concat": lambda a, n, dim: relax.op.concat(a, n.attrs["axis"]),
    "broadcast_to": lambda a, n, dim: relax.op.broadcast_to(a[0], [dim(d) for d in n.shape]),
    "distance": lambda a, n, dim: relax.op.astype(_distances(n, dim), n.dtype),
    "band": lambda a, n, dim: _comparison(n, dim),
    "rms_norm": lambda a, n, dim: relax.op.nn.rms_norm(
        a[0], a[1], axes=list(n.attrs["axes"]), epsilon=n.attrs["eps"]
    ),
    "layer_norm": lambda a, n, dim: relax.op.nn.layer_norm(
        a[0], a[1], a[2], axes=list(n.attrs["axes"]), epsilon=n.attrs["eps"]
    ),
    "matmul": lambda a, n, dim: relax.op.matmul(a[0], a[1], out_dtype=n.attrs["out_dtype"]),
    "mean": lambda a, n, dim: relax.op.mean(a[0], n.attrs["axis"], n.attrs["keepdims"]),
    "softmax": lambda a, n, dim: relax.op.nn.softmax(a[0], n.attrs["axis"]),
    "astype": lambda a, n, dim: relax.op.astype(a[0], n.dtype),
    "alias": lambda a, n, dim: a[0],
    "reshape": lambda a, n, dim: relax.op.reshape(a[0], [dim(d) for d in n.shape]),
    "permute_dims": lambda a, n, dim: relax.op.permute_dims(
        a[0], None if n.attrs.get("plain") else list(n.attrs["axes"])
    ),
    "split": lambda a, n, dim: relax.op.split(
        a[0], n.attrs["sections"] or list(n.attrs["at"]), n.attrs["axis"]
    ),
    "item": lambda a, n, dim: relax.TupleGetItem(a[0], n.attrs["index"]),
    "repeat": lambda a, n, dim: relax.op.repeat(a[0], n.attrs["times"], n.attrs["axis"]),
}
