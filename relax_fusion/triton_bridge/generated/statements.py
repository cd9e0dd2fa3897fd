"""Statements of a block graph as lines of Triton."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...tiling import Access, Schedule
from ...tiling.structure import LEAST_SUMMED, refuse_spread
from ...workload.graph import Block, Graph, Tensor
from ...workload.values import Read
from .products import Product, Side, product_of
from .tiles import Blocks, Frame, bracketed, spread
from .values import DTYPES, Values, inside, is_integer, is_whole

LEAST_INTEGERS = 32
"""A product of matrices of int8 sums at least this many elements (Triton, `tl.dot`); float16 holds
int8 as well."""

_EVERY_NAN = "propagate_nan=tl.PropagateNan.ALL"


class Statements:
    """Writes what the statements of a graph compute of tiles, as a schedule says."""

    def __init__(self, graph: Graph, schedule: Schedule, blocks: Blocks):
        self.graph, self.blocks, self.space = graph, blocks, schedule.space
        self.made = {block.out: block for block in graph.blocks}
        self.loaded: dict[Access, str] = {}
        self.growing: set[str] = set()

    def load(self, what: Access) -> str:
        """Return the name of the tile of an operand."""
        count = sum(1 for each in self.loaded if each.tensor == what.tensor)
        number = f"_{count + 1}" if count else ""
        return self.loaded.setdefault(what, what.tensor + number)

    def begin(self, name: str) -> str:
        """Return the line in front of the loop over which a sum or a maximum grows."""
        self.growing.add(name)
        block, frame = self.made[name], self.frame(name)
        shape = self.blocks.shape(frame)
        dtype = "tl.int32" if self._adds_integers(block) else "tl.float32"
        if block.start is not None:
            start = self._values(block).whole(block.start, frame)
            return f"{name}_acc = {self._cast(block, start)}"
        nothing = "0" if block.combine == "sum" else 'float("-inf")'
        return f"{name}_acc = tl.full({shape}, {nothing}, {dtype})"

    def end(self, name: str) -> str:
        """Return the line behind that loop."""
        self.growing.remove(name)
        return f"{name} = {self._stored(f'{name}_acc', self.graph[name])}"

    def compute(self, name: str) -> list[str]:
        """Return the lines that compute a tile."""
        block, frame = self.made[name], self.frame(name)
        if not block.combine:
            value = self._values(block).whole(block.value, frame)
            return [f"{name} = {self._stored(value, self.graph[name])}"]
        product = product_of(self.graph, block, self.blocks, frame)
        if product and product.dtype == "int8" and self._depth(product) < LEAST_INTEGERS:
            product = replace(product, dtype="float16")
        if block.combine == "max":
            return self._largest(block, self._combined(block, frame))
        rescale = self._rescale(name, frame) if name in self.growing else []
        if product is None or self._depth(product) < LEAST_SUMMED:
            return [*rescale, self._add(block, self._combined(block, frame))]
        return [*rescale, self._multiply(block, product, frame)]

    def _depth(self, product: Product) -> int:
        """Return how many elements a product of matrices sums."""
        return prod(self.blocks.block[loop] for loop in product.summed)

    def frame(self, tensor: str) -> Frame:
        """Return the dimensions of the tile of a tensor that is made."""
        return self.blocks.frame(self.space.step[tensor].makes.loops)

    def _cast(self, block: Block, value: str) -> str:
        """Return a value as one of the type of a statement's sums."""
        return f"{bracketed(value)}.to(tl.int32)" if self._adds_integers(block) else value

    def _adds_integers(self, block: Block) -> bool:
        added = [e for e in (block.value, block.start) if e is not None]
        made = block.combine == "sum" and is_integer(self.graph[block.out].dtype)
        return made and all(is_whole(self.graph, each) for each in added)

    def _stored(self, value: str, tensor: Tensor) -> str:
        """Return a float32 value as one of a tensor."""
        return (
            value if tensor.dtype == "float32" else f"{bracketed(value)}.to({DTYPES[tensor.dtype]})"
        )

    def _values(self, block: Block) -> Values:
        def tile(read: Read) -> tuple[str, Frame]:
            name = read.tensor
            if name in self.made:
                return (f"{name}_finite" if name in self.growing else name), self.frame(name)
            places = [
                replace(c, terms=tuple((self.blocks.loop_of[block.out, a], n) for a, n in c.terms))
                for c in read.at
            ]
            access = Access(name, tuple(places))
            return self.loaded[access], self.blocks.frame(access.loops)

        return Values(self.graph, self.blocks, block.out, tile)

    def _combined(self, block: Block, frame: Frame) -> str:
        """Return a sum or a maximum over a tile, of values that are computed one by one."""
        values, reduced = self._values(block), self.blocks.loops(block, True)
        every = (*frame, *self.blocks.frame(reduced))
        refuse_spread(block.out, prod(self.blocks.block[loop] for loop in every))
        value = values.whole(block.value, every)
        seen = [*inside(self.blocks, reduced, every), *values.seen(block, every)]
        if seen:
            nothing = "0.0" if block.combine == "sum" else 'float("-inf")'
            value = f"tl.where({' & '.join(seen)}, {value}, {nothing})"
        how = "tl.sum" if block.combine == "sum" else "largest"
        for number in reversed(range(len(frame), len(every))):
            value = f"{how}({value}, {number})"
        return value

    def _largest(self, block: Block, value: str) -> list[str]:
        """Return the lines of a maximum that grows, or is complete."""
        name = block.out
        if name in self.growing:
            return [
                f"{name}_before = {name}_acc",
                f"{name}_acc = tl.maximum({name}_acc, {value}, {_EVERY_NAN})",
                f"{name}_finite = finite({name}_acc)",
                f"{name}_scale = tl.exp({name}_before - {name}_finite)",
            ]
        if block.start is not None:
            start = self._values(block).text(block.start, self.frame(name))
            value = f"tl.maximum({value}, {start}, {_EVERY_NAN})"
        return [f"{name} = {self._stored(value, self.graph[name])}"]

    def _add(self, block: Block, value: str) -> str:
        """Return the line of a sum that grows, or is complete."""
        if block.out in self.growing:
            return f"{block.out}_acc += {self._cast(block, value)}"
        if block.start is not None:
            value = f"{value} + {self._values(block).text(block.start, self.frame(block.out))}"
        return f"{block.out} = {self._stored(value, self.graph[block.out])}"

    def _rescale(self, name: str, frame: Frame) -> list[str]:
        """Return the lines that multiply a sum by how maxima that its values go by have changed.

        Where two factors go by the same maximum, it is by the square of the change.
        """
        made = [
            self.space.step[r.tensor] for r in self.space.step[name].reads if r.tensor in self.made
        ]
        tops = [r.tensor for step in made for r in step.reads if r.tensor in self.growing]
        return [
            f"{name}_acc *= {spread(f'{top}_scale', self.frame(top), frame)}"
            for top in tops
            if self.made[top].combine == "max"
        ]

    def _multiply(self, block: Block, product: Product, frame: Frame) -> str:
        """Return the line of a product of matrices."""
        values, name = self._values(block), block.out
        hidden = {*values.conditioned(block)}
        sides = (product.left, product.right)
        masked = next((side for side in sides if hidden <= {*side.frame}), None)
        if masked is None:
            return self._add(block, self._combined(block, frame))
        left, right = (self._side(block, product, side, side is masked) for side in sides)
        how = ', input_precision="ieee"' if product.dtype == "float32" else ""
        how += ", out_dtype=tl.int32" if product.dtype == "int8" else ""
        made = (*product.rows, *product.columns)
        matrix = len(made) == 2 and len(product.summed) == 1
        same = (product.dtype == "int8") == self._adds_integers(block)
        if name in self.growing and matrix and made == frame and not product.numbers and same:
            return f"{name}_acc = tl.dot({left}, {right}, {name}_acc{how})"
        if not matrix:
            m, n, k = (
                prod(self.blocks.block[loop] for loop in loops)
                for loops in (product.rows, product.columns, product.summed)
            )
            left, right = f"tl.reshape({left}, [{m}, {k}])", f"tl.reshape({right}, [{k}, {n}])"
        value = f"tl.dot({left}, {right}{how})"
        if not matrix:
            value = f"tl.reshape({value}, {self.blocks.shape(made)})"
        value = spread(value, made, frame)
        if {*made} < {*frame}:
            value = f"tl.broadcast_to({value}, {self.blocks.shape(frame)})"
        return self._add(
            block, " * ".join([value, *(values.text(e, frame) for e in product.numbers)])
        )

    def _side(self, block: Block, product: Product, side: Side, masked: bool) -> str:
        """Return an operand of a product: zero where it is padding or left out."""
        values, read, dtype = self._values(block), side.read, DTYPES[product.dtype]
        if read is not None and read.tensor not in self.growing:
            text = spread(*values.tile(read), side.frame)
            if self.graph[read.tensor].dtype != product.dtype:
                text = f"{text}.to({dtype})"
        else:
            factors = " * ".join(values.text(factor, side.frame) for factor in side.factors)
            text = f"({factors}).to({dtype})"
        loaded = read is not None and read.tensor not in self.made
        seen = [] if loaded else inside(self.blocks, product.summed, side.frame)
        seen += values.seen(block, side.frame) if masked else []
        return f"tl.where({' & '.join(seen)}, {text}, 0.0).to({dtype})" if seen else text
