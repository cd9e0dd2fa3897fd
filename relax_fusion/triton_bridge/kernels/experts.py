"""What the kernels of matmuls by experts share: their operands, and the gate behind a product.

A pair is a token and one of its experts, ``pair = token * chosen + place``.  The weights of all
experts lie in one tensor, ``[experts, columns, k]`` (layout ``"nk"``) or ``[experts, k, columns]``
(``"kn"``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..math import activate


class ExpertTensors(NamedTuple):
    """The tensors of a matmul by experts: pointers, None for what it does not have."""

    x: Any
    """``[tokens, k]``, or ``[tokens, chosen, k]`` (``F.each``)."""
    ids: Any
    """``[tokens, chosen]``, of any integers; what is no expert counts as the nearest one."""
    w: Any
    bias: Any
    """``[experts, columns]``"""
    share: Any
    """``[tokens, chosen]``: by what the result of a pair is multiplied."""
    residual: Any
    """``[tokens, n]``"""
    out: Any
    """``[tokens, chosen, n]``, or ``[tokens, n]`` where the pairs of a token are added."""
    scale: Any = None
    """Of weights in words, ``[experts, columns, groups]``."""


class ExpertForm(NamedTuple):
    """What is known of a matmul by experts when its kernel is compiled, each field a constexpr."""

    experts: int
    chosen: int
    n: int
    """Columns of the result; a weight has twice as many where there is a gate."""
    k: int
    layout: str
    each: bool = False
    """Whether the pairs of a token have rows of their own."""
    gate: str = "none"
    """``"halves"``: gate and up are halves of the columns; ``"pairs"``: even and odd ones."""
    gate_first: bool = True
    activation: str = "none"
    """Of the gate, or of the product where there is none."""
    sharpness: float | None = None
    """``x * sigmoid(sharpness * x)`` is the activation where there is one."""
    gate_bounds: tuple[float, float] | None = None
    up_bounds: tuple[float, float] | None = None
    offset: float = 0.0
    """What is added to the up projection."""
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


class ExpertTile(NamedTuple):
    """What else is known, each field a constexpr."""

    block_n: int
    """Columns of a program: of the weight where gate and up are pairs of them, else of the
    result."""
    block_k: int
    stages: int
    """How many blocks of k are under way, as asynchronous copies."""
    pdl: bool
    """Programmatic dependent launch: launched while a predecessor may still run."""
    early: bool = False
    """Whether numbers of experts and weights may be read before it has ended."""
    unroll: int = 1
    """How many blocks of k a turn of the loop has."""
    block_m: int = 1
    """Pairs of a program."""
    swap: bool = False
    """Whether the weight is the left operand of the tensor cores."""
    group_m: int = 8
    """So many tiles of pairs are walked together, for each tile of columns."""


@triton.constexpr_function
def width_of(F, whole):
    """Return the columns of an expert's weight, or those of one half of it."""
    return 2 * F.n if whole and F.gate != "none" else F.n


@triton.constexpr_function
def together(columns, block):
    """Return how many columns of a tile lie side by side at least, where they wrap at the end."""
    return min(columns & -columns, block)


@triton.jit
def read_columns(tile_n, F: tl.constexpr, C: tl.constexpr):
    """Return the columns ``[n]`` of a tile, any for those beyond the end, in runs as they lie."""
    WIDTH: tl.constexpr = width_of(F, F.gate == "pairs")
    RUN: tl.constexpr = together(WIDTH, C.block_n)
    columns = tile_n * C.block_n + tl.arange(0, C.block_n)
    return tl.max_contiguous(tl.multiple_of(columns % WIDTH, RUN), RUN)


@triton.jit
def expert_at(ids_ptr, index, mask, EXPERTS: tl.constexpr):
    """Return the int32 expert at those places of ``ids``: the nearest one there is."""
    number = tl.load(ids_ptr + index, mask=mask, other=0)
    return tl.minimum(tl.maximum(number, 0), EXPERTS - 1).to(tl.int32)


@triton.jit
def within(x, BOUNDS: tl.constexpr):
    """Return float32 numbers within the bounds, if there are some; NaN stays NaN."""
    if BOUNDS is None:
        return x
    else:
        x = tl.where(x > BOUNDS[1], BOUNDS[1], x)
        return tl.where(x < BOUNDS[0], BOUNDS[0], x)


@triton.jit
def activated(x, F: tl.constexpr):
    """Return the activation of float32 numbers."""
    if F.sharpness is None:
        return activate(x, F.activation)
    else:
        return x * tl.sigmoid(F.sharpness * x)


@triton.jit
def behind_product(first, second, F: tl.constexpr):
    """Return the float32 results of the two products of a gate, biases added; or of the first."""
    if F.gate == "none":
        return activated(first, F)
    gate, up = first, second
    if not F.gate_first:
        gate, up = second, first
    return activated(within(gate, F.gate_bounds), F) * (within(up, F.up_bounds) + F.offset)


@triton.jit
def apart(x):
    """Return the even and the odd columns of a float32 tensor ``[m, 2 n]``."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
