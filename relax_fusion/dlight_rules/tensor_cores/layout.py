"""The instructions that multiply matrices, as data, and where their operands lie.

In bytes they are all alike: ``mma.sync.m16n8`` takes `SLICE_BYTES` of each line along k, which are
two pieces of 16 bytes, and lane i holds the four bytes at ``4 * (i % 4)`` of a piece (PTX ISA,
sections "Matrix Fragments for mma.m16n8k16 with floating point type", "... for mma.m16n8k32" and
"... for mma.m16n8k8").  ``ldmatrix`` deals out just these, whatever they stand for.

Operands lie in shared memory in *pieces* of 16 bytes, which one lane of ``ldmatrix`` names.  The
functions below are index maths, for integers and for TIR expressions alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from ...hardware.instructions import MMA, PIECE_BYTES, WARP_GROUP_MMA
from ...workload import DTYPE_BYTES


@dataclass(frozen=True)
class Instructions:
    """What tensor cores make of operands of one element type."""

    dtype: str
    """Of an operand in memory."""
    name: str
    """How the instructions call it."""
    total: str = "float32"
    """The dtype of sums."""
    flags: tuple[int, ...] = ()
    """What ``wgmma`` is told beside: signs of the operands, and that neither is transposed."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def piece(self) -> int:
        """Elements of a piece."""
        return PIECE_BYTES // self.element_bytes

    @property
    def k(self) -> int:
        """Elements of k of one instruction."""
        return MMA[self.dtype].k

    @property
    def mma(self) -> str:
        """The instruction of a warp."""
        types = f"{self._short_total}.{self.name}.{self.name}.{self._short_total}"
        return f"mma.sync.aligned.{MMA[self.dtype].shape}.row.col.{types}"

    def wgmma(self, columns: int) -> str:
        """Return the instruction of a warp group for so many columns."""
        types = f"{self._short_total}.{self.name}.{self.name}"
        shape = replace(WARP_GROUP_MMA[self.dtype], n=columns).shape
        return f"wgmma.mma_async.sync.aligned.{shape}.{types}"

    def columns(self, tile: int) -> int:
        """Return the columns of each ``wgmma`` of a tile of so many, a multiple of 16."""
        most = WARP_GROUP_MMA[self.dtype].n
        if self.total == "int32":
            most = min(most, 224)  # TVM 0.27 knows no wider ones of integers
        counts = range(1, tile // 16 + 1)
        return next(tile // n for n in counts if tile % (16 * n) == 0 and tile // n <= most)

    @property
    def registers(self) -> str:
        """The dtype that TVM gives registers of sums: 32 bits, and it knows no signed ones."""
        return "uint32" if self.total == "int32" else self.total

    @property
    def rounds(self) -> bool:
        """Whether operands are rounded in registers, where they are wider than what is read."""
        return self.name == "tf32"

    @property
    def _short_total(self) -> str:
        return {"float32": "f32", "int32": "s32"}[self.total]


INSTRUCTIONS = {
    each.dtype: each
    for each in (
        Instructions("float16", "f16", flags=(1, 1, 0, 0)),
        Instructions("bfloat16", "bf16", flags=(1, 1, 0, 0)),
        Instructions("int8", "s8", "int32"),
        Instructions("uint8", "u8", "int32"),
        Instructions("float32", "tf32", flags=(1, 1)),
    )
}
"""The instructions, by the dtype of the operands."""


PIECE = 8
"""Elements of a piece of a two-byte type: the row of an 8 x 8 matrix."""

MMA_M, MMA_N = MMA["float16"].m, MMA["float16"].n
"""Rows and columns of one instruction."""

BANK_PIECES = 8
"""Pieces in one pass over the 32 banks of shared memory: 128 bytes."""

LANES = 32
"""Threads of a warp, which execute an instruction together."""

GROUP_ROWS = 8
"""Row tiles that are taken together for each column tile: 8 x 16 tiles, a wave of a large device,
read no more lines of tiles than 11 x 12 of them would, to a tenth."""

Index = Any
"""An int or an integer TIR expression."""

Minimum = Callable[[Index, Index], Index]


def swizzled(row: Index, piece: Index, pieces: int) -> Index:
    """Return where a row of `pieces` pieces keeps one of them.

    The eight rows of an 8 x 8 matrix then lie in different banks, for any even `pieces`.
    """
    period = gcd(pieces, BANK_PIECES)
    return piece ^ (row // (BANK_PIECES // period) % period)


def spread(line: Index, piece: Index, pieces: int, distance: int) -> Index:
    """Return where a tile keeps a piece of one of its lines of `pieces` pieces, an even number.

    Two neighbouring pieces of four lines, `distance` apart, then lie in different banks.
    """
    return (line * pieces + piece) ^ (line // distance % 4 * 2)


def run_length(warp_n: int, layout: str, element_bytes: int = 2) -> int:
    """Return how many neighbouring columns a lane holds, of the `warp_n` that its warp computes.

    An instruction leaves two in each lane.  The columns of a weight ``[n, k]`` are dealt to the
    instructions so that those of up to four make a run, and results leave in wide stores.  So are
    those of a weight ``[k, n]`` of bytes: a lane has four neighbours in a word.
    """
    if layout == "kn" and element_bytes != 1:
        return 2
    return 2 * gcd(warp_n, 4 * MMA_N) // MMA_N


def column_of(line: Index, run: int) -> Index:
    """Return the column whose weights are line `line` of a tile, where lanes hold runs of `run`.

    Lanes with the same ``lane % 4`` hold a run: elements ``2 * q, 2 * q + 1`` of the results of
    ``run / 2`` instructions, one after the other.
    """
    instructions = run // 2
    group = instructions * MMA_N
    place, inside = line // group * group, line % group
    instruction, column = inside // MMA_N, inside % MMA_N
    return place + column // 2 * run + instruction * 2 + column % 2


def a_lane(lane: Index) -> tuple[Index, Index]:
    """Return the row and the piece of 16 rows of x that a lane names for ``ldmatrix.x4``."""
    return lane % 16, lane // 16


def b_lane(lane: Index, layout: str) -> tuple[Index, Index]:
    """Return the line and the piece of 16 columns of the weight that a lane names.

    Lines are columns in ``nk``, and k in ``kn``, where ``ldmatrix`` transposes.
    """
    if layout == "nk":
        return lane // 16 * 8 + lane % 8, lane // 8 % 2
    return lane % 16, lane // 16


def grouped(index: Index, tiles: tuple[Index, int], least: Minimum) -> tuple[Index, Index]:
    """Return the row and the column of tile number `index`, of so many rows and columns of tiles.

    Blocks that run together cover `GROUP_ROWS` tiles of some columns, not whole lines of tiles, so
    that what they share stays in L2.
    """
    rows, columns = tiles
    group = index // (columns * GROUP_ROWS)
    height = least(rows - group * GROUP_ROWS, GROUP_ROWS)
    inside = index % (columns * GROUP_ROWS)
    return group * GROUP_ROWS + inside % height, inside // height
