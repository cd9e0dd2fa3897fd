"""The rows of a kernel for few of them, normalised by each of its thread blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from ...estimator.families.few_rows.tiles import CHUNK, MMA_ROWS
from ...estimator.prediction import ceil_div
from ...tvm_ir import T
from .fragments import scratch
from .layout import LANES, PIECE
from .tile import int32, int64

if TYPE_CHECKING:
    from .few_rows_kernel import FewRowsKernel

HALVES = CHUNK // 32
"""Times that a thread loads of a line of x, or of a column."""

REGISTERS = 4
"""Registers of a piece."""


class NormedRows:
    """The rows of a block, normalised between shared memory and the instructions.

    All threads add up the statistics of one row after the other, while the first weights come: this
    is for one row, or very few.
    """

    def __init__(self, kernel: FewRowsKernel) -> None:
        """Emit the statistics."""
        assert kernel.norm is not None
        self.kernel, self.norm = kernel, kernel.norm
        plan, size = kernel.plan, len(self.norm.sums)
        self.threads = plan.num_warps * LANES
        self.pieces = ceil_div(kernel.product.depth, PIECE * self.threads)  # of a thread
        self.sums = scratch("row_sums", size * kernel.tiles_m, "float32", "local")
        self.part = scratch("row_part", 1 + size, "float32", "local")
        self.loaded = scratch("row", self.pieces * PIECE, kernel.product.dtype, "local")
        self.wide = scratch("wide", 2 * (1 + len(self.norm.factors)), "float32", "local")
        self.narrow = scratch("narrow", 2, kernel.product.dtype, "local")
        self.shared = kernel.ring.shared
        # Else a compiler puts all of this in front of the first copies, and memory waits meanwhile
        T.evaluate(tirx.op.tvm_storage_sync("shared"))
        rows = tirx.min(kernel.product.rows - kernel.place.first_row, int64(plan.block_m))
        for index in range(size):
            with T.serial(rows.astype("int32")) as row:
                self._load(row)
                self._add_up(index, row)
            T.evaluate(tirx.op.tvm_storage_sync("shared"))
        for tile in range(kernel.tiles_m):
            for index in range(size):
                row = int32(tile * MMA_ROWS) + kernel.place.quad
                T.buffer_store(self.sums, self._total(index, row), [tile * size + index])

    def _depth(self, piece: int) -> tirx.Expr:
        """Return the first element of a piece of this thread."""
        kernel = self.kernel
        return int64((kernel.place.thread + int32(piece * self.threads)) * int32(PIECE))

    def _inside(self, piece: int) -> tirx.Expr | None:
        """Return whether a row has this piece, None if it does for certain."""
        depth = self.kernel.product.depth
        exact = depth >= (piece + 1) * self.threads * PIECE
        return None if exact else self._depth(piece) < int64(depth)

    def _load(self, row: tirx.Expr) -> None:
        """Load what this thread adds up of a row."""
        for piece in range(self.pieces):
            inside = self._inside(piece)
            with T.vectorized(int64(PIECE)) as e:
                first_row = self.kernel.place.first_row
                x: tirx.Expr = self.norm.x[first_row + int64(row), self._depth(piece) + e]
                if inside is not None:
                    zero = tirx.const(0.0, self.kernel.product.dtype)
                    x = tirx.if_then_else(inside, x, zero)
                T.buffer_store(self.loaded, x, [int64(piece * PIECE) + e])

    def _add_up(self, index: int, row: tirx.Expr) -> None:
        """Add up a statistic of a row in each warp."""
        kernel, part = self.kernel, self.part
        for before in range(index):
            T.buffer_store(part, self._total(before, row), [1 + before])
        T.buffer_store(part, tirx.const(0.0, "float32"), [0])
        known = [part[1 + before] for before in range(index)]
        for piece in range(self.pieces):
            elements = [self.loaded[piece * PIECE + e] for e in range(PIECE)]
            terms = [self.norm.summand(index, tirx.Cast("float32", x), known) for x in elements]
            while len(terms) > 1:  # in pairs, so that few additions wait for one another
                terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
            inside = self._inside(piece)
            if inside is not None:  # beyond the end, zero less the mean is not zero
                terms = [tirx.Select(inside, terms[0], tirx.const(0.0, "float32"))]
            T.buffer_store(part, part[0] + terms[0], [0])
        for distance in (1, 2, 4, 8, 16):
            other = T.tvm_warp_shuffle_xor(0xFFFFFFFF, part[0], distance, LANES, LANES)
            T.buffer_store(part, part[0] + other, [0])
        with T.If(kernel.place.lane == int32(0)), T.Then():
            T.buffer_store(self.shared, part[0], [self._place(index, row, kernel.place.warp)])

    def _place(self, index: int, row: tirx.Expr, warp: tirx.Expr) -> tirx.Expr:
        plan = self.kernel.plan
        place = (int32(index * plan.block_m) + row) * int32(plan.num_warps) + warp
        return int32(self.kernel.ring.statistics) + place

    def _total(self, index: int, row: tirx.Expr) -> tirx.Expr:
        """Return a statistic of a row, from what all warps have."""
        warps = range(self.kernel.plan.num_warps)
        first, *rest = [self.shared[self._place(index, row, int32(w))] for w in warps]
        return sum(rest, first)

    def _of(self, tile: int) -> list[tirx.Expr]:
        """Return the statistics of a row of this thread."""
        size = len(self.norm.sums)
        return [self.sums[tile * size + index] for index in range(size)]

    def normalise(self) -> None:
        """Emit what is done to the registers of x before they are multiplied."""
        kernel = self.kernel
        factors = kernel.weights + kernel.tiles_m * HALVES
        for tile in range(kernel.tiles_m):
            for half in range(HALVES):
                for r in range(REGISTERS):
                    x = (kernel.weights + tile * HALVES + half) * REGISTERS + r
                    self._unpack(0, x)
                    for i in range(len(self.norm.factors)):
                        self._unpack(1 + i, (factors + i * HALVES + half) * REGISTERS + r)
                    for e in range(2):
                        values = [self.wide[2 * i + e] for i in range(1 + len(self.norm.factors))]
                        value = self.norm.normalised(values, self._of(tile))
                        T.buffer_store(self.narrow, value.astype(kernel.product.dtype), [e])
                    pair = self.narrow[tirx.Ramp(int32(0), int32(1), 2)]
                    T.buffer_store(kernel.operands, T.reinterpret("uint32", pair), [x])

    def _unpack(self, position: int, register: int) -> None:
        """Widen both elements of a register."""
        pair = T.reinterpret(f"{self.kernel.product.dtype}x2", self.kernel.operands[register])
        where = tirx.Ramp(int32(2 * position), int32(1), 2)
        T.buffer_store(self.wide, tirx.Cast("float32x2", pair), [where])
