"""The two products of an attention kernel: queries with keys, and weights with values.

The scores that the first leaves in a lane are, once they are weights, what the second wants there
as its left operand.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...estimator.families.mma_attention import holds_queries
from .attention_rows import AttentionRows, row_of
from .attention_softmax import RegisterSoftmax
from .fragments import SharedTile, local, multiply, pack_left
from .instructions import INSTRUCTIONS
from .layout import MMA_M, MMA_N
from .tile import int32

AHEAD = 2
"""Pairs of instructions whose right operands are loaded before they are needed."""

Load = Callable[[int, int, int], None]


class AttentionProducts:
    """Emits the products of a warp, into the IR builder that is open.

    Parameters
    ----------
    rows : AttentionRows
        The rows of the block, with workload and plan.
    softmax : RegisterSoftmax
        Holds the scores.

    Attributes
    ----------
    queries, keys, values : SharedTile
        The operands in shared memory, those of a block of keys.
    """

    def __init__(self, rows: AttentionRows, softmax: RegisterSoftmax) -> None:
        """Allocate registers, in the block that is open."""
        self.rows, self.softmax = rows, softmax
        work, plan = rows.work, rows.plan
        self.plan, self.lane = plan, rows.lane
        self.types = INSTRUCTIONS[work.dtype]
        self.queries = SharedTile(plan.block_m, work.head_dim, self.types)
        self.keys = SharedTile(plan.block_n, work.head_dim, self.types)
        self.values = SharedTile(plan.block_n, work.v_dim, self.types)
        self.tiles = plan.reg_m // MMA_M
        self.columns = self.values.slices * 2  # instructions along the values
        self.holds_queries = holds_queries(plan, work)
        slices = self.keys.slices if self.holds_queries else 2
        self.left = local("left", self.tiles * slices * 4, "uint32")
        self.weights = local("weights", self.tiles * 4, "uint32")
        self.right = local("right", (AHEAD + 1) * 4, "uint32")
        self.sums = local("sums", self.tiles * self.columns * 4, "float32")

    def rescale(self) -> None:
        """Multiply the results so far as the softmax asks for."""
        for tile in range(self.tiles):
            for half in range(2):
                ratio = self.softmax.ratio[row_of(tile, half)]
                for index in self._row_sums(tile, half):
                    T.buffer_store(self.sums, self.sums[index] * ratio, [index])

    def load_queries(self, queries: tirx.Expr) -> None:
        """Load all queries of the warp into registers."""
        for index in range(self.keys.slices):
            self._load_queries(queries, index, index)

    def result_pairs(self, index: int) -> list[list[tirx.Expr]]:
        """Return the sums of a row of this lane, two neighbouring columns at a time."""
        sums = self._row_sums(*divmod(index, 2))
        return [[self.sums[i] for i in sums[first : first + 2]] for first in range(0, len(sums), 2)]

    def _row_sums(self, tile: int, half: int) -> list[int]:
        """Return the indices of the sums of a row of this lane."""
        first = tile * self.columns * 4 + half * 2
        return [first + column * 4 + e for column in range(self.columns) for e in range(2)]

    def _load_queries(self, queries: tirx.Expr, index: int, place: int) -> None:
        """Load a slice of the queries into registers."""
        for tile in range(self.tiles):
            line = self.rows.warp_row + int32(tile * MMA_M)
            first = (place * self.tiles + tile) * 4
            self.queries.load_left(self.left, first, queries, (self.lane, line, index))

    def score(self, queries: tirx.Expr, keys: tirx.Expr) -> None:
        """Multiply queries and keys."""
        pairs = self.plan.block_n // (2 * MMA_N)
        slices = self.keys.slices
        if not self.holds_queries:
            self._load_queries(queries, 0, 0)

        def load(place: int, slice_: int, pair: int) -> None:
            line = pair * 2 * MMA_N
            self.keys.load_right(self.right, place * 4, keys, (self.lane, line, slice_), "nk")

        def use(place: int, slice_: int, pair: int) -> None:
            left = slice_
            if not self.holds_queries:
                left = slice_ % 2
                if pair == 0 and slice_ + 1 < slices:
                    self._load_queries(queries, slice_ + 1, (slice_ + 1) % 2)
            for tile in range(self.tiles):
                a = [self.left[(left * self.tiles + tile) * 4 + i] for i in range(4)]
                for e in range(2):
                    sums = self.softmax.sums_at(tile, 2 * pair + e)
                    b = [self.right[place * 4 + 2 * e + i] for i in range(2)]
                    multiply(self.types, sums, a, b, begin=slice_ == 0)

        _pipelined(slices, pairs, load, use)

    def weigh(self, values: tirx.Expr) -> None:
        """Add the values, each times its weight, to the results."""

        def load(place: int, slice_: int, pair: int) -> None:
            at = (self.lane, slice_ * self.types.k, pair)
            self.values.load_right(self.right, place * 4, values, at, "kn")

        def use(place: int, slice_: int, pair: int) -> None:
            for tile in range(self.tiles):
                if pair == 0:
                    self._pack_weights(tile, slice_)
                a = [self.weights[tile * 4 + i] for i in range(4)]
                for e in range(2):
                    first = (tile * self.columns + 2 * pair + e) * 4
                    sums = [self.sums[first + i] for i in range(4)]
                    b = [self.right[place * 4 + 2 * e + i] for i in range(2)]
                    multiply(self.types, sums, a, b)

        _pipelined(self.plan.block_n // self.types.k, self.values.slices, load, use)

    def _pack_weights(self, tile: int, slice_: int) -> None:
        """Make the left operand of a slice of keys."""

        def weight(instruction: int, half: int, element: int) -> tirx.Expr:
            return self.softmax.score_at(tile, 2 * slice_ + instruction, half, element)

        pack_left(self.weights, tile * 4, weight, self.types)


def _pipelined(slices: int, pairs: int, load: Load, use: Load) -> None:
    """Emit the loads and products of every pair of each slice, loads `AHEAD` of products.

    Both are given where the operand is kept, the slice and the pair.
    """
    order = [(slice_, pair) for slice_ in range(slices) for pair in range(pairs)]
    for step in range(-AHEAD, len(order)):
        if step + AHEAD < len(order):
            load((step + AHEAD) % (AHEAD + 1), *order[step + AHEAD])
        if step >= 0:
            use(step % (AHEAD + 1), *order[step])
