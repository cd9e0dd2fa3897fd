"""Where a tensor-core kernel keeps what: index maths for integers and for TIR expressions alike.

A warp multiplies by ``mma.m16n8``: 16 rows by 8 columns by 32 bytes of k.  Operands lie in shared
memory in *pieces* of 16 bytes, which one lane of ``ldmatrix`` names.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

from ...hardware.instructions import MMA

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
