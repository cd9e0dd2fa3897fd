"""Values of a block graph as expressions of Triton."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...workload.graph import Block, Graph
from ...workload.operators import ACTIVATIONS
from ...workload.values import At, AxisValue, Const, Expr, Op, Read, Size, axes_in, parts, reads
from .tiles import Blocks, Frame, bracketed, size_name, spread

FUNCTIONS = {
    "add": "({} + {})",
    "subtract": "({} - {})",
    "multiply": "({} * {})",
    "divide": "({} / {})",
    "ratio": "ratio({}, {})",
    "minimum": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "sqrt": "tl.sqrt_rn({})",
    "log": "tl.log({})",
    "finite": "finite({})",
    "exp": "tl.exp({})",
    "rsqrt": "(1.0 / tl.sqrt_rn({}))",
    **{name: f"activate({{}}, {name!r})" for name in ACTIVATIONS},
}
"""What each operator of a graph that is no formula of others is in Triton, of float32 values."""

DTYPES = {
    **{name: f"tl.{name}" for name in ("float16", "bfloat16", "float32", "int8", "int32", "int64")},
    "uint8": "tl.uint8",
    "bool": "tl.int1",
    "float8_e4m3fn": "tl.float8e4nv",
    "float8_e5m2": "tl.float8e5",
}
"""Triton's names of dtypes."""

_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest and the largest normal number of float32."""

Tiles = Callable[[Read], tuple[str, Frame]]
"""The name of the tile that a read is of, and its dimensions."""


class Values:
    """Writes the values of one statement of a graph, which makes `out`.

    `tile` returns the name of the tile that a read is of, and its dimensions.
    """

    def __init__(self, graph: Graph, blocks: Blocks, out: str, tile: Tiles):
        self.graph, self.blocks, self.out, self.tile = graph, blocks, out, tile

    def loop(self, axis: str) -> str:
        """Return the loop of an axis."""
        return self.blocks.loop_of[self.out, axis]

    def text(self, value: Expr, frame: Frame) -> str:
        """Return a value in float32, for elements of a frame."""
        if isinstance(value, Read):
            name, own = self.tile(value)
            dtype = self.graph[value.tensor].dtype
            return spread(name if dtype == "float32" else f"{name}.to(tl.float32)", own, frame)
        if isinstance(value, AxisValue):
            return f"({self.place(value.axis, frame)} * 1.0)"
        if isinstance(value, Size):
            return f"tl.cast({size_name(value.dim)}, tl.float32)"
        if isinstance(value, Const):
            return f"tl.cast({_number(value.value)}, tl.float32)"
        assert isinstance(value, Op), value
        if value.formula is not None:
            return self.text(value.formula, frame)
        return FUNCTIONS[value.name].format(*self._operands(value, frame))

    def _operands(self, value: Op, frame: Frame) -> list[str]:
        """Return the operands of an operator; beside a tile, a number is written as it is."""
        plain = any(not isinstance(arg, Const) for arg in value.args)
        return [
            _number(arg.value)
            if plain and isinstance(arg, Const) and _is_normal(arg.value)
            else self.text(arg, frame)
            for arg in value.args
        ]

    def whole(self, value: Expr, frame: Frame) -> str:
        """Return a value in float32, with dimensions of a frame too along which it is equal."""
        text = self.text(value, frame)
        found = {name for r in reads(value) for name in self.tile(r)[1]}
        found |= {self.loop(p.axis) for p in parts(value) if isinstance(p, AxisValue)}
        if {*frame} <= found:
            return text
        return f"tl.broadcast_to({text}, {self.blocks.shape(frame)})"

    def place(self, axis: str, frame: Frame) -> str:
        """Return the places along an axis, for elements of a frame."""
        return at(self.blocks, self.loop(axis), frame)

    def seen(self, block: Block, frame: Frame) -> list[str]:
        """Return the conditions under which a statement combines an element of a frame."""
        found = []
        if block.band is not None:
            column, row = (self.place(axis, frame) for axis in (block.band.column, block.band.row))
            if block.band.least is not None:
                found.append(f"({column} - {row} >= {self._limit(block.band.least, frame)})")
            if block.band.most is not None:
                found.append(f"({column} - {row} <= {self._limit(block.band.most, frame)})")
        if block.where is not None:
            found.append(f"({self.text(block.where, frame)} != 0)")
        return found

    def _limit(self, value: Expr, frame: Frame) -> str:
        """Return the limit of a band: sums of sizes and numbers, integers where they can be."""
        if isinstance(value, Read):
            return self.text(value, frame)
        if isinstance(value, Size):
            return size_name(value.dim)
        if isinstance(value, Const):
            return str(int(value.value)) if value.value.is_integer() else _number(value.value)
        assert isinstance(value, Op), value
        return FUNCTIONS[value.name].format(*(self._limit(arg, frame) for arg in value.args))

    def conditioned(self, block: Block) -> Frame:
        """Return the dimensions that these conditions depend on."""
        axes = [block.band.column, block.band.row] if block.band is not None else []
        limits = (block.band.least, block.band.most) if block.band is not None else ()
        for value in (block.where, *limits):
            axes += axes_in(value) if value is not None else []
        return self.blocks.frame(tuple(map(self.loop, axes)))


def at(blocks: Blocks, loop: str, frame: Frame) -> str:
    """Return the places along a loop, for elements of a frame."""
    return spread(f"{loop}_at", blocks.frame((loop,)), frame)


def inside(blocks: Blocks, loops: Frame, frame: Frame) -> list[str]:
    """Return the conditions that elements of a frame are no padding along some loops."""
    return [
        spread(f"{name}_in", blocks.frame((name,)), frame)
        for name in loops
        if blocks.is_padded(name)
    ]


def coordinate(blocks: Blocks, place: At, frame: Frame) -> str:
    """Return a coordinate whose terms are loops with strides, for elements of a frame."""
    terms = []
    for name, stride in place.terms:
        text = at(blocks, name, frame)
        terms.append(text if stride == 1 else f"{text} * {stride}")
    terms += [str(place.start)] if place.start or not terms else []
    text = " + ".join(terms)
    below = place.start < 0 or any(stride < 0 for _, stride in place.terms)
    if place.div != 1:
        text = f"quotient({text}, {place.div})" if below else f"{bracketed(text)} // {place.div}"
    if place.mod is None:
        return text
    wrapped = size_name(place.mod)
    return f"remainder({text}, {wrapped})" if below else f"{bracketed(text)} % {wrapped}"


def is_whole(graph: Graph, value: Expr) -> bool:
    """Tell whether a value is a whole number, whatever the operands have."""
    if isinstance(value, Read):
        return is_integer(graph[value.tensor].dtype)
    if isinstance(value, Const):
        return value.value.is_integer()
    known = ("add", "subtract", "multiply")
    return (
        isinstance(value, Op)
        and value.name in known
        and all(is_whole(graph, arg) for arg in value.args)
    )


def is_integer(dtype: str) -> bool:
    """Tell whether a dtype is of integers."""
    return dtype.startswith(("int", "uint"))


def _number(value: float) -> str:
    """Return a number as text, rounded to float32 where that has none of its size."""
    if abs(value) > _LARGEST:
        value = math.copysign(math.inf, value)
    return f'float("{value}")' if not math.isfinite(value) else repr(value)


def _is_normal(value: float) -> bool:
    """Tell whether a number is float32 to Triton, to which one that is too small is float64."""
    return value == 0 or not abs(value) < _SMALLEST
