"""Packed weights as the operand in registers: what their plans ask for, and how fast they come."""

from __future__ import annotations

from collections.abc import Iterator

from ....workload import Packed
from ...prediction import ceil_div
from .tiles import PART, CudaPlan, accumulators, line_bytes

BITS = (4, 8)
PIECE = 32
"""Elements of k that are unpacked at once, which share a scale."""

FEW_ROWS = 16
"""Rows up to which other families were measured, and are near what memory gives."""

LEAST_COPIED = 96
"""Rows of a tile from which on weights may be worth a copy, that many tiles read."""

SWIZZLES = (32, 64, 128)
"""Bytes of a line that a swizzle of shared memory is made for."""

STEPS = (64, 128, 256)
"""Elements of k that a stage may hold."""

OTHERS = {1: 60, 2: 32, 3: 30}
"""Registers of a thread beside sums and packed weights, by warp groups that multiply: with what
`registers` counts too much, since not all lives at once.  By what ptxas 13.0 spills."""

REGISTERS = {1: 255, 2: 232, 3: 160}

PRODUCTS_PER_CLOCK = 2048
"""Of float16, of one multiprocessor's tensor cores.  By the hardware, not fitted."""

UNPACK_CLOCKS = 131
"""Clocks in which a multiprocessor unpacks 32 elements of k of 64 lines.  This and the next three
were fitted to 1,913 timings of q4f16_1 (`2026-11-26-cuda_matmul-packed_interleaved.log`): from 24
rows on, the plans that they choose are 1.7 % slower than the fastest in the mean, 18 % at most."""

PIECE_CLOCKS, TALL_CLOCKS = 103, 65
"""The same for one warp group, whose pieces of 32 elements follow each other: once, and for each of
its 64 lines."""

WAITED_PART = 0.34
"""Part of the products' time in which nothing is unpacked."""


def packed_violations(plan: CudaPlan, weights: int, form: Packed, k: int) -> Iterator[str]:
    """Yield what the copies, the scales and the registers of packed weights do not allow."""
    if plan.block_k not in STEPS or line_bytes(plan, form) not in SWIZZLES:
        yield f"block_k is {plan.block_k}, must be one of {STEPS}, and at most 128 bytes"
        return
    if plan.swapped:
        yield "packed weights are the tall operand, not rows"
    if form.group > 0 and plan.block_k % form.group and form.group % plan.block_k:
        yield f"block_k is {plan.block_k}, groups of {form.group} do not divide it, nor it them"
    elif form.group > 0 and ceil_div(k, form.group) % scales(plan, form):
        yield f"k is {k}, a step reads {scales(plan, form)} scales of a line at once"
    needed, most = registers(plan, weights, form), REGISTERS[min(plan.multiplying, 3)]
    if needed > most:
        yield f"a thread needs {needed} registers, at most {most} there are"


def unpack_clocks(plan: CudaPlan, weights: int) -> float:
    """Return the clocks in which a stage is unpacked, and products waited for."""
    own = weights * plan.tall // (PART * plan.groups_tall)
    chain = (PIECE_CLOCKS + own * TALL_CLOCKS) / (plan.turns * plan.groups_k)
    products = weights * plan.tall * plan.wide * PIECE / PRODUCTS_PER_CLOCK
    piece = max(own * plan.groups * UNPACK_CLOCKS, chain) + WAITED_PART * products
    return plan.block_k / PIECE * piece


def scales(plan: CudaPlan, form: Packed) -> int:
    """Return how many scales of a line a stage has."""
    return max(1, plan.block_k // form.group) if form.group > 0 else 1


def registers(plan: CudaPlan, weights: int, form: Packed) -> int:
    """Return the registers of a thread: sums, two sets of numbers, words, and scales twice."""
    tall = weights * plan.tall // (PART * plan.groups_tall)
    each = 2 * PIECE // 4 + PIECE * form.bits // 16 + 4 * ceil_div(scales(plan, form), 2)
    return accumulators(plan, weights) + tall * each + OTHERS[min(plan.multiplying, 3)]
