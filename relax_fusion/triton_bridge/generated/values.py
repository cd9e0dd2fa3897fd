"""Values of a block graph as expressions of Triton."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...workload.graph import Block, Graph
from ...workload.operators import ACTIVATIONS
from ...workload.values import At, AxisValue, Const, Expr, Op, Read, Size, parts, reads
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
"""What each operator of a graph is that is no formula of others, of float32 values."""

DTYPES = {
    **{name: f"tl.{name}" for name in ("float16", "bfloat16", "float32", "int8", "int32", "int64")},
    "uint8": "tl.uint8",
    "bool": "tl.int1",
    "float8_e4m3fn": "tl.float8e4nv",
    "float8_e5m2": "tl.float8e5",
}
"""Triton's names of dtypes."""

Tiles = Callable[[Read], tuple[str, Frame]]
"""The name of the tile that a read is of, and its dimensions."""


class Values:
    """Writes the values of one statement.

    Parameters
    ----------
    graph : Graph
        Whose statement it is.
    blocks : Blocks
        The loops.
    out : str
        What the statement makes.
    tile : callable
        The name of the tile that a read is of, and its dimensions.
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
            return size_name(value.dim)
        if isinstance(value, Const):
            return _number(value.value)
        assert isinstance(value, Op), value
        if value.formula is not None:
            return self.text(value.formula, frame)
        return FUNCTIONS[value.name].format(*(self.text(arg, frame) for arg in value.args))

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
                found.append(f"({column} - {row} >= {_limit(block.band.least)})")
            if block.band.most is not None:
                found.append(f"({column} - {row} <= {_limit(block.band.most)})")
        if block.where is not None:
            found.append(f"({self.text(block.where, frame)} != 0)")
        return found

    def conditioned(self, block: Block) -> Frame:
        """Return the dimensions that these conditions depend on."""
        axes = [block.band.column, block.band.row] if block.band is not None else []
        known = parts(block.where) if block.where is not None else ()
        for part in known:
            axes += [part.axis] if isinstance(part, AxisValue) else []
            axes += [n for c in part.at for n, _ in c.terms] if isinstance(part, Read) else []
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
    text = f"{bracketed(text)} // {place.div}" if place.div != 1 else text
    return text if place.mod is None else f"{bracketed(text)} % {size_name(place.mod)}"


def _limit(value: Expr) -> str:
    """Return the limit of a band: sums of sizes and whole numbers."""
    if isinstance(value, Size):
        return size_name(value.dim)
    if isinstance(value, Const):
        return str(int(value.value))
    assert isinstance(value, Op), value
    return FUNCTIONS[value.name].format(*map(_limit, value.args))


def _number(value: float) -> str:
    """Return a number as text."""
    return repr(value) if math.isfinite(value) else f'float("{value}")'
