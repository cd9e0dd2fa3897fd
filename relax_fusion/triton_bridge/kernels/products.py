"""The products of a contraction's kernel: what each reads and writes, and which one a tile is of.

Several products of the same rows (queries, keys and values of separate weights) share a launch.
Their column tiles are counted one product after the other, as if their weights were one, so the
programs of all fill the device together and read the rows from the same caches.  A product is
found by comparing the column tile with constants; what follows is compiled once for each, so no
address is less aligned, and no mask more needed, than in a kernel of its own.

A loop that copies ahead is not a part of what is compiled several times: the compiler merges the
equal ends of such branches, and the tiles of both then take room in shared memory at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tensors(NamedTuple):
    """The tensors of one matmul, or of a gated pair: pointers.

    It is a parameter of a kernel.  What a product does not have is None.
    """

    w: Any
    """``[n, k]`` or ``[k, n]``; of a gated pair, the gate's."""
    up: Any
    """The up projection's weight; where it lies in `w`, that."""
    bias: Any
    """``[n]``, as `up_bias`."""
    up_bias: Any
    out: Any
    """``[rows, n]``"""
    parts: Any
    """float32, where k is split: ``[split_k, 1 + gated, rows, n]`` partial sums, then of a norm
    inside ``[split_k, rows]`` partial sums of squares."""
    cos: Any
    """``[positions, columns]``, of any float dtype, as `sin`: of the angles of rotated features."""
    sin: Any
    positions: Any
    """int32: row i takes row ``i % positions`` of the angles; None for row i."""
    operands: Any
    """A tuple, in order: of the steps of the epilogue, ``[n]`` or ``[rows, n]``."""
    scale: Any = None
    """Of weights in words, ``[n, groups]``, as `up_scale`; of both where they lie in `w`."""
    up_scale: Any = None


class Form(NamedTuple):
    """What is known of a product when its kernel is compiled, each field a constexpr."""

    tiles: int
    """Its tiles along the columns."""
    n: int
    layout: str
    """``"nk"`` or ``"kn"``."""
    gated: bool = False
    """``activation(gate) * up``."""
    merged: str = "no"
    """``"gate_first"`` or ``"up_first"`` where both weights (and biases) lie in one tensor."""
    has_bias: bool = False
    activation: str = "none"
    """Of a gate."""
    steps: str = ""
    """What follows the bias, or the product of a gated pair, as ``"times:0.5 add:0:whole gelu"``: a
    product with a number; a sum or product with an operand, which is a ``"row"`` for all rows or a
    ``"whole"`` tensor; an activation."""
    half: int = 0
    """Distance between the features of a pair; 0 where none are paired."""
    rotated: tuple[int, ...] | None = None
    """Which pairs are turned by angles of their rows: see `tiles.turned_pairs`."""
    bits: int = 0
    """Of a number of a weight in words; 0 where weights are of the dtype of x."""
    fields: int = 1
    """Numbers of a word."""
    group: int = 1
    """Numbers along k that share a scale; -1 for all."""
    zero: int = 0
    number: str = ""
    """``"e2m1"``, or whole numbers less `zero`: ``"int8"``, to which 128 was added, or empty."""
    exponents: bool = False
    """Whether scales are powers of 2, stored as exponents plus 127."""


class Constants(NamedTuple):
    """What is known of all products: the parameter `C` of every kernel, each field a constexpr.

    What those mean that have a default is in the docstrings of the kernels that read them.
    """

    k: int
    block_m: int
    block_n: int
    block_k: int
    pdl: bool
    """Programmatic dependent launch: launched while a predecessor may still run."""
    early: bool = False
    """Whether weights may be read before it has ended."""
    norm: str = "none"
    has_beta: bool = False
    unit_offset: bool = False
    """Whether the norm multiplies by ``1 + gamma``."""
    split_k: int = 1
    group_m: int = 8
    swap: bool = False
    stages: int = 1


@triton.constexpr_function
def count_of(steps):
    """Return how many steps an epilogue has."""
    return len(steps.split())


@triton.constexpr_function
def kind_of(steps, index):
    """Return what a step is called."""
    return steps.split()[index].split(":")[0]


@triton.constexpr_function
def number_of(steps, index):
    """Return the number that a step multiplies by; else 0."""
    kind, *rest = steps.split()[index].split(":")
    return float(rest[0]) if kind == "times" else 0.0


@triton.constexpr_function
def operand_of(steps, index):
    """Return which operand a step has, 0 where it has none."""
    kind, *rest = steps.split()[index].split(":")
    return int(rest[0]) if kind in ("add", "multiply") else 0


@triton.constexpr_function
def along_of(steps, index):
    """Return whether a step's operand is a ``"row"`` or a ``"whole"`` tensor; "" without one.

    ``"each"``: it has a row for every `rows_of` rows.  ``"period"``: it has so many, which repeat.
    """
    rest = steps.split()[index].split(":")
    return rest[2] if len(rest) > 2 else ""


@triton.constexpr_function
def rows_of(steps, index):
    """Return how many rows share a row of a step's operand, or repeat; 1 where none do."""
    rest = steps.split()[index].split(":")
    return int(rest[3]) if len(rest) > 3 else 1


@triton.constexpr_function
def column_tiles(F0, F1, F2):
    """Return the column tiles of up to three products together."""
    return sum(F.tiles for F in (F0, F1, F2) if F is not None)


@triton.constexpr_function
def common_divisor(F0, F1, F2):
    """Return the largest power of 2 that divides the features of each of two or three products."""
    together = F0.n | F1.n if F2 is None else F0.n | F1.n | F2.n
    return together & -together


@triton.jit
def weight_of(tile_n, products, F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr):
    """Return the weight, the features and the column tile of the product of a tile, of several."""
    DIVISOR: tl.constexpr = common_divisor(F0, F1, F2)
    p0, p1, p2 = products
    first = tile_n < F0.tiles
    w = tl.where(first, p0.w, p1.w)
    n = tl.where(first, F0.n, F1.n)
    tile = tl.where(first, tile_n, tile_n - F0.tiles)
    if F2 is not None:
        before: tl.constexpr = F0.tiles + F1.tiles
        w = tl.where(tile_n < before, w, p2.w)
        n = tl.where(tile_n < before, n, F2.n)
        tile = tl.where(tile_n < before, tile, tile_n - before)
    return w, tl.multiple_of(n, DIVISOR), tile


@triton.jit
def of_product(
    FUNCTION: tl.constexpr, tile_n, args, products, F0: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Call ``FUNCTION(args, product, its column tile, its Form, C)`` for the product of a tile.

    `products` are three, the last of which may be None.
    """
    p0, p1, p2 = products
    if F1 is None:
        FUNCTION(args, p0, tile_n, F0, C)
    elif tile_n < F0.tiles:
        FUNCTION(args, p0, tile_n, F0, C)
    elif F2 is None:
        FUNCTION(args, p1, tile_n - F0.tiles, F1, C)
    elif tile_n < F0.tiles + F1.tiles:
        FUNCTION(args, p1, tile_n - F0.tiles, F1, C)
    else:
        FUNCTION(args, p2, tile_n - F0.tiles - F1.tiles, F2, C)
