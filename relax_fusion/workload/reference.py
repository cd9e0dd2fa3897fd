"""The numbers of a block graph, by numpy: what every kernel of it is measured against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import GraphError
from .dims import Dim, DynamicDim
from .formats import Operand
from .graph import Block, Graph, Tensor
from .unpacked import decoded
from .values import At, Axis, AxisValue, Const, Expr, Lookup, Op, Read, Size

Array = np.ndarray[Any, Any]
Rounding = Callable[[Array, Tensor], Array]

erf = np.vectorize(math.erf, otypes=["float64"])


def _gelu(x: Array) -> Array:
    return (0.5 * x * (1 + erf(x * math.sqrt(0.5)))).astype(x.dtype)


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "ratio": lambda x, y: np.where(y == 0, y, x / np.where(y == 0, 1, y)),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "sqrt": np.sqrt,
    "log": np.log,
    "finite": lambda x: np.where(np.isneginf(x), 0, x).astype(x.dtype),
    "exp": np.exp,
    "tanh": np.tanh,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * np.exp(-np.logaddexp(0, -x)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * np.exp(-np.logaddexp(0, -1.702 * x)),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)),
}
"""What each of the operators of a graph computes that is no formula of others."""


def unrounded(values: Array, tensor: Tensor) -> Array:
    """Round nothing."""
    return values


def kept(values: Array, tensor: Tensor) -> Array:
    """Round what every kernel rounds."""
    return rounded(values, tensor) if tensor.rounds else values


def rounded(values: Array, tensor: Tensor) -> Array:
    """Round every tensor to its dtype."""
    return values.astype(numpy_dtype(tensor.dtype)).astype(values.dtype)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy type called `name`, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Array | int],
    dtype: str = "float64",
    rounding: Rounding = kept,
    constants: str = "float32",
) -> dict[str, Array]:
    """Compute the outputs of a graph: arrays of `dtype` by their names.

    `inputs`: arrays of `graph.inputs` by name, of any dtype; scalars as numbers.
    `dtype`: what values and sums are computed in.
    `rounding`: what a tensor that a statement made becomes: `unrounded`, `kept` (those are rounded
    that every kernel rounds), `rounded` (each to its own dtype), or another.
    `constants`: what constants are rounded to; kernels have them in float32.
    Raises `GraphError` if an input is missing or unknown, or its shape is not what the graph says.
    """
    with np.errstate(all="ignore"):
        run = _Run(graph, inputs, dtype, rounding)
        run.constants = np.dtype(constants)
        for block in graph.blocks:
            run.execute(block)
        return {o.name: run.values[o.name] for o in graph.outputs}


def sizes_of(graph: Graph, inputs: Mapping[str, Array | int]) -> dict[str, int]:
    """Return the sizes of the dynamic dimensions, as the inputs have them.

    Raises `GraphError` if an input is missing or unknown, or two shapes contradict each other.
    """
    names = [o.name for o in graph.inputs]
    if set(names) != set(inputs):
        raise GraphError(f"inputs are {', '.join(inputs)}; must be {', '.join(names)}")
    found: dict[str, int] = {}
    for slot in graph.slots:
        if slot.role == "scalar" and isinstance(slot.dim, DynamicDim):
            found[slot.dim.name] = int(inputs[slot.name])
    for operand in graph.inputs:
        if operand.shape is not None:
            _match(operand, np.shape(inputs[operand.name]), found)
    return found


def _match(operand: Operand, shape: tuple[int, ...], found: dict[str, int]) -> None:
    """Note the sizes that a shape tells, and check those that are known."""
    assert operand.shape is not None
    wanted = [d if isinstance(d, int) else found.get(d.name, d.name) for d in operand.shape]
    fits = len(shape) == len(wanted)
    for dim, known, size in zip(operand.shape, wanted, shape, strict=False):
        fits &= isinstance(known, str) or known == size
        if isinstance(dim, DynamicDim):
            fits &= found.setdefault(dim.name, size) == size
    if not fits:
        raise GraphError(f"{operand.name} has shape {list(shape)}; must be {wanted}")


class _Run:
    """The tensors so far, and the sizes."""

    def __init__(
        self, graph: Graph, inputs: Mapping[str, Array | int], dtype: str, rounding: Rounding
    ):
        self.graph, self.dtype, self.rounding = graph, np.dtype(dtype), rounding
        self.constants = np.dtype("float32")
        self.sizes = sizes_of(graph, inputs)
        self.values: dict[str, Array] = {}
        for slot in graph.slots:
            if slot.role in ("in", "inout"):
                self.values[slot.name] = _unpacked(graph[slot.name], inputs).astype(dtype)

    def size(self, dim: Dim) -> int:
        """Return the value of a dimension."""
        return dim if isinstance(dim, int) else self.sizes[dim.name]

    def execute(self, block: Block) -> None:
        """Compute a statement."""
        tensor = self.graph[block.out]
        whole = tuple(map(self.size, tensor.shape))
        places = _Places(self, (*block.axes, *block.reduced))
        made = self._combined(block, places)
        made = np.broadcast_to(made, [self.size(a.size) for a in block.axes])
        outer = _Places(self, block.axes)
        made = self.rounding(made, tensor)
        if len(block.at) == len(whole) and _is_identity(block):
            self.values[block.out] = np.array(np.broadcast_to(made, whole))
            return
        # A part may be missing where no statement makes it: that is NaN, which is seen
        out = self.values.setdefault(block.out, np.full(whole, np.nan, self.dtype))
        if out.size and made.size:
            out[tuple(outer.index(c) for c in block.at)] = made

    def _combined(self, block: Block, places: _Places) -> Array:
        """Return the elements over the axes of a block, its reduced ones combined."""
        if not block.combine:
            return places.value(block.value)
        last = tuple(range(len(block.axes), places.rank))
        seen = places.seen(block)
        if block.combine == "sum" and block.start is None and isinstance(block.value, Op):
            found = self._contracted(block, places, seen)
        else:
            found = places.full(places.value(block.value))
            if seen is not None:
                hidden = 0 if block.combine == "sum" else -np.inf
                found = np.where(seen, found, self.dtype.type(hidden))
            reduce = np.sum if block.combine == "sum" else _maximum
            found = reduce(found, axis=last)
        if block.start is None:
            return found
        start = _Places(self, block.axes).value(block.start)
        return found + start if block.combine == "sum" else np.maximum(found, start)

    def _contracted(self, block: Block, places: _Places, seen: Array | None) -> Array:
        """Return sums, of products by matrix multiplication."""
        value = block.value
        parts = value.args if isinstance(value, Op) and value.name == "multiply" else (value,)
        factors = [places.value(v) for v in parts]
        if seen is not None:
            factors[0] = np.where(seen, factors[0], self.dtype.type(0))
        kept = set(range(len(block.axes)))
        repeated = set(range(places.rank)) - kept
        operands: list[Any] = []
        for factor in factors:
            full = factor.reshape((1,) * (places.rank - factor.ndim) + factor.shape)
            varied = [n for n in range(places.rank) if full.shape[n] != 1]
            repeated -= set(varied)
            operands += [full.reshape([full.shape[n] for n in varied]), varied]
        result = sorted(kept & {n for varied in operands[1::2] for n in varied})
        made = np.einsum(*operands, result, optimize=len(factors) > 1)
        made = made * math.prod(places.lengths[n] for n in repeated)
        return made.reshape([places.lengths[n] if n in result else 1 for n in sorted(kept)])


def _maximum(values: Array, axis: tuple[int, ...]) -> Array:
    return np.max(values, axis=axis, initial=-np.inf)


def _is_identity(block: Block) -> bool:
    return [_only_axis(c) for c in block.at] == [a.name for a in block.axes]


def _only_axis(at: At) -> str | None:
    """Return the axis that a coordinate is; None if it is anything else."""
    return at.terms[0][0] if at.terms and at == At(((at.terms[0][0], 1),)) else None


class _Places:
    """The places of some axes, in order: values are arrays with a dimension for each axis."""

    def __init__(self, run: _Run, axes: tuple[Axis, ...]):
        self.run = run
        self.order = {a.name: n for n, a in enumerate(axes)}
        self.lengths = tuple(run.size(a.size) for a in axes)
        self.rank = len(axes)

    def axis(self, name: str) -> Array:
        """Return the numbers of an axis along its dimension."""
        n = self.order[name]
        return np.arange(self.lengths[n]).reshape((-1,) + (1,) * (self.rank - n - 1))

    def full(self, values: Array) -> Array:
        """Return an array with every place."""
        return np.broadcast_to(values, self.lengths)

    def index(self, at: At) -> Array:
        """Return a coordinate at every place."""
        found: Any = np.full((1,) * self.rank, at.start)
        for name, stride in at.terms:
            found = found + self.axis(name) * stride
        if isinstance(at, Lookup):
            assert at.number is not None, "a builder gives one"
            part = self.value(at.number).astype("int64")
            return found + np.clip(part, 0, at.count - 1) * at.stride
        found = found // at.div
        return found if at.mod is None else found % self.run.size(at.mod)

    def value(self, value: Expr) -> Array:
        """Return a value at every place."""
        if isinstance(value, Read):
            return self._read(value)
        if isinstance(value, AxisValue):
            return self.axis(value.axis).astype(self.run.dtype)
        if isinstance(value, Size):
            return np.array(self.run.size(value.dim), self.run.dtype)
        if isinstance(value, Const):
            return np.array(self.run.constants.type(value.value), self.run.dtype)
        assert isinstance(value, Op)
        if value.formula is not None:
            return self.value(value.formula)
        return FUNCTIONS[value.name](*(self.value(a) for a in value.args))

    def _read(self, read: Read) -> Array:
        """Return the elements of a tensor; a view of it where it is read along its axes."""
        array = self.run.values[read.tensor]
        axes = [_only_axis(c) for c in read.at]
        order = [self.order[a] for a in axes if a is not None]
        lengths = [self.lengths[n] for n in order]
        whole = len(set(order)) == array.ndim
        if not whole or any(n > size for n, size in zip(lengths, array.shape, strict=True)):
            return array[tuple(self.index(c) for c in read.at)]
        array = array[tuple(map(slice, lengths))].transpose(np.argsort(order))
        return array.reshape([n if i in order else 1 for i, n in enumerate(self.lengths)])

    def seen(self, block: Block) -> Array | None:
        """Return which places are combined; None if all are."""
        found: list[Array] = []
        if block.band is not None:
            distance = self.axis(block.band.column) - self.axis(block.band.row)
            if block.band.least is not None:
                found.append(distance >= self.value(block.band.least))
            if block.band.most is not None:
                found.append(distance <= self.value(block.band.most))
        if block.where is not None:
            found.append(self.value(block.where) != 0)
        if not found:
            return None
        return np.logical_and.reduce(np.broadcast_arrays(*found))


def _unpacked(tensor: Tensor, inputs: Mapping[str, Any]) -> Array:
    """Return the elements of an operand."""
    if tensor.format is None:
        return np.asarray(inputs[tensor.name])
    stored = [np.asarray(inputs[o.name]) for o in tensor.operands()]
    return decoded(tensor.format, stored, tensor.shape)
