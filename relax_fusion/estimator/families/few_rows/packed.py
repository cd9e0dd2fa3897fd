"""Tensor cores for at most 16 rows and packed weights, which are unpacked in registers.

A kernel is bound by memory, by L2, which gives the rows to every thread block, by how many words
are on their way at once, or by how fast warps unpack and multiply.  The constants of the price were
fitted to 238 timings on an H200, at 1 to 16 rows of LLaMA-3.1-8B in q4f16_1: predictions err by
9 % (root mean square), and of the plans that were timed for a workload, those that they choose lose
0.5 % on average, 2.2 % at most (`2026-11-23-packed_plans.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ....hardware import DeviceSpec
from ....workload import GatedFFN, NormMatmul
from ...family import OWN_BASELINE_ERROR, Breaks, KernelFamily
from ...gpu_cost import ISSUE_PER_CLOCK, resident_blocks
from ...prediction import HALF_DTYPES, Bound, Prediction, ceil_div, largest
from ...shape import Size, matmul_shape, rows_of
from ...steps import Footprint
from ...tile_plan import TilePlan
from ..dot_products import DotProducts
from ..fma_tiles import FmaTiles
from ..matmuls import (
    MatmulWork,
    columns_fit,
    matmul_limits,
    packed_form,
    refuses_scattered,
)
from ..tensor_cores import tiles as mma
from .dequantised import MEMBERS, PIECE, width
from .tiles import (
    MMA_COLUMNS,
    MMA_ROWS,
    MOST_ROWS,
    PACKED_FAMILY,
    SUM_BYTES,
    of_height,
    refuses_others,
)

AHEAD = (2, 3, 4)
"""Steps that are copied ahead."""

BLOCK_COLUMNS = (16, 32, 48, 64, 128)
"""Of a tile, of all parts."""

BLOCK_WARPS = (4, 8, 16)
"""Of a thread block, which take turns along k."""

READ_EFFICIENCY = 0.98
"""Part of the peak bandwidth at which words can be read."""

UNPACKING, MULTIPLYING = 4.4, 0.33
"""Clocks of a multiprocessor's quarter for the weights of a warp, and more for each eight rows."""

MANY_WARPS, FEWER = 16, 0.44
"""Warps of a multiprocessor that keep it busy, and the exponent of its speed with fewer."""

LATENCY_S = 0.7e-6
"""From asking for words to having them."""

OVERLAP = 3.5
"""Exponent of the sum of these."""

FILL_S = 1.0e-6
"""From the start of a kernel to the first product, and from the last one to the last store."""

ASKED_BYTES_PER_S = 190e9
"""At which a multiprocessor gets what all of its threads ask for at first."""

SUM_S = 2.3e-9
"""Of a column, a warp and eight rows: adding up what the warps have."""

FRONT_S, INSIDE_S = 2.0e-6, 0.4e-6
"""What a norm adds, in front or inside; words are on their way meanwhile.  Behind other kernels, a
layer of LLaMA-3.1-8B took 1.6 us less with the norm inside (`2026-11-23-early_launches.md`)."""

WAVE_S = 0.7e-6
"""What further waves of thread blocks add: they begin and end as the first did."""

OVERHEAD_REGISTERS = 36
"""Of a thread, beside sums, rows and scales: addresses, and the words that are being unpacked."""


@dataclass(frozen=True)
class PackedPlan(TilePlan):
    """Tile sizes of a kernel that unpacks weights for a few rows.

    Parameters
    ----------
    keeps_row : bool
        Whether a thread block normalises a row and keeps it in shared memory; it has one row then.
        Else warps load with the words what they multiply, and a kernel in front normalises.
    """

    keeps_row: bool = False

    @property
    def height(self) -> int:
        """Rows of a tile that are stored."""
        return 1 if self.keeps_row else self.block_m


