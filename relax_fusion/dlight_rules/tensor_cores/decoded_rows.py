"""The body of a tensor-core kernel for few rows whose weight is computed from few bits.

It is a `FewRowsKernel` whose threads keep to themselves: each copies what its weights are made of,
and its part of the rows, into 16 bytes of shared memory of its own (``cp.async``), several steps
ahead, and computes weights in the registers that it multiplies.  Nothing waits for another.  Four
threads share a column; each has `width` neighbours along k.  As the order in which k passes through
the instructions does not matter, it is that in which the weights come out of their words, and the
elements of x are paired likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared
from tvm.script.ir_builder import tirx as T

from ...estimator.families.few_rows import dequantised
from ...estimator.families.few_rows.tiles import MMA_COLUMNS, MMA_ROWS, SUM_BYTES
from ...estimator.prediction import ceil_div
from ...estimator.tile_plan import TilePlan
from ...hardware.instructions import PIECE_BYTES
from . import dependent
from .decoded import Decoder, joined, unrolled
from .few_rows_kernel import QUADS, FewRowsKernel
from .few_rows_ring import Place
from .few_rows_sums import WarpSums
from .fragments import clear, copy_async, ptx, scratch
from .instructions import INSTRUCTIONS
from .layout import LANES, PIECE
from .tile import Product, int32, int64, is_multiple

COLUMNS = MMA_COLUMNS // QUADS
"""Of a thread, in an instruction."""

HINT = ".L2::256B"
"""Of a copy of words.  That L2 is told of what lies around them saved up to 4 us of 85, and 1 of
27, on an H200."""


class DecodedRowsKernel(FewRowsKernel):
    """Emits one thread block, into the IR builder that is open.

    Parameters
    ----------
    plan : TilePlan
        ``block_k`` elements of k are a step of all warps together; ``num_stages`` steps are loaded
        ahead.
    product : Product
        What is computed.
    place : Place
        What the thread works on.
    early : bool
        Whether it may begin while the kernel in front of it still computes x.
    """

    def __init__(self, plan: TilePlan, product: Product, place: Place, early: bool) -> None:
        """Allocate registers, in the block that is open."""
        self.plan, self.product, self.norm = plan, product, None
        self.place, self.early = place, early
        self.width = dequantised.width(product.depth)
        self.steps = ceil_div(product.depth, plan.block_k)
        self.stages = min(plan.num_stages, self.steps)
        self.tiles_m, self.tiles_n = plan.block_m // MMA_ROWS, plan.block_n // MMA_COLUMNS
        tiles, self.columns = product.parts * self.tiles_n, self.tiles_n * COLUMNS
        self.decoders = [
            Decoder(product.neighbours(part, self.width), self.columns, self.stages)
            for part in range(product.parts)
        ]
        self.x = scratch("x_words", self.tiles_m * self.width // 2, "uint32", "local")
        self.sums = scratch("sums", tiles * self.tiles_m * 4, "float32", "local")
        self._allocate_ring()

    def _allocate_ring(self) -> None:
        """Allocate shared memory: what each thread copies for itself, then the sums of warps."""
        plan = self.plan
        self.x_slots = self.tiles_m * self.width // PIECE
        self.slots = self.x_slots + self.columns * sum(len(d.copied) for d in self.decoders)
        ring = self.stages * plan.num_warps * self.slots * LANES * PIECE_BYTES
        sums = plan.num_warps * self.product.parts * plan.block_m * plan.block_n
        size = max(ring // SUM_BYTES, sums)
        self.shared = scratch("shared", size, "float32", "shared.dyn")
        self.base = scratch("base", 1, "uint32", "local")
        own = self.place.warp * int32(self.slots * LANES) + self.place.lane
        start = cuda_cvta_generic_to_shared(self.shared.access_ptr("rw"))
        T.buffer_store(self.base, start + (own * int32(PIECE_BYTES)).astype("uint32"), [0])

    def accumulate(self) -> None:
        """Emit the whole reduction."""
        clear(self.sums)
        with unrolled(self.stages) as stage:
            self._request_weights(stage, stage)
        if self.early:
            T.evaluate(dependent.wait())
        with unrolled(self.stages) as stage:
            self._request_rows(stage, stage)
            T.evaluate(ptx["cp.async.commit_group"]())
        turns = ceil_div(self.steps, self.stages)
        # What a loop loads for its next turn, no compiler moves to where it is used
        rolled = T.serial(int32(turns), annotations={"disable_unroll": True})
        with rolled as turn, unrolled(self.stages) as stage:
            self._step(turn * int32(self.stages) + stage, stage)

    def finish(self) -> None:
        """Add the sums of the warps, and apply the epilogue."""
        T.evaluate(ptx["cp.async.wait_group"](0))
        WarpSums(self, self.shared).finish()

    def _step(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Multiply a step, and ask for the one that takes its place."""
        T.evaluate(ptx["cp.async.wait_group"](self.stages - 1))
        if self.steps % self.stages:
            with T.If(step < int32(self.steps)), T.Then():
                self._multiply_step(step, stage)
        else:
            self._multiply_step(step, stage)
        later = step + int32(self.stages)
        with T.If(later < int32(self.steps)), T.Then():
            self._request_weights(later, stage)
            self._request_rows(later, stage)
        T.evaluate(ptx["cp.async.commit_group"]())

    # --- loads -------------------------------------------------------------------------------

    def _piece_at(self, step: tirx.Expr) -> tirx.Expr:
        """Return which neighbours of its columns a thread has in a step, of all along k."""
        chunks = step * int32(self.plan.num_warps) + self.place.warp
        return int64(chunks * int32(dequantised.MEMBERS) + self.place.member)

    def _slot(self, stage: tirx.Expr, slot: int) -> tirx.Expr:
        """Return the address of 16 bytes of this thread, which no other reads or writes."""
        before = stage * int32(self.plan.num_warps * self.slots) + int32(slot)
        return self.base[0] + (before * int32(LANES * PIECE_BYTES)).astype("uint32")

    def _copies(self) -> Iterator[tuple[int, Decoder, int, list[int]]]:
        """Yield what is copied of the weights: slot, decoder, column and vector."""
        vectors = ((d, c, v) for d in self.decoders for c in range(self.columns) for v in d.copied)
        for number, (decoder, column, vector) in enumerate(vectors):
            yield self.x_slots + number, decoder, column, vector

    def _request_weights(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Begin to load what the weights of a step are made of."""
        last = self.product.depth // self.width - 1
        piece = tirx.min(self._piece_at(step), int64(last))
        for slot, decoder, column, vector in self._copies():
            source = decoder.source(vector, self._line(column), piece)
            copy_async(self._slot(stage, slot), source, PIECE_BYTES, [], HINT)
        for decoder in self.decoders:
            for column in range(self.columns):
                decoder.load(self._index(stage, column), self._line(column), piece)

    def _request_rows(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Begin to load the rows of a step."""
        piece, last = self._piece_at(step), self.product.depth // self.width - 1
        pieces = range(0, self.width, PIECE)
        for slot, (tile, first) in enumerate(product(range(self.tiles_m), pieces)):
            row = self.place.first_row + int64(int32(tile * MMA_ROWS) + self.place.quad)
            inside = [row < self.product.rows, piece <= int64(last)]
            load = self.product.x_at(row, piece * int64(self.width) + int64(first))
            copy_async(self._slot(stage, slot), load, PIECE_BYTES, inside)

    def _read_slots(self, stage: tirx.Expr) -> None:
        """Load what was copied for a step into registers."""
        for slot in range(self.x_slots):
            words = [self.x[slot * PIECE // 2 + n] for n in range(PIECE // 2)]
            T.evaluate(ptx["ld.shared.v4.b32"](*words, self._slot(stage, slot)))
        for slot, decoder, column, vector in self._copies():
            words = decoder.registers(vector, int32(column))
            T.evaluate(ptx["ld.shared.v4.b32"](*words, self._slot(stage, slot)))

    def _index(self, stage: tirx.Expr, column: int) -> tirx.Expr:
        return stage * int32(self.columns) + int32(column)

    def _line(self, column: int) -> tirx.Expr:
        """Return a column of the weight; beyond the last column, that."""
        line = self.place.first_column + int64(int32(column * QUADS) + self.place.quad)
        if not is_multiple(self.product.columns, self.plan.block_n):
            line = tirx.min(line, int64(self.product.columns - 1))
        return line

    # --- products ----------------------------------------------------------------------------

    def _multiply_step(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Compute the weights of a step, and multiply them."""
        self._read_slots(stage)
        pairs, words = self.decoders[0].neighbours.pairs(), self.width // 2
        x = [
            [joined(*((self.x[tile * words + e // 2], e % 2) for e in pair)) for pair in pairs]
            for tile in range(self.tiles_m)
        ]
        multiply = ptx[INSTRUCTIONS[self.product.dtype].mma]
        piece = self._piece_at(step)
        for part, decoder in enumerate(self.decoders):
            for tile_n in range(self.tiles_n):
                columns = range(tile_n * COLUMNS, (tile_n + 1) * COLUMNS)
                w = [
                    decoder.pairs(self._index(stage, c), self._line(c), piece, int32(c))
                    for c in columns
                ]
                for first in range(0, len(pairs), 2):
                    left = [w[c][first + turn] for turn in range(2) for c in range(COLUMNS)]
                    for m in range(self.tiles_m):
                        tile = (part * self.tiles_n + tile_n) * self.tiles_m + m
                        sums = [self.sums[tile * 4 + e] for e in range(4)]
                        T.evaluate(multiply(*sums, *left, *x[m][first : first + 2], *sums))
