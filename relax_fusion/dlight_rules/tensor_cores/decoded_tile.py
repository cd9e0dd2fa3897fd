"""Tiles of an operand that is computed on its way to shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from ...hardware.instructions import PIECE_BYTES
from ...tvm_ir import T
from .decoded import Decoder, register, unrolled
from .fragments import ptx
from .layout import PIECE, column_of, swizzled
from .tile import int32, int64, is_multiple

if TYPE_CHECKING:
    from .mma_kernel import MmaKernel


class DecodedTile:
    """One part of the weight, of a kernel whose stages have its columns as lines.

    What a step reads is loaded into registers a step before it is computed and put into a stage:
    `put` does that for one step, and loads for the next one.
    """

    def __init__(self, kernel: MmaKernel, part: int) -> None:
        """Allocate registers, in the block that is open."""
        tile, product = kernel.tile, kernel.product
        self.kernel, self.offset = kernel, kernel.part_offset(part)
        self.lines, self.pieces = tile.plan.block_n, tile.plan.block_k // PIECE
        self.turns = self.lines * self.pieces // tile.threads
        neighbours = product.neighbours(part, PIECE)
        self.by_lines = neighbours.lie_by_lines
        self.decoder = Decoder(neighbours, self.turns)

    def load(self, step: tirx.Expr) -> None:
        """Begin to load what a step needs; beyond the last column, that of the last one."""
        with unrolled(self.turns) as turn:
            line, piece = self._at(step, turn)
            last = int64(self.kernel.product.depth // PIECE - 1)
            inside = tirx.min(piece, last) if self._may_be_outside() else piece
            self.decoder.load(turn, line, inside)

    def put(self, step: tirx.Expr) -> None:
        """Compute a step, of which everything was loaded, into the stage that is written next."""
        base = self.kernel.written
        with unrolled(self.turns) as turn:
            line, piece = self._at(step, turn)
            words = self.decoder.in_order(turn, line, piece)
            if self._may_be_outside():
                inside = piece < int64(self.kernel.product.depth // PIECE)
                words = [tirx.Select(inside, word, register(0)) for word in words]
            own, place = self._place(turn)
            at = own * int32(self.pieces) + swizzled(own, place, self.pieces)
            address = base + (int32(self.offset) + at * int32(PIECE_BYTES)).astype("uint32")
            T.evaluate(ptx["st.shared.v4.b32"](address, *words))

    def _may_be_outside(self) -> bool:
        return not self.kernel.is_exact

    def _place(self, turn: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the line and the piece of the tile that a thread has in one of its turns.

        Neighbouring threads have what are neighbours in memory.
        """
        place = self.kernel.thread + turn * int32(self.kernel.tile.threads)
        if self.by_lines:
            return place % int32(self.lines), place // int32(self.lines)
        return place // int32(self.pieces), place % int32(self.pieces)

    def _at(self, step: tirx.Expr, turn: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the column of the weight, and the number of the piece in it."""
        kernel = self.kernel
        line, piece = self._place(turn)
        column = kernel.first_column + int64(column_of(line, kernel.tile.run))
        if not is_multiple(kernel.product.columns, kernel.tile.plan.block_n):
            column = tirx.min(column, int64(kernel.product.columns - 1))
        return column, kernel.first_k // int64(PIECE) + int64(step * int32(self.pieces) + piece)
