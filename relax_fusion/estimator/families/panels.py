"""CPU kernels that repack weights into panels of columns: the family "panels".

A task packs ``reg_n`` columns, all of k, and takes them through the rows in register tiles of
``reg_m x reg_n`` results, so that block and tile are one.  Sums over ``block_k`` elements are added
up at the end: rounding errors grow with the length of a sum.  Where there are fewer panels than
tasks are wanted, the tiles are cut into ``split_m`` parts, each with its own copy of the panel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...hardware import DeviceSpec
from ...validation import Count
from ...workload import GatedFFN, NormMatmul
from ..cpu_cost import (
    FMA_LATENCY_CYCLES,
    L2_SPEED,
    L3_CYCLES_PER_BYTE,
    LOADS_PER_CYCLE,
    TILE_CYCLES,
    UNPACK_CYCLES,
    Traffic,
    activation_cycles,
    finish,
    norm_cycles,
)
from ..family import OWN_BASELINE_ERROR, KernelFamily
from ..limits import core_limits
from ..prediction import Prediction, ceil_div
from ..shape import MatmulShape, Size, matmul_shape, rows_of
from ..steps import Footprint
from ..tile_plan import TilePlan
from .matmuls import MatmulWork, refuses_integers

FAMILY = "panels"

VECTORS = (1, 2, 3, 4)
"""Vectors that a row of a register tile is wide."""

MAX_ROWS = 16
"""Of a register tile."""

TASKS_PER_CORE = 4
"""Tasks that keep cores about equally busy: with one more than a multiple of the cores, a fifth of
the time is lost at most."""

MAX_SUM = 256
"""Elements that are added up in one go, where k has such a divisor.  With all of k = 768, results
erred by three times as much as MKL's."""

MIN_SUM = 64
"""Elements below which storing the sums would cost more than a tenth of making them."""

MAX_PADDING = 0.05
"""Part of the columns that a panel may compute in vain, where others compute fewer."""

STORE_CYCLES_PER_VECTOR = 4
"""Cycles per accumulator and part of k: set to zero, stored, and read to be added up.  Counted."""

COPY_CYCLES_PER_VECTOR = 2
"""Cycles per packed vector that is loaded, converted and stored.  Counted; transposing adds a
shuffle for each halving of the lanes.  Measured on Zen 4 for 16 lanes: 9 with the time that the
weight takes from the third-level cache, where this and `L3_CYCLES_PER_BYTE` give 8.7."""

TILE_CYCLES_PER_ELEMENT = 1
"""Cycles per element of x that is copied into its tile.  Counted for squares of 4: 8 shuffles, 4
loads and 4 stores for 16 elements, at one a cycle."""


@dataclass(frozen=True)
class PanelPlan(TilePlan):
    """Tile sizes of a kernel that packs weights.

    Parameters
    ----------
    split_m : int
        Parts that the rows are cut into, however many they are.
    """

    split_m: Count = 1


