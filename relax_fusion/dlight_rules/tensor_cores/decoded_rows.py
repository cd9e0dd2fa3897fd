"""The body of a tensor-core kernel for few rows whose weight is computed from few bits.

It is a `FewRowsKernel` without the ring in shared memory: a thread loads all that its weights are
made of by itself, several steps ahead, and computes them in the registers that it multiplies.  Four
threads share a column; each has `width` neighbours along k.  As the order in which k passes through
the instructions does not matter, it is that in which the weights come out of their words, and the
elements of x are paired likewise.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...estimator.families.few_rows import dequantised
from ...estimator.families.few_rows.tiles import MMA_COLUMNS, MMA_ROWS
from ...estimator.prediction import ceil_div
from ...estimator.tile_plan import TilePlan
from .decoded import Decoder, joined, register, unrolled
from .few_rows_kernel import QUADS, FewRowsKernel
from .few_rows_ring import Place
from .few_rows_sums import WarpSums
from .fragments import clear, ptx, scratch
from .instructions import INSTRUCTIONS
from .layout import PIECE
from .tile import Product, int32, int64, is_multiple

COLUMNS = MMA_COLUMNS // QUADS
"""Of a thread, in an instruction."""


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
    """

    def __init__(self, plan: TilePlan, product: Product, place: Place) -> None:
        """Allocate registers, in the block that is open."""
        self.plan, self.product, self.norm, self.place = plan, product, None, place
        self.width = dequantised.width(product.depth)
        self.steps = ceil_div(product.depth, plan.block_k)
        self.stages = min(plan.num_stages, self.steps)
        self.tiles_m, self.tiles_n = plan.block_m // MMA_ROWS, plan.block_n // MMA_COLUMNS
        tiles = product.parts * self.tiles_n
        self.decoders = [
            Decoder(product.neighbours(part, self.width), self.stages * self.tiles_n * COLUMNS)
            for part in range(product.parts)
        ]
        words = self.width // 2
        self.x = scratch("x_words", self.stages * self.tiles_m * words, "uint32", "local")
        self.sums = scratch("sums", tiles * self.tiles_m * 4, "float32", "local")

    def accumulate(self) -> None:
        """Emit the whole reduction."""
        clear(self.sums)
        with unrolled(self.stages) as stage:
            self._load_step(stage, stage)
        turns = ceil_div(self.steps, self.stages)
        # What a loop loads for its next turn, no compiler moves to where it is used
        rolled = T.serial(int32(turns), annotations={"disable_unroll": True})
        with rolled as turn, unrolled(self.stages) as stage:
            self._step(turn * int32(self.stages) + stage, stage)

    def finish(self) -> None:
        """Add the sums of the warps, and apply the epilogue."""
        plan = self.plan
        size = plan.num_warps * self.product.parts * plan.block_m * plan.block_n
        WarpSums(self, scratch("shared", size, "float32", "shared.dyn")).finish()

    def _step(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Multiply a step, and load the one that takes its place."""
        if self.steps % self.stages:
            with T.If(step < int32(self.steps)), T.Then():
                self._multiply_step(step, stage)
        else:
            self._multiply_step(step, stage)
        later = step + int32(self.stages)
        with T.If(later < int32(self.steps)), T.Then():
            self._load_step(later, stage)

    # --- loads -------------------------------------------------------------------------------

    def _piece_at(self, step: tirx.Expr) -> tirx.Expr:
        """Return which neighbours of its columns a thread has in a step, of all along k."""
        chunks = step * int32(self.plan.num_warps) + self.place.warp
        return int64(chunks * int32(dequantised.MEMBERS) + self.place.member)

    def _load_step(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Begin to load what a step needs."""
        piece, last = self._piece_at(step), self.product.depth // self.width - 1
        for decoder in self.decoders:
            for column in range(self.tiles_n * COLUMNS):
                line = self._line(column)
                decoder.load(self._index(stage, column), line, tirx.min(piece, int64(last)))
        for tile in range(self.tiles_m):
            row = self.place.first_row + int64(int32(tile * MMA_ROWS) + self.place.quad)
            inside = tirx.all(row < self.product.rows, piece <= int64(last))
            for first in range(0, self.width, PIECE):
                words = [self._x_word(stage, tile, first // 2 + i) for i in range(4)]
                for word in words:
                    T.buffer_store(self.x, register(0), word.indices)
                with T.If(inside), T.Then():
                    load = self.product.x_at(row, piece * int64(self.width) + int64(first))
                    T.evaluate(ptx["ld.global.nc.v4.b32"](*words, tirx.address_of(load)))

    def _index(self, stage: tirx.Expr, column: int) -> tirx.Expr:
        return stage * int32(self.tiles_n * COLUMNS) + int32(column)

    def _line(self, column: int) -> tirx.Expr:
        """Return a column of the weight; beyond the last column, that."""
        line = self.place.first_column + int64(int32(column * QUADS) + self.place.quad)
        if not is_multiple(self.product.columns, self.plan.block_n):
            line = tirx.min(line, int64(self.product.columns - 1))
        return line

    def _x_word(self, stage: tirx.Expr, tile: int, word: int) -> tirx.Expr:
        words = self.width // 2
        return self.x[stage * int32(self.tiles_m * words) + int32(tile * words + word)]

    # --- products ----------------------------------------------------------------------------

    def _multiply_step(self, step: tirx.Expr, stage: tirx.Expr) -> None:
        """Compute the weights of a step, and multiply them."""
        pairs = self.decoders[0].neighbours.pairs()
        x = [
            [joined(*((self._x_word(stage, tile, e // 2), e % 2) for e in pair)) for pair in pairs]
            for tile in range(self.tiles_m)
        ]
        multiply = ptx[INSTRUCTIONS[self.product.dtype].mma]
        piece = self._piece_at(step)
        for part, decoder in enumerate(self.decoders):
            for tile_n in range(self.tiles_n):
                columns = range(tile_n * COLUMNS, (tile_n + 1) * COLUMNS)
                w = [decoder.pairs(self._index(stage, c), self._line(c), piece) for c in columns]
                for first in range(0, len(pairs), 2):
                    left = [w[c][first + turn] for turn in range(2) for c in range(COLUMNS)]
                    for m in range(self.tiles_m):
                        tile = (part * self.tiles_n + tile_n) * self.tiles_m + m
                        sums = [self.sums[tile * 4 + e] for e in range(4)]
                        T.evaluate(multiply(*sums, *left, *x[m][first : first + 2], *sums))
