"""Packed weights as the operand in registers: which, and in which plans."""

from __future__ import annotations

from collections.abc import Iterator

from ....workload import GatedFFN, NormMatmul, Packed
from ...prediction import ceil_div
from .tiles import FAMILY, PART, CudaPlan, accumulators, line_bytes

BITS = (4, 8)
PIECE = 32
"""Elements of k that are unpacked at once, which share a scale."""

SWIZZLES = (32, 64, 128)
"""Bytes of a line that a swizzle of shared memory is made for."""

STEPS = (64, 128, 256)
"""Elements of k that a stage may hold."""

OTHERS = {1: 60, 2: 32, 3: 30}
"""Registers of a thread beside sums and packed weights, by warp groups that multiply: with what
`registers` counts too much, since not all lives at once.  By what ptxas 13.0 spills."""

REGISTERS = {1: 255, 2: 232, 3: 160}


def packed_of(work: NormMatmul | GatedFFN) -> tuple[Packed | None, ...]:
    """Return how each weight is stored."""
    if isinstance(work, GatedFFN):
        return (work.packed,)
    return tuple(p.packed for p in work.outputs)


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
        return f"weights are of {what}; family {FAMILY!r} unpacks integers of 4 and 8 bits with a scale"
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


def scales(plan: CudaPlan, form: Packed) -> int:
    """Return how many scales of a line a stage has."""
    return max(1, plan.block_k // form.group) if form.group > 0 else 1


def registers(plan: CudaPlan, weights: int, form: Packed) -> int:
    """Return the registers of a thread: sums, two sets of numbers, words, and scales twice."""
    tall = weights * plan.tall // (PART * plan.groups_tall)
    each = 2 * PIECE // 4 + PIECE * form.bits // 16 + 4 * ceil_div(scales(plan, form), 2)
    return accumulators(plan, weights) + tall * each + OTHERS[min(plan.multiplying, 3)]
