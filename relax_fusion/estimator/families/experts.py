"""Matmuls by experts in TIR: a task has some columns of one row, and reads weights as they lie."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...hardware import DeviceSpec
from ...workload import DTYPE_BYTES, ExpertMatmul
from ..cpu_cost import UNPACK_CYCLES_BY_ELEMENT, Traffic, finish
from ..family import OWN_BASELINE_ERROR, KernelFamily, Launches, Offer
from ..limits import one_stage
from ..prediction import Footprint, Formula, Prediction, Price, Step, ceil_div, power_dividing
from ..shape import Problem, Size, rows_at
from ..tile_plan import TilePlan

FAMILY = "experts"
"""The name of the family."""

COLUMNS = (16, 32, 64, 128)
"""Columns of a task; of a GPU's block, a thread each."""

ROWS = (1, 16, 128)
"""Rows of a task on a CPU, which goes through their pairs: weights of experts that several of them
go to are read again from the caches."""

LANES = 16
"""The most parts of a dot product that a processor adds at once."""

THREAD_CLOCKS = 8
"""Clocks in which a thread of a GPU multiplies two elements that it loads.  Assumed."""


class Experts(KernelFamily[ExpertMatmul]):
    """Rows by the weights of their experts, one pair of them after the other."""

    names = (FAMILY,)
    emitter = "relax_fusion.dlight_rules.experts:emit"
    error = OWN_BASELINE_ERROR
    fallback = True

    def takes(self, problem: Problem[ExpertMatmul]) -> bool:
        """Take matmuls by experts, on every device."""
        return isinstance(problem.work, ExpertMatmul)

    def plans(self, problem: Problem[ExpertMatmul]) -> Iterator[Offer]:
        """Yield numbers of columns."""
        work, gpu = problem.work, problem.dev.kind == "gpu"
        lanes = power_dividing(work.k, LANES) if work.layout == "nk" and not gpu else 1
        columns = (c for c in COLUMNS if c == COLUMNS[0] or c < 2 * work.n)
        for rows, wide in product(ROWS[:1] if gpu else ROWS, columns):
            warps = ceil_div(wide, problem.dev.warp_size) if gpu else 0
            plan = TilePlan(rows, wide, work.k, lanes=lanes, num_warps=warps, family=FAMILY)
            yield Offer(plan)

    def violations(self, plan: TilePlan, problem: Problem[ExpertMatmul]) -> Iterator[str]:
        """Yield which numbers the kernels have not."""
        work, gpu = problem.work, problem.dev.kind == "gpu"
        yield from one_stage(plan)
        if gpu and plan.block_m != 1:
            yield f"block_m is {plan.block_m}, family {FAMILY!r} takes 1 row on a GPU"
        if plan.block_k != work.k:
            yield f"block_k is {plan.block_k}, must be k={work.k}"
        most = problem.dev.max_threads_per_block if gpu else None
        if most is not None and plan.block_n > most:
            yield f"block_n is {plan.block_n}, a block has up to {most} threads"
        if work.k % plan.lanes or (plan.lanes > 1 and (gpu or work.layout == "kn")):
            parts = f"on a CPU with 'nk' weights, divide k={work.k}"
            yield f"lanes is {plan.lanes}, must be 1 or, {parts}"

    def price(self, plan: TilePlan, problem: Problem[ExpertMatmul]) -> Price:
        """Price each pair's way through its expert's weight."""
        work, dev = problem.work, problem.dev
        foot = Footprint(0, 32, plan.block_n if dev.kind == "gpu" else 1)
        if dev.kind == "cpu":
            return Formula(foot, lambda size: _on_cpu(work, plan, dev, rows_at(size)))
        return Launches(dev, foot, lambda size: [_on_gpu(work, plan, foot, size)])


def stored_bytes(work: ExpertMatmul) -> float:
    """Return the bytes of an element of a weight as it is stored."""
    return DTYPE_BYTES[work.dtype] if work.packed is None else work.packed.bits / 8


def _tasks(work: ExpertMatmul, plan: TilePlan, rows: int) -> tuple[int, int]:
    """Return how many tasks there are, and how many elements of weights each multiplies by."""
    tile, tiles = min(rows, plan.block_m), ceil_div(rows, plan.block_m)
    apart = 1 if work.share or plan.block_m > 1 else work.chosen  # tasks of a row's pairs
    parts = work.columns // work.n * work.chosen // apart
    tasks = tiles * apart * ceil_div(work.n, plan.block_n)
    return tasks, tile * plan.block_n * work.k * parts


def _on_cpu(work: ExpertMatmul, plan: TilePlan, dev: DeviceSpec, rows: int) -> Prediction:
    tile, tiles = min(rows, plan.block_m), ceil_div(rows, plan.block_m)
    tasks, elements = _tasks(work, plan, rows)
    lanes = min(plan.lanes if work.layout == "nk" else plan.block_n, dev.vector_bytes // 4)
    touched, stored = work.touched(tile), stored_bytes(work)
    kept = touched * plan.block_n * (work.columns // work.n) * work.k * stored <= dev.l2_bytes
    again = touched / (tile * work.chosen) if kept else 1.0
    cycles = elements / lanes + elements * stored * dev.l3_cycles_per_byte * again
    if work.packed is not None:
        cycles += elements * UNPACK_CYCLES_BY_ELEMENT[work.layout]
    moved = float(sum(work.bytes(rows=rows).values()))
    if work.bytes(rows=rows)["w0"] > dev.sm_count * dev.l2_bytes:  # each tile reads them
        moved += (tiles * touched - work.touched(rows)) * work.columns * work.k * stored
    traffic = Traffic(ceil_div(tasks, dev.sm_count) * cycles, moved, 0.0, 1, tasks)
    return finish(traffic, dev, work.flops(rows=rows))


def _on_gpu(work: ExpertMatmul, plan: TilePlan, foot: Footprint, size: Size) -> Step:
    rows = rows_at(size)
    tasks, elements = _tasks(work, plan, rows)
    return Step(
        blocks=tasks,
        foot=foot,
        block_s=elements / plan.block_n * THREAD_CLOCKS / 1e9,
        dram_bytes=float(sum(work.bytes(rows=rows).values())),
        l2_bytes=tasks * elements * stored_bytes(work),
        flops=work.flops(rows=rows),
    )