class PackedRows(KernelFamily[MatmulWork]):
    """Norm, matmul or gated projections of a few rows; threads unpack what they multiply."""

    names = (PACKED_FAMILY,)
    takes = (NormMatmul, GatedFFN)
    emitter = "relax_fusion.dlight_rules.tensor_cores.contraction:emit"
    error = OWN_BASELINE_ERROR
    instead_of = (DotProducts, FmaTiles)
    plan = PackedPlan
    breaks = Breaks((1, 8, 16))
    most_rows = MOST_ROWS

    def serves(self, work: MatmulWork) -> bool:
        """Leave weights that are not packed to `FewRows`."""
        return packed_form(work) is not None

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse formats, dtypes and devices that its instructions are not for."""
        form = packed_form(work)
        assert form is not None
        if (scattered := refuses_scattered(work)) is not None:
            return scattered
        if work.k % PIECE and work.dtype in HALF_DTYPES:
            return f"k is {work.k}, family {PACKED_FAMILY!r} takes multiples of {PIECE}"
        return refuses_others(work, dev)

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles of 8 and 16 rows."""
        shape, rows = matmul_shape(work), work.rows
        most = rows if isinstance(rows, int) else MOST_ROWS
        if most > MOST_ROWS:
            return
        for block_m, columns, warps, ahead in product(
            (MMA_ROWS, MOST_ROWS), BLOCK_COLUMNS, BLOCK_WARPS, AHEAD
        ):
            block_n, block_k = columns // shape.parts, MEMBERS * width(work.k) * warps
            if block_n % MMA_COLUMNS or block_m >= 2 * max(most, MMA_ROWS):
                continue
            if block_n > MMA_COLUMNS and not columns_fit(shape, block_n):
                continue
            if ahead * block_k > work.k and (warps, ahead) != (BLOCK_WARPS[0], AHEAD[0]):
                continue
            plan = PackedPlan(
                *(block_m, block_n, block_k),
                reg_m=block_m,
                reg_n=block_n,
                lanes=PIECE,
                num_stages=ahead,
                num_warps=warps,
                family=PACKED_FAMILY,
            )
            yield plan
            if block_m == MMA_ROWS:
                yield replace(plan, keeps_row=True)

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulWork, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Offer nothing for more rows; one instruction takes eight."""
        fitting = map(PackedPlan.of, of_height(plans, rows[1]))
        return (p for p in fitting if rows[1] == 1 or not p.keeps_row)

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what its tiles ask for, and what a block has not."""
        family, chunk = f"family {PACKED_FAMILY!r}", MEMBERS * width(work.k)
        if plan.block_m not in (MMA_ROWS, MOST_ROWS):
            yield f"block_m is {plan.block_m}, {family} has tiles of {MMA_ROWS} or {MOST_ROWS}"
        given = {
            "reg_m": plan.block_m,
            "lanes": PIECE,
            "split_k": 1,
            "block_k": chunk * plan.num_warps,
        }
        for name, value in given.items():
            if getattr(plan, name) != value:
                yield f"{name} is {getattr(plan, name)}, {family} has {value} with these weights"
        if plan.block_n % MMA_COLUMNS:
            yield f"block_n is {plan.block_n}, {family} takes multiples of {MMA_COLUMNS}"
        yield from matmul_limits(self.footprint(plan, work, dev), plan, work, dev)

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return what is copied ahead or the sums of warps, and what a thread holds."""
        shape = matmul_shape(work)
        columns, neighbours = shape.parts * plan.block_n, width(work.k)
        held, tall = columns // 8, plan.block_m // MMA_ROWS
        x, words = tall * neighbours // 2, held * neighbours * _bits(work) // 32
        threads = plan.num_warps * dev.warp_size
        kept = PackedPlan.of(plan).keeps_row
        steps = ceil_div(work.k, plan.block_k)
        ahead = min(plan.num_stages, steps)
        copied = ahead * threads * 4 * (words if kept else x + words)
        rows = steps * plan.block_k * shape.in_bytes if kept else 0
        sums = SUM_BYTES * columns * plan.block_m * plan.num_warps
        registers = tall * held + x + ahead * held + OVERHEAD_REGISTERS
        return Footprint(max(rows + copied, sums), registers, threads)

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches cost."""
        shape, rows = matmul_shape(work), rows_of(work, size)
        own, foot = PackedPlan.of(plan), self.footprint(plan, work, dev)
        resident = resident_blocks(foot, dev, mma.SYSTEM_SMEM_BYTES)
        ahead = min(plan.num_stages, ceil_div(work.k, plan.block_k))
        columns = plan.block_n * shape.parts
        copied = foot.threads * ahead * columns // 8 * width(work.k) * _bits(work) // 8
        bandwidth = dev.dram_bytes_per_s * READ_EFFICIENCY
        tall, height = ceil_div(rows, own.height), plan.block_m // MMA_ROWS
        terms: dict[Bound, float] = {"dram": 0.0, "l2": 0.0, "compute": 0.0, "latency": 0.0}
        seconds, all_waves = 0.0, 0
        for n in shape.n_parts:
            blocks = tall * ceil_div(n, plan.block_n)
            busiest, waves = (ceil_div(blocks, dev.sm_count * r) for r in (1, resident))
            moved = tall * n / shape.n * shape.weight_bytes
            read = moved + blocks * min(rows, own.height) * shape.k * shape.in_bytes
            there = min(busiest, resident)
            rate = min(1.0, (there * plan.num_warps / MANY_WARPS) ** FEWER)
            clocks = (UNPACKING + MULTIPLYING * height) / (dev.warp_size * rate)
            turns = moved * busiest / blocks / (there * copied)
            times = (
                moved / bandwidth,
                read / dev.l2_bytes_per_s,
                busiest * columns * shape.k * clocks / (ISSUE_PER_CLOCK * dev.clock_hz),
                LATENCY_S * turns,
            )
            for name, value in zip(terms, times, strict=True):
                terms[name] += value
            seconds += sum(t**OVERLAP for t in times) ** (1 / OVERLAP)
            seconds += WAVE_S * (waves - 1) + there * copied / ASKED_BYTES_PER_S
            seconds += SUM_S * columns * plan.num_warps * height
            all_waves += waves
        terms["launch"] = len(shape.n_parts) * (dev.launch_s + FILL_S)
        if work.norm is not None:
            front = FRONT_S if dev.capabilities.dependent_launch else dev.launch_s
            inside = own.keeps_row and not work.norm.residual
            terms["launch"] += INSIDE_S if inside else front
        side = rows * shape.row_bytes
        return Prediction(
            seconds + terms["launch"],
            shape.weight_bytes + side,
            shape.flops(rows),
            all_waves,
            largest(terms),
        )


def _bits(work: MatmulWork) -> int:
    form = packed_form(work)
    assert form is not None
    return form.bits