class Panels(KernelFamily[MatmulWork]):
    """Norm, matmul or gated projections: a task packs columns and takes them through the rows."""

    names = (FAMILY,)
    kind = "cpu"
    takes = (NormMatmul, GatedFFN)
    emitter = "relax_fusion.dlight_rules.cpu.contraction:emit"
    error = OWN_BASELINE_ERROR
    plan = PanelPlan

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse integers, which would be added up as float32."""
        return refuses_integers(work, "panels of a CPU")

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield the tall half of the register tiles of each width."""
        shape = matmul_shape(work)
        lanes = dev.vector_bytes // 4
        widths = [lanes * vectors for vectors in VECTORS]
        exact = [w for w in widths if all(n % w == 0 for n in shape.n_parts)]
        little = [w for w in widths if _columns(shape, w) <= shape.n * (1 + MAX_PADDING)]
        block_k = sum_length(shape.k)
        for width in exact or little or widths[:1]:
            vectors = width // lanes * shape.parts
            highest = min(MAX_ROWS, (dev.vector_registers - vectors - 1) // vectors)
            parts = _row_parts(_columns(shape, width) // width, dev)
            for reg_m in range(max(1, highest // 2), highest + 1):
                for split_m in parts:
                    yield PanelPlan(
                        *(reg_m, width, block_k),
                        reg_m=reg_m,
                        reg_n=width,
                        lanes=lanes,
                        family=FAMILY,
                        split_m=split_m,
                    )

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what panels ask for, and what a core has not."""
        for block, reg in (("block_m", "reg_m"), ("block_n", "reg_n")):
            if getattr(plan, block) != getattr(plan, reg):
                yield f"{block} is {getattr(plan, block)}, family {FAMILY!r} has {reg} of them"
        if work.k % plan.block_k:
            yield f"block_k is {plan.block_k}, does not divide k={work.k}"
        if plan.reg_n % plan.lanes:
            yield f"lanes is {plan.lanes}, does not divide reg_n={plan.reg_n}"
        if plan.split_k != 1 or plan.num_stages != 1:
            yield f"split_k and num_stages are 1 in family {FAMILY!r}"
        yield from core_limits(self.footprint(plan, work, dev), plan, dev)

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the vector registers of a tile: accumulators, weights, and an element of x."""
        vectors = ceil_div(plan.reg_n, plan.lanes) * matmul_shape(work).parts
        return Footprint(0, plan.reg_m * vectors + vectors + 1, 1)

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Price packing and multiplying, rows padded to whole tiles.

        By the model of register tiles, fitted on CPUs.
        """
        plan = PanelPlan.of(plan)
        shape, rows = matmul_shape(work), rows_of(work, size)
        tiles = ceil_div(rows, plan.reg_m)
        tasks = sum(ceil_div(n, plan.reg_n) for n in shape.n_parts) * plan.split_m
        vectors = plan.reg_n // plan.lanes * shape.parts
        tile = shape.k * _step_cycles(shape, plan, dev, vectors)
        sums = plan.reg_m * vectors * STORE_CYCLES_PER_VECTOR + TILE_CYCLES
        tile += shape.k // plan.block_k * sums
        task = pack_cycles(shape, plan, vectors) + ceil_div(tiles, plan.split_m) * tile
        cycles = ceil_div(tasks, dev.sm_count) * task + norm_cycles(shape, dev, rows)
        copied = ceil_div(tiles, dev.sm_count) * plan.reg_m * shape.k
        cycles += copied * TILE_CYCLES_PER_ELEMENT
        cycles += activation_cycles(shape, dev, (rows, tasks), plan.lanes)
        moved = rows * shape.row_bytes
        regions = len(shape.n_parts) + 1 + int(shape.has_norm)
        traffic = Traffic(cycles, float(shape.weight_bytes + moved), 0.0, regions, tasks)
        return finish(traffic, dev, shape.flops(rows))


def sum_length(k: int) -> int:
    """Return the greatest divisor of k that is not too long, or k where that is too short."""
    found = next(d for d in range(min(k, MAX_SUM), 0, -1) if k % d == 0)
    return found if found >= min(k, MIN_SUM) else k


def _columns(shape: MatmulShape, width: int) -> int:
    """Return the columns of all panels."""
    return sum(ceil_div(n, width) * width for n in shape.n_parts)


def _row_parts(panels: int, dev: DeviceSpec) -> list[int]:
    """Return in how many parts to cut the rows: 1, and what makes enough tasks."""
    wanted = ceil_div(TASKS_PER_CORE * dev.sm_count, panels)
    return [1] if wanted <= 1 else [1, wanted]


def _step_cycles(shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, vectors: int) -> float:
    """Return the cycles of one element of k; prefetchers load while the core computes."""
    sums, loads = plan.reg_m * vectors, plan.reg_m + vectors
    streamed = (plan.reg_m + vectors * plan.lanes) * 4
    panel, tile = shape.k * vectors * plan.lanes * 4, shape.k * plan.reg_m * 4
    fits = panel + tile <= dev.l2_bytes
    l2_cycles_per_byte = dev.sm_count * dev.clock_hz / (dev.l2_bytes_per_s * L2_SPEED)
    return max(
        sums / dev.fma_per_cycle,
        loads / LOADS_PER_CYCLE,
        FMA_LATENCY_CYCLES,
        streamed * (l2_cycles_per_byte if fits else L3_CYCLES_PER_BYTE),
    )


def pack_cycles(shape: MatmulShape, plan: TilePlan, vectors: int) -> float:
    """Return the cycles in which a task packs its panel, which streams by once."""
    shuffles = math.log2(plan.lanes) if "nk" in shape.layouts else 0
    read = plan.reg_n * shape.parts * shape.in_bytes * L3_CYCLES_PER_BYTE
    if shape.unpacked_bytes:  # of shuffled words there are few; elements are unpacked and scaled
        part = shape.weight_bytes / shape.unpacked_bytes
        shuffles, read = shuffles * part + UNPACK_CYCLES + 1, read * part
    return shape.k * (vectors * (COPY_CYCLES_PER_VECTOR + shuffles) + read)
