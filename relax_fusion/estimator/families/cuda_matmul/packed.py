"""Packed weights as the operand in registers: which, and in which plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ....workload import GatedFFN, NormMatmul, Packed
from ...limits import SYSTEM_SMEM_BYTES
from ...prediction import ceil_div
from .tiles import (
    FAMILY,
    MOST_STAGES,
    PART,
    CudaPlan,
    accumulators,
    line_bytes,
    other_bytes,
    stage_bytes,
)

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


def packed_of(work: NormMatmul | GatedFFN) -> tuple[Packed | None, ...]:
    """Return how each weight is stored."""
    if isinstance(work, GatedFFN):
        return (work.packed,)
    return tuple(p.packed for p in work.outputs)


def unpacked_by(plan: CudaPlan, work: NormMatmul | GatedFFN) -> Packed | None:
    """Return how the weights are stored that the matmul itself unpacks; None if it has none."""
    return None if plan.copied else packed_of(work)[0]


def refuses_packed(work: NormMatmul | GatedFFN, layouts: frozenset[str]) -> str | None:
    """Return why packed weights are none that the kernel unpacks."""
    forms = packed_of(work)
    form = forms[0]
    if form is None or len({*forms}) > 1:
        return f"weights are stored in {len({*forms})} ways, family {FAMILY!r} takes one"
    if "kn" in layouts or form.axis != -1 or not form.is_in_order:
        return f"family {FAMILY!r} unpacks words of neighbours along k, with one zero"
    known = form.bits in BITS and form.number in ("", "int8") and form.lines == 1
    if not known or form.limit is not None or form.scale_dtype != work.dtype:
        what = f"{form.bits} bits, {form.number or 'unsigned'}, scales {form.scale_dtype or 'none'}"
        return f"weights are of {what}; family {FAMILY!r} unpacks integers of 4 and 8 bits"
    if form.group > 0 and form.group % PIECE:
        return f"{form.group} elements share a scale, family {FAMILY!r} takes multiples of {PIECE}"
    if form.zero is None or not 0 <= form.zero < 1 << form.bits:
        return f"the zero is {form.zero}, must be a field of {form.bits} bits"
    if form.words(work.k) * form.fields * form.bits % 128:
        return f"k is {work.k}, lines of packed weights must be multiples of 16 bytes"
    return None


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


class _Kind(NamedTuple):
    """Tiles that differ in their rows alone, and in how k is split."""

    tall: int  # lines of all weights
    groups: int  # warp groups, side by side along the features
    steps: tuple[int, ...]  # elements of k of a stage
    rows: Iterable[int]
    splits: tuple[int, ...] = (1,)
    turns: int = 1
    cluster_m: int = 1
    sets: tuple[int, ...] = (1,)  # of warp groups, each with a part of k


FEW, MANY = (*range(8, 65, 8),), (*range(80, 257, 16),)
KINDS = (
    _Kind(64, 1, (128, 256), FEW, (1, 2), sets=(1, 2, 3)),
    _Kind(64, 1, (128, 256), FEW, (4, 8)),
    _Kind(128, 2, (128, 256), FEW, (1, 2, 4, 8)),
    _Kind(192, 3, (128,), FEW, (1, 2, 4)),
    _Kind(128, 2, (64,), MANY, (1, 2)),
    _Kind(128, 2, (64,), (96, 112, 128), cluster_m=2),
    _Kind(192, 3, (64,), (*range(80, 177, 16),)),
    _Kind(256, 2, (64,), (80, 96, 112, 128)),
    _Kind(64, 1, (64,), MANY),
    _Kind(64, 1, (64,), (*range(128, 257, 16),), turns=2),
    _Kind(128, 1, (64,), (96, 112, 128), turns=2),
)
"""Which plans are offered.  Timed for q4f16_1 alone (`2026-11-24-cuda_matmul-packed.log`,
`-packed_sets.log`)."""


@lru_cache(maxsize=16)
def packed_plans(weights: int, form: Packed, sm_smem: int, block_smem: int) -> tuple[CudaPlan, ...]:
    """Return the plans for packed weights, with as many stages as fit."""
    found = []
    for kind in KINDS:
        steps = {min(step, 128 * 8 // form.bits) for step in kind.steps}
        for step, rows, sets in product(sorted(steps), kind.rows, kind.sets):
            plan = CudaPlan(
                *(rows, kind.tall // weights, step),
                num_stages=1,
                num_warps=4 * (kind.groups * kind.turns * sets + 1),
                family=FAMILY,
                groups_n=kind.groups,
                groups_k=sets,
                cluster_m=kind.cluster_m,
                turns=kind.turns,
            )
            smem = min(sm_smem - SYSTEM_SMEM_BYTES, block_smem)
            room = smem - other_bytes(plan) - 2 * 8 * MOST_STAGES
            stages = min(MOST_STAGES, room // stage_bytes(plan, weights, form)) // sets * sets
            plan = replace(plan, num_stages=max(sets, stages))
            found += [replace(plan, split_k=split) for split in kind.splits]
    return tuple(dict.fromkeys(found))
