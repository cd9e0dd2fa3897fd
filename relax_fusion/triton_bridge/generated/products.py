"""Contractions of a block graph as products of matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...workload.graph import Block, Graph
from ...workload.values import AxisValue, Expr, Op, Read, axes_in, parts, reads
from .tiles import Blocks, Frame

_HALVES = ("float16", "bfloat16")

_WIDE = ("float32", "int32", "int64", "uint16", "uint32")
"""Halves do not hold all numbers of these types."""


@dataclass(frozen=True)
class Side:
    """An operand of a product: what is multiplied, and its dimensions."""

    factors: tuple[Expr, ...]
    frame: Frame

    @property
    def read(self) -> Read | None:
        """The tensor that it is, where nothing is computed."""
        only = self.factors[0]
        return only if len(self.factors) == 1 and isinstance(only, Read) else None


@dataclass(frozen=True)
class Product:
    """A sum of products as ``left @ right``, times numbers."""

    left: Side
    right: Side
    """With dimensions ``(rows, summed)`` and ``(summed, columns)``."""
    rows: Frame
    columns: Frame
    summed: Frame
    """Loops of the result, and those that it sums over."""
    dtype: str
    """Of the operands."""
    numbers: tuple[Expr, ...]
    """Factors that no axis indexes."""


def product_of(graph: Graph, block: Block, blocks: Blocks, out: Frame) -> Product | None:
    """Return a statement as a product of matrices with the dimensions `out`; None where it is none.

    Its factors fall into two groups that have no axis of the result in common.
    """
    summed = blocks.frame(blocks.loops(block, True))
    if block.combine != "sum" or not summed:
        return None
    found: list[tuple[set[str], list[Expr]]] = []
    common: list[Expr] = []
    numbers: list[Expr] = []
    for factor in _factors(block.value):
        loops = {blocks.loop_of[block.out, axis] for axis in axes_in(factor)}
        if not loops & {*out, *summed}:
            numbers.append(factor)
        elif not loops & {*out}:
            common.append(factor)
        else:
            touching = [each for each in found if each[0] & loops & {*out}]
            joined = loops.union(*(each[0] for each in touching))
            parts = [f for each in touching for f in each[1]]
            found = [each for each in found if each not in touching]
            found.append((joined, [*parts, factor]))
    if len(found) != 2 or not all(loops >= {*summed} for loops, _ in found):
        return None
    found.sort(key=lambda each: min(out.index(name) for name in each[0] & {*out}))
    (first, left), (second, right) = found
    rows = tuple(name for name in out if name in first)
    columns = tuple(name for name in out if name in second)
    return Product(
        Side((*left, *common), (*rows, *summed)),
        Side(tuple(right), (*summed, *columns)),
        rows,
        columns,
        summed,
        _dtype(graph, [*left, *common], right),
        tuple(numbers),
    )


def _factors(value: Expr) -> Iterator[Expr]:
    """Yield the factors of a product."""
    if isinstance(value, Op) and value.name == "multiply":
        for arg in value.args:
            yield from _factors(arg)
    else:
        yield value


def _dtype(graph: Graph, left: list[Expr], right: list[Expr]) -> str:
    """Return the dtype in which operands are multiplied.

    It is that of half precision where both sides are tensors and one has it; 8-bit floats are
    multiplied in float16, of which they are a part.  What is computed first, and may be larger
    than float16 holds, is multiplied in bfloat16 or in float32; places along an axis in float32.
    """
    factors = (*left, *right)
    if any(isinstance(part, AxisValue) for factor in factors for part in parts(factor)):
        return "float32"
    found = {graph[r.tensor].dtype for factor in factors for r in reads(factor)}
    computed = max(len(left), len(right)) > 1 or not all(isinstance(f, Read) for f in factors)
    halves = found & {*_HALVES}
    if found & {*_WIDE} or len(halves) > 1 or (computed and halves != {"bfloat16"}):
        return "float32"
    if halves:
        return halves.pop()
    if all(dtype.startswith("float8") for dtype in found):
        return "float16"
    return "int8" if found == {"int8"} else "float32"
