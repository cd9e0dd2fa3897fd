"""The body of a tensor-core kernel for few rows: weights stream through shared memory.

Weights are what costs, and each is used once.  So every warp copies just what it will multiply
itself, into a ring that is its own (`few_rows_ring`), and as much is in flight as the ring holds.

An instruction takes 16 columns of the weight as the rows of its left operand, and 8 rows of x as
the columns of its right one.  In which order k passes through it does not matter to a sum, if both
operands have the same; so of 32 neighbours along k, a thread multiplies eight, which it loads from
shared memory at once: four in each of two instructions.  Of a weight ``[k, n]`` it loads eight
columns of one k at once, and pairs those of two.

All warps of a block have the same columns and take turns along k; at the end they add their sums
(`few_rows_sums`), and those of the other blocks of a cluster, if k is split.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.backend.cuda.op import cuda_warp_sync

from ...estimator.families.few_rows.tiles import CHUNK, GROUP, MMA_COLUMNS, MMA_ROWS, rows_at_once
from ...estimator.prediction import ceil_div
from ...estimator.tile_plan import TilePlan
from ...tvm_ir import T
from . import dependent
from .few_rows_ring import Launch, Place, Ring
from .few_rows_sums import WarpSums
from .fragments import add_over_warp, add_up, clear, ptx, scratch
from .layout import INSTRUCTIONS, LANES, PIECE
from .tile import Product, RowNorm, int32, int64, uint32

HALVES = CHUNK // 32
"""A thread loads this often of a line of x, or of a column."""

REGISTERS = 4
"""A piece takes this many registers of 32 bits."""


class NormedRows:
    """The rows of a block, normalised between shared memory and the instructions.

    All threads add up the statistics of some rows at once, while the first weights come.
    """

    def __init__(self, kernel: FewRowsKernel) -> None:
        """Emit the statistics."""
        assert kernel.norm is not None
        self.kernel, self.norm = kernel, kernel.norm
        plan, size = kernel.plan, len(self.norm.sums)
        self.threads = plan.num_warps * LANES
        self.pieces = ceil_div(kernel.product.depth, PIECE * self.threads)  # of a thread
        rows = kernel.product.rows
        known = int(rows) if isinstance(rows, tirx.IntImm) else None
        self.together = rows_at_once(plan, kernel.product.depth, known)
        self.sums = scratch("row_sums", size * kernel.tiles_m, "float32", "local")
        self.part = scratch("row_part", size * self.together, "float32", "local")
        self.loaded = scratch(
            "row", self.together * self.pieces * PIECE, kernel.product.dtype, "local"
        )
        self.wide = scratch("wide", 2 * (1 + len(self.norm.factors)), "float32", "local")
        self.narrow = scratch("narrow", 2, kernel.product.dtype, "local")
        self.shared = kernel.ring.shared
        # Else a compiler puts all of this in front of the first copies, and memory waits meanwhile
        T.evaluate(tirx.op.tvm_storage_sync("shared"))
        left = tirx.min(rows - kernel.place.first_row, int64(plan.block_m)).astype("int32")
        for index in range(size):
            with T.serial((left + (self.together - 1)) // self.together) as turn:
                first = turn * int32(self.together)
                # The last once more, where there are fewer
                each = [tirx.min(first + int32(i), left - 1) for i in range(self.together)]
                for i, row in enumerate(each):
                    self._load(i, row)
                self._add_up(index, each)
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

    def _load(self, i: int, row: tirx.Expr) -> None:
        """Load what this thread adds up of a row."""
        for piece in range(self.pieces):
            inside = self._inside(piece)
            with T.vectorized(int64(PIECE)) as e:
                first_row = self.kernel.place.first_row
                x: tirx.Expr = self.norm.x[first_row + int64(row), self._depth(piece) + e]
                if inside is not None:
                    zero = tirx.const(0.0, self.kernel.product.dtype)
                    x = tirx.if_then_else(inside, x, zero)
                T.buffer_store(self.loaded, x, [int64((i * self.pieces + piece) * PIECE) + e])

    def _add_up(self, index: int, rows: Sequence[tirx.Expr]) -> None:
        """Add up a statistic of rows in each warp."""
        kernel, size = self.kernel, len(self.norm.sums)
        places = [i * size + index for i in range(len(rows))]
        for i, (row, place) in enumerate(zip(rows, places, strict=True)):
            for before in range(index):
                T.buffer_store(self.part, self._total(before, row), [i * size + before])
            T.buffer_store(self.part, tirx.const(0.0, "float32"), [place])
            known = [self.part[i * size + before] for before in range(index)]
            for piece in range(self.pieces):
                first = (i * self.pieces + piece) * PIECE
                elements = [self.loaded[first + e] for e in range(PIECE)]
                terms = [self.norm.summand(index, tirx.Cast("float32", x), known) for x in elements]
                total, inside = add_up(terms), self._inside(piece)
                if inside is not None:  # beyond the end, zero less the mean is not zero
                    total = tirx.Select(inside, total, tirx.const(0.0, "float32"))
                T.buffer_store(self.part, self.part[place] + total, [place])
        add_over_warp(self.part, *places)
        with T.If(kernel.place.lane == int32(0)), T.Then():
            for row, place in zip(rows, places, strict=True):
                at = self._place(index, row, kernel.place.warp)
                T.buffer_store(self.shared, self.part[place], [at])

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


QUADS = LANES // 4
"""Groups of four threads: each has a row of x, and two columns of an instruction."""


class FewRowsKernel:
    """Emits one thread block, of rows that a norm may change first, into the open IR builder."""

    def __init__(
        self, plan: TilePlan, product: Product, norm: RowNorm | None, place: Place, launch: Launch
    ) -> None:
        """Allocate shared memory and registers, in the block that is open."""
        self.plan, self.product, self.norm = plan, product, norm
        self.place, self.launch = place, launch
        self.ring = Ring(plan, product, norm, place, launch.shared_bytes)
        self.tiles_m, self.tiles_n = plan.block_m // MMA_ROWS, plan.block_n // MMA_COLUMNS
        # Of a chunk: weights, then x, then the factors of its norm
        self.weights = 2 * HALVES * product.parts * self.tiles_n
        loads = self.weights + HALVES * (self.tiles_m + (len(norm.factors) if norm else 0))
        self.operands = scratch("operands", loads * REGISTERS, "uint32", "local")
        sums = product.parts * self.tiles_n * self.tiles_m * 4
        self.sums = scratch("sums", sums, "float32", "local")

    def accumulate(self) -> None:
        """Emit the whole reduction."""
        clear(self.sums)
        ahead = self.plan.num_stages - 1
        self._request_first(ahead)
        rows = NormedRows(self) if self.norm else None
        steps = int32(self.ring.steps)
        with T.serial(steps) as step:
            T.evaluate(ptx["cp.async.wait_group"](ahead - 1))
            T.evaluate(cuda_warp_sync())
            # Into the place of the step before this one, which has been multiplied
            with T.If(step + int32(ahead) < steps), T.Then():
                self.ring.request_weights(step + int32(ahead))
                self.ring.request_rows(step + int32(ahead))
            T.evaluate(ptx["cp.async.commit_group"]())
            for chunk in range(self.ring.chunks):
                self._receive(step, chunk)
                if rows:
                    rows.normalise()
                self._multiply()

    def finish(self) -> None:
        """Add the sums of the warps, and apply the epilogue."""
        WarpSums(self, self.ring.shared, self.ring.base[0]).finish()

    def _request_first(self, ahead: int) -> None:
        """Begin the first copies: weights are there before the rows may be."""
        first = range(min(ahead, self.ring.steps))
        if self.launch.early:
            for step in first:
                self.ring.request_weights(int32(step))
            dependent.hand_over()
        for step in range(ahead):
            if step in first:
                if not self.launch.early:
                    self.ring.request_weights(int32(step))
                self.ring.request_rows(int32(step))
            T.evaluate(ptx["cp.async.commit_group"]())

    def _receive(self, step: tirx.Expr, chunk: int) -> None:
        """Load the operands of a chunk into registers."""
        quad, member = self.place.quad, self.place.member
        for tile in range(self.weights // (2 * HALVES)):
            for half in range(2 * HALVES):
                self._load(2 * HALVES * tile + half, self._weight_piece(step, chunk, tile, half))
        place, first = self.weights, self.ring.weight_lines
        lines = [(first + tile * MMA_ROWS, quad) for tile in range(self.tiles_m)]
        if self.norm:
            first += self.plan.block_m
            lines += [(first, int32(index)) for index in range(len(self.norm.factors))]
        for index, (first_line, line) in enumerate(lines):
            for half in range(HALVES):
                address = self.ring.piece(step, chunk, first_line, line, member + int32(4 * half))
                self._load(place + index * HALVES + half, address)

    def _weight_piece(self, step: tirx.Expr, chunk: int, tile: int, index: int) -> tirx.Expr:
        """Return the address of one of the pieces of a tile of weights that this thread loads."""
        quad, member = self.place.quad, self.place.member
        if self.product.layout == "nk":
            column, half = divmod(index, HALVES)
            first = tile * MMA_COLUMNS + column * QUADS
            return self.ring.piece(step, chunk, first, quad, member + int32(4 * half))
        # Four tiles are a group: sixteen pieces of 64 columns, of each eight along k
        group, load = divmod(tile * 2 * HALVES + index, PIECE * HALVES)
        half, k = divmod(load, PIECE)
        line = int32(half * 32 + k) + member * int32(PIECE)
        return self.ring.piece(step, chunk, group * CHUNK, line, quad)

    def _load(self, load: int, address: tirx.Expr) -> None:
        targets = [self.operands[load * REGISTERS + i] for i in range(REGISTERS)]
        T.evaluate(ptx["ld.shared.v4.b32"](*targets, address))

    def _multiply(self) -> None:
        """Multiply what is in the registers: four instructions for each tile."""
        multiply = ptx[INSTRUCTIONS[self.product.dtype].mma]
        for half in range(HALVES):
            for turn in range(2):
                for tile in range(self.weights // (2 * HALVES)):
                    left = [
                        self._pair(tile, half, 2 * turn + r // 2, r % 2) for r in range(REGISTERS)
                    ]
                    for m in range(self.tiles_m):
                        first = (self.weights + m * HALVES + half) * REGISTERS + 2 * turn
                        right = [self.operands[first + r] for r in range(2)]
                        sums = [self.sums[(tile * self.tiles_m + m) * 4 + e] for e in range(4)]
                        T.evaluate(multiply(*sums, *left, *right, *sums))

    def _pair(self, tile: int, half: int, pair: int, second: int) -> tirx.Expr:
        """Return two neighbours along k of one of both columns of a quad, as one register."""
        if self.product.layout == "nk":
            return self.operands[((2 * tile + second) * HALVES + half) * REGISTERS + pair]
        group, inside = divmod(tile, PIECE // 2)
        first = (group * HALVES + half) * PIECE + 2 * pair
        low, high = (self.operands[(first + e) * REGISTERS + inside] for e in range(2))
        if second:
            return (low >> uint32(16)) | (high & uint32(0xFFFF0000))
        return (low & uint32(0xFFFF)) | (high << uint32(16))

    def column(self, tile: int, half: int) -> tirx.Expr:
        """Return which column of the block one of both columns of a quad is."""
        quad = self.place.quad
        if self.product.layout == "nk":
            return int32(tile * MMA_COLUMNS + half * QUADS) + quad
        group, inside = divmod(tile, PIECE // 2)
        return int32(group * GROUP + 2 * inside + half) + quad * int32(PIECE)
