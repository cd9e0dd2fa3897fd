"""Dot products of a few rows and weights of few bits, in Triton: the family "packed_gemv"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ....workload import FLOAT_BYTES, GatedFFN, Packed
from ....workload.formats import ALL, E2M1, EXPONENT
from ...family import Breaks, Offer
from ...limits import GRID_YZ, grid_limits
from ...prediction import ceil_div
from ...shape import Problem
from ...tile_plan import TilePlan
from ..matmuls import GpuMatmul, MatmulProblem, packed_form
from . import tiles
from .family import TritonMatmul

MOST_ROWS = 2
"""With more rows, tensor cores multiply what is unpacked: at four, 11 us instead of 22 for queries,
keys and values of LLaMA-3.1-8B (`2026-11-30-packed_gemv.log`)."""

DEPTHS = {1: ((1024, 1), (2048, 2), (4096, 4), (8192, 8)), 2: ((1024, 2), (2048, 4), (4096, 8))}
"""By the rows of a tile, elements of k and warps: a lane has 32 elements of a column at once, and
16 where registers have those of two rows."""

LANE = 8
"""Elements of x that a lane loads at a time."""

COLUMNS = (2, 4, 8, 16)
"""Columns of a tile, those of both products counted."""

MOST_NUMBERS = 512
"""Numbers that a thread unpacks, which are as many pieces of code: with more, it does not fit the
caches of instructions, and took up to 6 times as long."""

MOST_HELD = (232, 128, 96)
"""Registers of a thread for words, scales, sums and rows, where k is one block, two, or more: with
more, they spill, as the compiler asks early for the words of further blocks."""


class PackedGemv(TritonMatmul):
    """Norm, matmul or gated projections of up to two rows, by words along k."""

    names = (tiles.PACKED,)
    most_rows = MOST_ROWS
    breaks = Breaks((1, MOST_ROWS, 16))

    def takes(self, problem: Problem[Any]) -> bool:
        """Take weights of few bits."""
        return GpuMatmul.takes(self, problem) and packed_form(problem.work) is not None

    def refuses(self, problem: MatmulProblem) -> str | None:
        """Refuse formats that the kernel does not unpack, and what no kernel of Triton takes."""
        work = problem.work
        parts = (work,) if isinstance(work, GatedFFN) else work.outputs
        if not all(p.packed and _is_read(p.packed, work.k) and p.layout == "nk" for p in parts):
            what = "bytes, or words of 2, 4 or 8 fields, all weights along k"
            return f"family {tiles.PACKED!r} takes {what}"
        return super().refuses(problem)

    def plans(self, problem: MatmulProblem) -> Iterator[Offer]:
        """Yield tiles of one and two rows, whose blocks are not half empty."""
        parts, k, rows = problem.columns.parts, problem.work.k, problem.work.rows
        most = min(rows, MOST_ROWS) if isinstance(rows, int) else MOST_ROWS
        offers = ((m, *depth) for m, depths in DEPTHS.items() if m <= most for depth in depths)
        for (block_m, block_k, warps), columns in product(offers, COLUMNS):
            numbers = ceil_div(k, block_k) * block_k // (32 * warps) * columns
            if block_k < 2 * k and numbers <= MOST_NUMBERS and columns % parts == 0:
                block = block_m, columns // parts, block_k
                plan = tiles.triton_plan(tiles.PACKED, block, warps, 1)
                yield Offer(plan, first=block_m, last=MOST_ROWS, most=GRID_YZ)

    def violations(self, plan: TilePlan, problem: MatmulProblem) -> Iterator[str]:
        """Yield what a lane does not have, and what all of Triton's tiles must meet."""
        yield from super().violations(plan, problem)
        yield from grid_limits({"the rows": problem.most or 0})
        if plan.split_k != 1:
            yield f"split_k is {plan.split_k}, family {tiles.PACKED!r} reduces in 1 part"
        if plan.block_k < LANE:
            yield f"block_k is {plan.block_k}, a lane has {LANE} at a time"
        blocks = ceil_div(problem.work.k, plan.block_k)
        held, most = tiles.dots_held(plan, problem.columns), MOST_HELD[min(blocks, 3) - 1]
        if held > most:
            yield f"a thread holds {held} registers of words and rows, at most {most} fit"


def _is_read(form: Packed, k: int) -> bool:
    """Tell whether the kernel unpacks weights of a format: bytes are read four at a time."""
    of_bytes = form.bits == 8 and form.fields == 1 and form.number in ("", "int8")
    group = k if form.group == ALL else form.group
    if not of_bytes or group % 8 or k % group:
        return is_unpacked(form)
    return is_unpacked(replace(form, group=8, word="uint32", number=""))


def is_unpacked(form: Packed) -> bool:
    """Tell whether kernels of Triton unpack weights of a format."""
    whole = form.group > 0 and form.lines == 1 and form.axis == -1 and not form.across
    whole = whole and form.fields in (2, 4, 8) and form.group % form.fields == 0
    plain = form.number == "" and form.zero is not None and form.scale_dtype in FLOAT_BYTES
    mx = form.number == E2M1 and form.scale_dtype == EXPONENT
    return whole and (plain or mx) and form.turns == 1 and form.limit is None
