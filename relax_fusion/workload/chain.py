"""Any chain that a block graph can say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from .base import Atom, Described
from .dims import Dim, DynamicDim
from .dtypes import STORED_BYTES
from .epilogues import Norm
from .graph import Block, Graph
from .norm_matmul import NormMatmul, Projection, WeightLayout
from .roofline import Sizes, instructions, is_contraction, size_at
from .values import Axis, Expr, Op, Read, parts, reads

ROWS = "rows"
"""The dynamic dimension that plans are chosen by."""

BATCH = "batch"
"""What the names of dynamic numbers of matrices begin with."""


@dataclass(frozen=True)
class Chain(Described):
    """Contractions, maps and reductions, statement by statement."""

    statements: Graph
    """What is computed.  Of its dynamic dimensions, plans are chosen by that called ``"rows"``;
    those whose names begin with ``"batch"`` are numbers of matrices."""

    __hash__ = Described.__hash__

    def _graph(self) -> Graph:
        return self.statements

    @property
    def ranged(self) -> dict[str, Dim]:
        """The rows."""
        return {ROWS: self.rows}

    @cached_property
    def rows(self) -> Dim:
        """What plans are chosen by: a dynamic dimension, or the rows of the result."""
        graph = self.statements
        sizes = [d for t in graph.tensors for d in t.shape]
        dynamic = (d for d in sizes if isinstance(d, DynamicDim) and d.name == ROWS)
        shape = graph.outputs[0].shape or (1,)
        return next(dynamic, shape[-2:][0])

    @property
    def dtype(self) -> str:
        """The dtype of the first operand."""
        return self.statements.inputs[0].dtype

    @property
    def out_dtype(self) -> str:
        """The dtype of the result."""
        return self.statements.outputs[0].dtype

    @property
    def contractions(self) -> tuple[Block, ...]:
        """The statements that sum products."""
        return tuple(b for b in self.statements.blocks if is_contraction(b))

    @property
    def normed(self) -> int:
        """How many contractions read the rows of a norm."""
        left = (next(reads(b.value)).tensor for b in self.contractions)
        return sum(self._norm_of(tensor) is not None for tensor in left)

    def apart(self, **sizes: int) -> list[Atom]:
        """Return the contractions, softmaxes, norms and transpositions.

        Maps go along with a contraction, and a norm with the one behind it, if nothing but its own
        arithmetic is between; contractions of the same rows are one kernel.  Beside norms and
        softmaxes weights count as if columns lay side by side: kernels of such chains are priced
        too low for few rows on a CPU, by as much as weights that lie otherwise take there.
        """
        found = [*self._matmuls(sizes), *self._reductions(sizes), *self._transposed(sizes)]
        return [replace(found[0], slots=self._slots(sizes)), *found[1:]] if found else []

    def _slots(self, sizes: Sizes) -> int:
        """Return the instructions of maps, but of those that are a part of a norm or a softmax."""
        graph = self.statements
        reduced = {b.out for b in graph.blocks if b.combine and not is_contraction(b)}
        total = 0
        for block in graph.blocks:
            if not block.combine and reduced.isdisjoint(r.tensor for r in reads(block.value)):
                extents = {axis.name: size_at(axis.size, sizes) for axis in block.axes}
                found = instructions(block.value).items()
                total += sum(count * prod(extents[a] for a in axes) for axes, count in found)
        return total

    def _matmuls(self, sizes: Sizes) -> Iterator[Atom]:
        plain = all(is_contraction(b) for b in self.statements.blocks if b.combine)
        groups: dict[tuple[Read, int], list[tuple[Block, _Product]]] = {}
        for block in self.contractions:
            each = _Product.of(block, sizes)
            groups.setdefault((each.left, each.matrices), []).append((block, each))
        for (_, matrices), found in groups.items():
            (_, first), *_ = found
            columns = tuple(
                Projection(
                    each.columns,
                    each.layout if plain else "kn",
                    ("residual",) * (self._residuals(block) if plain else 0),
                )
                for block, each in found
            )
            dtypes = {r.tensor: self.statements[r.tensor].dtype for r in reads(found[0][0].value)}
            dtype = min(dtypes.values(), key=lambda d: (STORED_BYTES[d], d))
            norm = self._norm_of(first.left.tensor)
            matmul = NormMatmul(first.rows, first.depth, columns, norm, dtype, dtype)
            yield Atom(
                matmul=matmul,
                rows=first.rows,
                matrices=matrices,
                maker="rule" if first.is_batch else "pass",
            )

    def _residuals(self, product: Block) -> int:
        """Return how many operands of its size the maps behind a product read."""
        given = {slot.name for slot in self.statements.slots if slot.role == "in"}
        made, count = {product.out}, 0
        for block in self.statements.blocks:
            read = list(reads(block.value))
            if not block.combine and any(r.tensor in made for r in read):
                made.add(block.out)
                axes = {a.name for a in block.axes}
                along = [{n for c in r.at for n, _ in c.terms} for r in read if r.tensor in given]
                count += along.count(axes)
        return count

    def _norm_of(self, rows: str) -> Norm | None:
        """Return the norm that a tensor is the rows of."""
        made = {b.out: b for b in self.statements.blocks}
        block = made.get(rows)
        if block is None or block.combine or not _functions(block.value) <= _ARITHMETIC:
            return None
        sums = [made[r.tensor] for r in reads(block.value) if r.tensor in made]
        sums = [b for b in sums if b.combine == "sum" and not is_contraction(b)]
        sums = [b for b in sums if not _weighs(self.statements, b)]
        return Norm("layer" if len(sums) > 1 else "rms", EPS) if sums else None

    def _reductions(self, sizes: Sizes) -> Iterator[Atom]:
        """Yield softmaxes, and the norms that are kernels of their own."""
        graph, width = self.statements, STORED_BYTES[self.dtype]
        for block in graph.blocks:
            count = prod(size_at(a.size, sizes) for a in (*block.axes, *block.reduced))
            if block.combine == "max":
                rows = prod(size_at(a.size, sizes) for a in block.axes)
                yield Atom(2 * width * count, rows=rows, scores=count)
            elif block.combine and not is_contraction(block) and self._is_apart(block):
                yield Atom(2 * width * count, normalised=count)

    def _is_apart(self, norm: Block) -> bool:
        """Tell whether a sum is that of a norm which no contraction takes in."""
        graph = self.statements
        if _weighs(graph, norm):
            return False
        readers = [b for b in graph.blocks if norm.out in {r.tensor for r in reads(b.value)}]
        if any(b.combine for b in readers):  # a mean: the norm is told by its other sum
            return False
        left = {next(reads(b.value)).tensor for b in self.contractions}
        return not any(self._norm_of(b.out) is not None for b in readers if b.out in left)

    def _transposed(self, sizes: Sizes) -> Iterator[Atom]:
        """Yield a copy of each tensor whose rows are the columns of what is made of it."""
        for block in self.statements.blocks:
            order = [a.name for a in (*block.axes, *block.reduced)]
            found = list(reads(block.value))
            for read in found[: 1 if is_contraction(block) else None]:
                places = [order.index(name) for c in read.at for name, _ in c.terms]
                if places != sorted(places):
                    count = prod(size_at(d, sizes) for d in self.statements[read.tensor].shape)
                    yield Atom(2 * STORED_BYTES[self.dtype] * count)


@dataclass(frozen=True)
class _Product:
    """The sizes of a contraction, whose first operand is `left`, and how the second one lies.

    It is a batch if each matrix has a second operand of its own, even where there is one.
    """

    left: Read
    layout: WeightLayout
    is_batch: bool
    rows: int
    columns: int
    depth: int
    matrices: int

    @staticmethod
    def of(block: Block, sizes: Sizes) -> _Product:
        left, right = reads(block.value)
        axes = {a.name: a for a in (*block.axes, *block.reduced)}
        first, second = ({a for c in r.at for a, _ in c.terms} for r in (left, right))
        summed = {a.name for a in block.reduced}

        def count(names: set[str]) -> int:
            found: list[Axis] = [axes[n] for n in names]
            return prod(size_at(a.size, sizes) for a in found)

        both = first & second
        kinds = (first - both - summed, second - both - summed, summed, both - summed)
        along = {name for name, _ in right.at[-1].terms}
        layout: WeightLayout = "nk" if along and along <= summed else "kn"
        return _Product(left, layout, bool(kinds[-1]), *map(count, kinds))


EPS = 1e-5
"""Of a norm whose price is asked for."""

_ARITHMETIC = {"add", "subtract", "multiply", "divide", "rsqrt", "sqrt"}
"""What the rows of a norm are computed by."""


def _functions(value: Expr) -> set[str]:
    return {part.name for part in parts(value) if isinstance(part, Op)}


def _weighs(graph: Graph, block: Block) -> bool:
    """Tell whether a sum is that of the exponentials of a softmax."""
    made = {b.out: b for b in graph.blocks}
    sources = [made[r.tensor] for r in reads(block.value) if r.tensor in made]
    return any(
        made[r.tensor].combine == "max" for s in sources for r in reads(s.value) if r.tensor in made
    )
