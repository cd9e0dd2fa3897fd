"""The body of a tensor-core kernel for few rows whose weight is computed from few bits.

A thread copies what its weights are made of into 16 bytes of shared memory of its own
(``cp.async``), several steps ahead, and computes weights in the registers that it multiplies.  Four
threads share a column; each has `width` neighbours along k.  As the order in which k passes through
the instructions does not matter, it is that in which the weights come out of their words, and the
elements of x are paired likewise.

A thread block takes one tile of columns after the other, and asks for the words of the next while
it still multiplies those of this one.  Its rows lie in shared memory all the time, normalised and
in pairs (`resident_row`); where there is no room for that, each warp copies with the words what it
multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared, cuda_warp_sync

from ...estimator.families.few_rows import tiles as few_rows
from ...estimator.families.few_rows.packed import PackedPlan
from ...estimator.families.few_rows.tiles import MMA_COLUMNS, MMA_ROWS, SUM_BYTES
from ...estimator.prediction import ceil_div
from ...hardware.instructions import PIECE_BYTES
from ...tvm_ir import IRBuilder, T
from . import dependent
from .dequantised import Dequantiser, joined, unrolled
from .few_rows_ring import Launch, Place
from .few_rows_sums import WarpSums
from .fragments import clear, copy_async, ptx, scratch
from .layout import INSTRUCTIONS, LANES, PIECE
from .resident_row import ResidentRow, swizzled
from .tile import Product, RowNorm, int32, int64, is_multiple

QUADS = LANES // 4
"""Groups of four threads: each has a row of x, and two columns of an instruction."""

COLUMNS = MMA_COLUMNS // QUADS
"""A thread has this many columns of an instruction."""

HINT = ".L2::256B"
"""A copy of words tells L2 of the 256 bytes around them, which saved up to 4 us of 85, and 1 of 27,
on an H200."""


class DequantisedRowsKernel:
    """Emits one thread block, of a row that a norm may change first, into the open IR builder.

    ``block_k`` elements of k are a step of all warps together; ``num_stages`` steps are loaded
    ahead.
    """

    def __init__(
        self, plan: PackedPlan, product: Product, norm: RowNorm | None, place: Place, launch: Launch
    ) -> None:
        """Allocate registers, in the block that is open."""
        self.plan, self.product, self.place, self.launch = plan, product, place, launch
        self.width = few_rows.width(product.depth)
        self.steps = ceil_div(product.depth, plan.block_k)
        self.stages = min(plan.num_stages, self.steps)
        self.tiles_m, self.tiles_n = plan.block_m // MMA_ROWS, plan.block_n // MMA_COLUMNS
        self.columns = self.tiles_n * COLUMNS
        self.neighbours = [product.neighbours(part, self.width) for part in range(product.parts)]
        self.dequantisers = [Dequantiser(n, self.columns, self.stages) for n in self.neighbours]
        self.x = scratch("x_words", self.tiles_m * self.width // 2, "uint32", "local")
        tiles = product.parts * self.tiles_n
        self.sums = scratch("sums", tiles * self.tiles_m * 4, "float32", "local")
        self._allocate_shared(norm)

    def _allocate_shared(self, norm: RowNorm | None) -> None:
        """Allocate shared memory: a kept row, and what is copied ahead; then the sums of warps."""
        plan = self.plan
        self.x_slots = 0 if plan.keeps_row else self.tiles_m * self.width // PIECE
        self.slots = self.x_slots + self.columns * sum(len(d.copied) for d in self.dequantisers)
        ring = self.stages * plan.num_warps * self.slots * LANES * PIECE_BYTES
        kept = self.steps * plan.block_k * 2 if plan.keeps_row else 0
        sums = plan.num_warps * self.product.parts * plan.block_m * plan.block_n
        size = max((kept + ring) // SUM_BYTES, sums, self.launch.shared_bytes // SUM_BYTES)
        self.shared = scratch("shared", size, "float32", "shared.dyn")
        # Of all of it, of what this warp copies, and of what this thread does
        self.base = scratch("base", 3, "uint32", "local")
        start = cuda_cvta_generic_to_shared(self.shared.access_ptr("rw"))
        T.buffer_store(self.base, start, [0])
        own = self.place.warp * int32(self.slots * LANES * PIECE_BYTES) + int32(kept)
        T.buffer_store(self.base, self.base[0] + own.astype("uint32"), [1])
        lane = self.place.lane * int32(PIECE_BYTES)
        T.buffer_store(self.base, self.base[1] + lane.astype("uint32"), [2])
        self.kept = ResidentRow(self, norm) if plan.keeps_row else None

    def accumulate(self) -> None:
        """Emit the whole reduction."""
        clear(self.sums)
        if self.kept and not self.launch.early:
            self.kept.load()
        with unrolled(self.stages) as stage:
            self._request_weights(stage, stage)
            if self.kept:
                T.evaluate(ptx["cp.async.commit_group"]())
        if self.launch.early:
            dependent.hand_over()
        if self.kept:
            if self.launch.early:
                self.kept.load()
            self.kept.store()
        else:
            with unrolled(self.stages) as stage:
                self._request_rows(stage, stage)
                T.evaluate(ptx["cp.async.commit_group"]())
        turns = ceil_div(self.steps, self.stages)
        # What a loop loads for its next turn, no compiler moves to where it is used
        rolled = T.serial(int32(turns), annotations={"disable_unroll": True})
        with rolled as turn, unrolled(self.stages) as stage:
            IRBuilder.name_many(["turn", "stage"], [turn, stage])
            self._step(turn * int32(self.stages) + stage, stage)

    def finish(self) -> None:
        """Add the sums of the warps, and apply the epilogue."""
        T.evaluate(ptx["cp.async.wait_group"](0))
        WarpSums(self, self.shared, self.base[0]).finish()

    def _step(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Multiply a step, and ask for the one that takes its place."""
        T.evaluate(ptx["cp.async.wait_group"](self.stages - 1))
        if not self.kept:
            T.evaluate(cuda_warp_sync())
        if self.steps % self.stages:
            with T.If(step < int32(self.steps)), T.Then():
                self._multiply(step, stage)
        else:
            self._multiply(step, stage)
        if not self.kept:  # others may still read what is overwritten
            T.evaluate(cuda_warp_sync())
        later = step + int32(self.stages)
        with T.If(later < int32(self.steps)), T.Then():
            self._request_weights(later, stage)
            if not self.kept:
                self._request_rows(later, stage)
        T.evaluate(ptx["cp.async.commit_group"]())

    # --- places ------------------------------------------------------------------------------

    def column(self, tile: int, half: int) -> tirx.Expr:
        """Return which column of the tile one of both columns of a quad is."""
        return int32(tile * MMA_COLUMNS + half * QUADS) + self.place.quad

    def _line(self, column: int) -> tirx.Expr:
        """Return a column of the weight; beyond the last column, that."""
        line = self.place.first_column + int64(int32(column * QUADS) + self.place.quad)
        if not is_multiple(self.product.columns, self.plan.block_n):
            line = tirx.min(line, int64(self.product.columns - 1))
        return line

    def _unit(self, step: tirx.Expr, member: tirx.Expr) -> tirx.Expr:
        """Return which neighbours of its columns a thread has in a step, of all along k."""
        chunks = step * int32(self.plan.num_warps) + self.place.warp
        return chunks * int32(few_rows.MEMBERS) + member

    def _piece_at(self, step: tirx.Expr) -> tirx.Expr:
        last = self.product.depth // self.width - 1
        return tirx.min(int64(self._unit(step, self.place.member)), int64(last))

    def _slot(self, start: tirx.Expr, stage: tirx.Expr, slot: int) -> tirx.Expr:
        """Return the address of a slot of 16 bytes a lane, of a warp or of a thread."""
        before = stage * int32(self.plan.num_warps * self.slots) + int32(slot)
        return start + (before * int32(LANES * PIECE_BYTES)).astype("uint32")

    def _index(self, stage: tirx.Expr, column: int) -> tirx.Expr:
        return stage * int32(self.columns) + int32(column)

    # --- loads -------------------------------------------------------------------------------

    def _copies(self) -> Iterator[tuple[int, Dequantiser, int, list[int]]]:
        """Yield what is copied of the weights: slot, dequantiser, column and vector."""
        vectors = (
            (d, c, v) for d in self.dequantisers for c in range(self.columns) for v in d.copied
        )
        for number, (dequantiser, column, vector) in enumerate(vectors):
            yield self.x_slots + number, dequantiser, column, vector

    def _request_weights(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Begin to load what the weights of a step are made of."""
        piece = self._piece_at(step)
        for slot, dequantiser, column, vector in self._copies():
            source = dequantiser.source(vector, self._line(column), piece)
            copy_async(self._slot(self.base[2], stage, slot), source, PIECE_BYTES, [], HINT)
        for dequantiser in self.dequantisers:
            for column in range(self.columns):
                dequantiser.load(self._index(stage, column), self._line(column), piece)

    def _request_rows(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Begin to load the rows of a step: neighbouring lanes copy neighbouring pieces."""
        pieces = few_rows.MEMBERS * self.width // PIECE  # of a row, for a warp
        for slot in range(self.x_slots):
            index = self.place.lane + int32(slot * LANES)
            line, piece = index // int32(pieces), index % int32(pieces)
            row = self.place.first_row + int64(line)
            k = self._unit(step, int32(0)) * int32(self.width) + piece * int32(PIECE)
            inside = [row < self.product.rows, k < int32(self.product.depth)]
            at = self._copied_piece(stage, line, piece)
            copy_async(at, self.product.x_at(row, int64(k)), PIECE_BYTES, inside)

    def _copied_piece(self, stage: tirx.Expr, row: tirx.Expr, piece: tirx.Expr) -> tirx.Expr:
        """Return the address of a piece of what this warp has copied of a row."""
        pieces = few_rows.MEMBERS * self.width // PIECE
        if pieces > few_rows.MEMBERS:  # else two rows are side by side
            piece = swizzled(row, piece, self.width)
        to = (row * int32(pieces) + piece) * int32(PIECE_BYTES)
        return self._slot(self.base[1], stage, 0) + to.astype("uint32")

    def _read(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Load the operands of a step into registers."""
        width, pieces = self.width, self.width // PIECE
        for tile, first in product(range(self.tiles_m), range(pieces)):
            row, piece = self.place.quad + int32(tile * MMA_ROWS), int32(first)
            piece = self.place.member * int32(pieces) + piece
            if self.kept:
                at = self.kept.address(self._unit(step, int32(0)) * int32(pieces) + piece)
            else:
                at = self._copied_piece(stage, row, piece)
            start = (tile * width + first * PIECE) // 2
            words = [self.x[start + n] for n in range(PIECE // 2)]
            T.evaluate(ptx["ld.shared.v4.b32"](*words, at))
        for slot, dequantiser, column, vector in self._copies():
            words = dequantiser.registers(vector, int32(column))
            T.evaluate(ptx["ld.shared.v4.b32"](*words, self._slot(self.base[2], stage, slot)))

    # --- products ----------------------------------------------------------------------------

    def _multiply(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Compute the weights of a step, and multiply them."""
        self._read(step, stage)
        pairs = self.neighbours[0].pairs()
        x = [self._paired(m * self.width // 2, pairs) for m in range(self.tiles_m)]
        multiply = ptx[INSTRUCTIONS[self.product.dtype].mma]
        piece = self._piece_at(step)
        for part, dequantiser in enumerate(self.dequantisers):
            for n in range(self.tiles_n):
                columns = range(n * COLUMNS, (n + 1) * COLUMNS)
                w = [
                    dequantiser.pairs(self._index(stage, c), self._line(c), piece, int32(c))
                    for c in columns
                ]
                for first in range(0, len(pairs), 2):
                    left = [w[c][first + turn] for turn in range(2) for c in range(COLUMNS)]
                    for m in range(self.tiles_m):
                        place = ((part * self.tiles_n + n) * self.tiles_m + m) * 4
                        sums = [self.sums[place + e] for e in range(4)]
                        T.evaluate(multiply(*sums, *left, *x[m][first : first + 2], *sums))

    def _paired(self, start: int, pairs: list[tuple[int, int]]) -> list[tirx.Expr]:
        """Return the registers of x that are multiplied, of those from `start` on."""
        if self.kept:
            return [self.x[start + n] for n in range(len(pairs))]
        return [joined(*((self.x[start + e // 2], e % 2) for e in pair)) for pair in pairs]
