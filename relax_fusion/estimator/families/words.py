"""CPU kernels of few rows that unpack vectors of words: the family "words".

The weights are packed along k and lie along k.  A lane has a word, and unpacks one field of it
after the other, so that a vector of words is read once; sums over its fields are scaled, not its
elements.  A task has ``block_n`` columns of all rows, in register tiles of ``reg_m x reg_n``
results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ...workload import GatedFFN, Packed
from ...workload.dtypes import STORED_BYTES
from .. import cpu_cost
from ..family import Breaks, Offer
from ..limits import core_limits, one_stage
from ..prediction import Footprint, Formula, Prediction, ceil_div, power_dividing
from ..shape import MatmulShape, Size, rows_at
from ..tile_plan import TilePlan
from .cpu_tiles import column_blocks
from .matmuls import CpuMatmul, MatmulProblem, MatmulWork, refuses_integers

FAMILY = "words"

MANTISSA_BITS = 23
"""Of a float32: a field is unpacked as a part of one."""

REG_M, REG_N = (1, 2, 4), (1, 2, 4)
"""Rows and columns of a register tile.  Eight columns were no faster than four in a cache, and took
1.3 times as long from memory: 32000 x 2048 on Golden Cove, by the time of the thread."""

PAGE_BYTES = 4096

COLUMNS, COLUMNS_OF_PAGE = 4, 2
"""How many columns a core reads at full speed at once, and of them in one page.  Measured on Golden
Cove: four in a page take 1.1 times as long as two, and eight 1.2 times as long as four."""

SCALE_CYCLES = 3
"""Instructions for the scales of a vector of words: load, convert, repeat.  Counted."""

SPILL_CYCLES = 1
"""For a sum over chunks that no register is left for.  Counted: a load and a store."""

SUM_CYCLES_PER_LANE = 0.75
"""For the sum over the lanes of a result at the end.  Fitted on Golden Cove: k of 512 to 16384."""

ORDER_CYCLES_PER_ELEMENT = 1.5
"""For an element of x that is put in the order of fields.  Counted: a load and a store, scalar."""


@dataclass(frozen=True)
class WordVectors:
    """Vectors of `lanes` words that hold k elements, packed in `form` along k."""

    form: Packed
    lanes: int
    k: int

    @property
    def words(self) -> int:
        """Words along k."""
        return self.form.words(self.k)

    @property
    def groups(self) -> int:
        """Scales along k."""
        return ceil_div(self.k, self.form.group)

    @property
    def chunks(self) -> int:
        """Vectors of words along k."""
        return self.words // self.lanes

    @property
    def words_of_group(self) -> int:
        """Words that share a scale."""
        return self.form.group // self.form.fields

    @property
    def repeats(self) -> int:
        """Neighbouring lanes that share a scale."""
        return min(self.lanes, self.words_of_group)


def word_vectors(work: MatmulWork, lanes: int) -> WordVectors | None:
    """Return the vectors of words of a workload; None where its weights are not packed so.

    All are packed alike, along k, in fields that a mantissa holds, around one zero.
    """
    given = (work,) if isinstance(work, GatedFFN) else work.outputs
    weights = {(each.layout, each.packed) for each in given}
    layout, form = next(iter(weights))
    if len(weights) > 1 or form is None or not form.is_plain or form.bits > MANTISSA_BITS:
        return None
    along_k = form.axis == (-1 if layout == "nk" else -2)
    return WordVectors(form, lanes, work.k) if along_k else None


def _widest(problem: MatmulProblem) -> int:
    """Return the lanes of the widest vector of words whose scales are whole groups of lanes."""
    vectors = word_vectors(problem.work, problem.dev.vector_bytes // 4)
    if vectors is None or problem.shape.layouts != {"nk"}:
        return 1
    if vectors.form.group % vectors.form.fields:
        return 1
    lanes = power_dividing(vectors.words, vectors.lanes)
    while lanes % vectors.words_of_group and vectors.words_of_group % lanes:
        lanes //= 2
    return lanes


class Words(CpuMatmul):
    """Norm, matmul or gated projections of few rows, by weights that are packed along k."""

    names = (FAMILY,)
    breaks = Breaks((1, 4, 8, 16))

    def refuses(self, problem: MatmulProblem) -> str | None:
        """Refuse packed weights of which no vector of words is made; others have no plans here."""
        if not problem.shape.unpacked_bytes:
            return None
        if _widest(problem) == 1:
            what = "packed alike, and lie, along k, in words whose groups fill vectors"
            return f"family {FAMILY!r} takes weights that are {what}"
        return refuses_integers(problem, "vectors of words")

    def plans(self, problem: MatmulProblem) -> Iterator[Offer]:
        """Yield the register tiles that divide the columns, in tasks of several sizes."""
        shape, lanes = problem.shape, _widest(problem)
        if lanes == 1:
            return
        exact = [c for c in REG_N if all(n % c == 0 for n in shape.n_parts)]
        for reg_m in REG_M:
            for reg_n in exact:
                for block_n in column_blocks(shape, problem.dev, reg_n):
                    tile = reg_m, block_n, shape.k
                    plan = TilePlan(*tile, reg_m=reg_m, reg_n=reg_n, lanes=lanes, family=FAMILY)
                    yield Offer(plan)

    def violations(self, plan: TilePlan, problem: MatmulProblem) -> Iterator[str]:
        """Yield what its vectors ask for, and what a core has not."""
        if not problem.shape.unpacked_bytes:
            yield f"weights are not packed, family {FAMILY!r} unpacks them"
            return
        yield from one_stage(plan)
        given = {"block_m": plan.reg_m, "block_k": problem.work.k}
        for name, value in given.items():
            if getattr(plan, name) != value:
                yield f"{name} is {getattr(plan, name)}, family {FAMILY!r} has {value} here"
        widest = _widest(problem)
        if plan.lanes > widest:
            yield f"lanes is {plan.lanes}, vectors of whole groups of words have at most {widest}"
        yield from core_limits(_footprint(plan, problem.shape), plan, problem.dev)

    def price(self, plan: TilePlan, problem: MatmulProblem) -> Formula:
        """Price unpacking and multiplying, rows padded to whole tiles."""
        foot = _footprint(plan, problem.shape)
        return Formula(foot, partial(_predict, plan, foot, problem))


def _footprint(plan: TilePlan, shape: MatmulShape) -> Footprint:
    """Return the sums over fields, words, an element of x and a constant.

    Sums over chunks are read and written once for each vector of words: they can lie in memory.
    """
    columns = plan.reg_n * shape.parts
    sums = plan.reg_m * columns
    return Footprint(0, sums + columns + 2, 1, stack_bytes=sums * plan.lanes * 4)


def _predict(plan: TilePlan, foot: Footprint, problem: MatmulProblem, size: Size) -> Prediction:
    """Return what a plan costs at a number of rows."""
    shape, dev, rows = problem.shape, problem.dev, rows_at(size)
    vectors = word_vectors(problem.work, plan.lanes)
    assert vectors is not None
    fields, columns = vectors.form.fields, plan.reg_n * shape.parts
    products = plan.reg_m * columns * (fields + 1)
    unpacking = columns * (fields * cpu_cost.UNPACK_CYCLES + SCALE_CYCLES)
    loads = columns * 2 + plan.reg_m * fields
    step = max((products + unpacking) / dev.fma_per_cycle, loads / cpu_cost.LOADS_PER_CYCLE)
    live = foot.registers_per_thread + plan.reg_m * columns
    step += max(0, live - dev.vector_registers) * SPILL_CYCLES
    sums = plan.reg_m * columns * plan.lanes * SUM_CYCLES_PER_LANE
    tile = vectors.chunks * step + sums + cpu_cost.TILE_CYCLES
    in_page = min(plan.reg_n, PAGE_BYTES / (vectors.words * STORED_BYTES[vectors.form.word]))
    crowding = max(1.0, columns / COLUMNS, in_page / COLUMNS_OF_PAGE)
    read = shape.weight_bytes / shape.n * plan.reg_n * dev.l3_cycles_per_byte * crowding
    tall = ceil_div(rows, plan.reg_m)
    task = plan.block_n // plan.reg_n * (tall * tile + read)
    tasks = sum(ceil_div(n, plan.block_n) for n in shape.n_parts)
    copying = ceil_div(tall, dev.sm_count) * plan.reg_m * shape.k * ORDER_CYCLES_PER_ELEMENT
    lanes = min(plan.lanes, cpu_cost.STORED_LANES)
    return cpu_cost.whole_matmul(shape, dev, rows, cpu_cost.Tasks(tasks, task, lanes, copying))
