"""The weights of a tensor-core kernel, from a stage in shared memory to the registers of a lane.

An instruction wants four bytes of neighbours along k in each register.  In weights ``[n, k]`` they
are neighbours, and ``ldmatrix`` deals them out; in weights ``[k, n]`` of two-byte elements it
transposes them.  Elements of one or four bytes it cannot transpose: lanes load words themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from ...hardware.instructions import PIECE_BYTES
from ...tvm_ir import T
from .fragments import load_matrices, ptx, scratch
from .layout import MMA_N, b_lane, spread, swizzled
from .tile import int32

if TYPE_CHECKING:
    from .mma_kernel import MmaKernel

WORD_BYTES = 4

TRANSPOSITIONS = ((0x5140, 0x7362), (0x5410, 0x7632))
"""``prmt`` picks these bytes of two words: first their bytes in pairs, then the pairs of two such
words, so that byte i of four words becomes word i (PTX ISA, section "prmt")."""


class Weights:
    """Loads weights by ``ldmatrix``."""

    def __init__(self, kernel: MmaKernel) -> None:
        self.kernel, self.types = kernel, kernel.types
        plan = kernel.tile.plan
        width = plan.block_k if kernel.tile.layout == "nk" else plan.block_n
        self.pieces = width // self.types.piece  # of a line

    def place(self, line: tirx.Expr, piece: tirx.Expr) -> tirx.Expr:
        """Return which piece of the tile keeps a piece of a line."""
        return line * int32(self.pieces) + swizzled(line, piece, self.pieces)

    def load(self, buffer: int, part: int, base: tirx.Expr, index: int) -> None:
        """Load slice `index` of a part, which begins at `base`, into one of two sets."""
        kernel, layout = self.kernel, self.kernel.tile.layout
        line, piece = b_lane(kernel.lane, layout)
        for pair in range(kernel.tiles_n // 2):
            if layout == "nk":
                skip = pair * 2 * MMA_N * self.pieces
                row, at = kernel.warp_column + line, piece + int32(index * 2)
            else:
                skip = index * self.types.k * self.pieces
                column = kernel.warp_column // int32(self.types.piece)
                row, at = line, column + int32(pair * 2) + piece
            address = base + _bytes(self.place(row, at))
            source = ptx.addr(address, skip * PIECE_BYTES)
            first = self._first(buffer, part, pair * 2)
            load_matrices(kernel.b, first, source, layout == "kn")

    def sum_of(self, position: int) -> tuple[int, int]:
        """Return which instruction has a column of a lane, and which of both in a row it is."""
        return position // 2, position % 2

    def _first(self, buffer: int, part: int, instruction: int) -> int:
        """Return the first of both registers of an instruction."""
        kernel = self.kernel
        return ((buffer * kernel.tile.parts + part) * kernel.tiles_n + instruction) * 2


class WordWeights(Weights):
    """Loads weights ``[k, n]`` with elements of four bytes: one of them in a word."""

    distance = 1
    """The lines that the lanes of a warp read at once are this far apart."""

    def place(self, line: tirx.Expr, piece: tirx.Expr) -> tirx.Expr:
        """Return which piece of the tile keeps a piece of a line."""
        return spread(line, piece, self.pieces, self.distance)

    def load(self, buffer: int, part: int, base: tirx.Expr, index: int) -> None:
        """Load slice `index` of a part, which begins at `base`, into one of two sets."""
        for instruction in range(self.kernel.tiles_n):
            source = self._word(base, instruction)
            for half in range(2):
                target = self.kernel.b[self._first(buffer, part, instruction) + half]
                self._load_word(target, source, 2 * index + half)

    def _word(self, base: tirx.Expr, group: int, line: int = 0) -> tirx.Expr:
        """Return where a lane finds its word of a group of columns, from line `line` on."""
        kernel, word = self.kernel, self.kernel.lane // int32(4)
        at_line = kernel.lane % int32(4) * int32(self.distance) + int32(line)
        words = PIECE_BYTES // WORD_BYTES
        first = kernel.warp_column // int32(self.types.piece) + int32(2 * group)
        at = _bytes(self.place(at_line, first + word // int32(words)))
        return base + at + (word % int32(words) * int32(WORD_BYTES)).astype("uint32")

    def _load_word(self, target: tirx.Expr, source: tirx.Expr, turn: int) -> None:
        """Load the word that lies `turn` times so many lines further on as lanes read at once."""
        skip = 4 * turn * self.distance * self.pieces * PIECE_BYTES
        T.evaluate(ptx["ld.shared.b32"](target, ptx.addr(source, skip)))


class ByteWeights(WordWeights):
    """Loads weights ``[k, n]`` with elements of one byte: four columns at once, and transposes.

    A lane has four columns of one instruction each, so that the columns of a warp's lines are dealt
    to four instructions by turns.
    """

    distance = 4

    def __init__(self, kernel: MmaKernel) -> None:
        super().__init__(kernel)
        self.words = scratch("words", 8, "uint32", "local")

    def load(self, buffer: int, part: int, base: tirx.Expr, index: int) -> None:
        """Load slice `index` of a part, which begins at `base`, into one of two sets."""
        for group in range(self.kernel.tiles_n // 4):
            sources = [self._word(base, group, line) for line in range(4)]
            for half in range(2):
                for line, source in enumerate(sources):
                    self._load_word(self.words[line], source, 2 * index + half)
                firsts = (self._first(buffer, part, 4 * group + e) for e in range(4))
                self._transpose([self.kernel.b[first + half] for first in firsts])

    def sum_of(self, position: int) -> tuple[int, int]:
        """Return which instruction has a column of a lane, and which of both in a row it is."""
        group, inside = divmod(position, 8)
        return 4 * group + inside % 4, inside // 4

    def _transpose(self, targets: list[tirx.Expr]) -> None:
        """Put byte i of each of the four words into target i."""
        pairs, whole = TRANSPOSITIONS
        for first in (0, 2):
            for e, picked in enumerate(pairs):
                self._permute(self.words[4 + first + e], self.words[first], picked, 1)
        for e, target in enumerate(targets):
            self._permute(target, self.words[4 + e // 2], whole[e % 2], 2)

    def _permute(self, target: tirx.Expr, first: tirx.Expr, picked: int, distance: int) -> None:
        """Pick bytes of a word and of one behind it."""
        second = self.words[int(first.indices[0]) + distance]
        T.evaluate(ptx["prmt.b32"](target, first, second, tirx.const(picked, "uint32")))


def weights_of(kernel: MmaKernel) -> Weights:
    """Return what loads the weights of a kernel."""
    if kernel.tile.layout == "nk" or kernel.types.element_bytes == 2:
        return Weights(kernel)
    return ByteWeights(kernel) if kernel.types.element_bytes == 1 else WordWeights(kernel)


def _bytes(pieces: tirx.Expr) -> tirx.Expr:
    return (pieces * int32(PIECE_BYTES)).astype("uint32")
