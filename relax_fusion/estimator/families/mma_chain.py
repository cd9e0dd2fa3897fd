"""Chains of two matmuls by tensor cores: the family "mma" of a `MatmulChain`.

A thread block takes ``block_m`` rows to ``block_n`` columns of the result; each of its warps has
``reg_m`` rows, and all of the intermediate of them in registers.  ``reg_n`` columns are summed at a
time, of the result and (where there are as many) of the intermediate; ``block_k`` elements of x and
A, or ``reg_n`` columns of B, are a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from ...hardware import DeviceSpec
from ...workload import DTYPE_BYTES, MatmulChain
from ..family import Breaks, KernelFamily
from ..gpu_cost import resident_blocks
from ..limits import block_limits
from ..prediction import DRAM_EFFICIENCY, HALF_DTYPES, Bound, Prediction, ceil_div, largest
from ..shape import Size, rows_of
from ..steps import Footprint
from ..tile_plan import TilePlan
from .cpu_chain import matrices
from .tensor_cores import tiles as mma
from .tensor_cores.cost import BEST_INTENSITY, FILL_S, HOPPER_RATE, LATENCY_S, NATIVE_RATE

SLICE = mma.WARP_TILE
"""Columns of the intermediate in one instruction of the second product."""

LANES = (8, 4, 2)
"""Elements of a copy: 16, 8 or 4 bytes."""

ROWS, WARPS, COLUMNS = (16, 32), (1, 2, 4, 8), (16, 32, 64, 128)
PIPELINES = ((32, 4), (64, 3), (64, 4), (64, 6), (64, 8), (128, 3), (128, 4))
"""Elements of k of a step, and stages."""

OVERHEAD_REGISTERS = 40
"""Of a thread, beside sums and operands.  Assumed as for `mma.OVERHEAD_REGISTERS`."""

FEED_BYTES_PER_CLOCK = 21.0
"""What one multiprocessor reads and writes.  Measured on an H200, float16: 40 to 44 GB/s in G1, G4
and G9 of MCFuser, 30 to 49 in LoRA of rank 16 and 64."""


class MmaChain(KernelFamily[MatmulChain]):
    """A block has a tile of rows; tensor cores multiply, the intermediate stays in registers."""

    names = (mma.FAMILY,)
    takes = (MatmulChain,)
    emitter = "relax_fusion.dlight_rules.tensor_cores.chain:emit"
    # On an H200 adapters of rank 64 that were predicted to win by 1.56 to 1.64 reached 0.71 to 1.06
    # of the speed of the two matmuls (2026-11-22-baseline.json); G1 to G3 of MCFuser, by 1.66 and
    # more, 1.6.
    error = 1.65
    breaks = Breaks((1, 8, 16, 32, 64, 128, 256, 384, 512, 896, 1024), 4096)

    def refuses(self, work: MatmulChain, dev: DeviceSpec) -> str | None:
        """Refuse dtypes and devices that its instructions are not for."""
        if work.dtype not in HALF_DTYPES:
            return f"dtype is {work.dtype}, a chain on a GPU takes {' and '.join(HALF_DTYPES)}"
        lacking = mma.lacks_instructions(work.dtype, dev)
        return f"a chain on a GPU {lacking}" if lacking else None

    def nothing_fits(self, work: MatmulChain, dev: DeviceSpec) -> str:
        """Name the size that has to fit."""
        return f"rows of {work.r} elements between the matmuls fit no tile of the {dev.label}"

    def plans(self, work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles that hold all of an intermediate row."""
        lanes = next((n for n in LANES if all(s % n == 0 for s in _contiguous(work))), None)
        if lanes is None:
            return
        padded = ceil_div(work.n, SLICE) * SLICE
        pipelines = [(k, s) for k, s in PIPELINES if k < 2 * work.k] or PIPELINES[:1]
        for reg_m, warps, reg_n in product(ROWS, WARPS, COLUMNS):
            if reg_n > padded:
                continue
            tiles = ceil_div(work.n, reg_n)
            for parts in sorted({ceil_div(tiles, 1 << p) for p in range(tiles.bit_length())}):
                for block_k, stages in pipelines:
                    yield TilePlan(
                        *(reg_m * warps, reg_n * parts, block_k),
                        reg_m=reg_m,
                        reg_n=reg_n,
                        lanes=lanes,
                        num_stages=stages,
                        num_warps=warps,
                        family=mma.FAMILY,
                    )

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulChain, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Offer tiles of 64 rows at any size: they cost no more than fewer."""
        return (p for p in plans if p.block_m <= max(rows[1], mma.GROUP_ROWS))

    def violations(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Iterator[str]:
        """Yield what fragments and copies ask for, and what a block has not."""
        for name in ("reg_m", "reg_n", "block_k"):
            if getattr(plan, name) % mma.WARP_TILE:
                yield f"{name} is {getattr(plan, name)}, must be a multiple of {mma.WARP_TILE}"
        if plan.num_warps != plan.block_m // plan.reg_m:
            yield f"num_warps is {plan.num_warps}, {plan.block_m} rows of {plan.reg_m} make others"
        if plan.num_stages < 2:
            yield f"num_stages is {plan.num_stages}, copies that run ahead need 2"
        if plan.split_k != 1:
            yield f"split_k is {plan.split_k}, 1 in chains of matmuls"
        if plan.lanes not in LANES or any(size % plan.lanes for size in _contiguous(work)):
            sizes = ", ".join(map(str, sorted(set(_contiguous(work)))))
            yield f"lanes is {plan.lanes}, must be 8, 4 or 2 and divide {sizes}"
        yield from block_limits(self.footprint(plan, work, dev), plan, work, dev)

    def footprint(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Footprint:
        """Return the stages of x and A, or of B, and the sums and operands of a thread."""
        chunk, kept = chunk_columns(plan, work), ceil_div(work.r, SLICE)
        stage = max((plan.block_m + chunk) * plan.block_k, plan.reg_n * kept * SLICE)
        sums = kept * 4 + max(chunk // 2, plan.reg_n // 2)
        registers = plan.reg_m // mma.WARP_TILE * (sums + 4) + 4 + OVERHEAD_REGISTERS
        smem_bytes = plan.num_stages * stage * DTYPE_BYTES[work.dtype]
        return Footprint(smem_bytes, registers, plan.num_warps * dev.warp_size)

    def predict(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec, size: Size) -> Prediction:
        """Price both products in waves of blocks, by the model that was fitted to `TensorCores`."""
        rows, count, each = rows_of(work, size), matrices(work), DTYPE_BYTES[work.dtype]
        blocks = count * ceil_div(rows, plan.block_m) * ceil_div(work.n, plan.block_n)
        resident = resident_blocks(self.footprint(plan, work, dev), dev)
        waves = ceil_div(blocks, dev.sm_count * resident)
        busiest = ceil_div(ceil_div(blocks, waves), dev.sm_count)
        terms: dict[Bound, float] = {"launch": dev.launch_s + FILL_S, "compute": 0.0, "l2": 0.0}
        terms["latency"] = 0.0
        for steps, columns, depth, elements in _products(plan, work):
            times: dict[Bound, float] = {
                "compute": busiest * 2.0 * plan.block_m * columns * depth / _rate(plan, work, dev),
                "l2": busiest * elements * each / FEED_BYTES_PER_CLOCK / dev.clock_hz,
                "latency": LATENCY_S / (plan.num_stages - 1),
            }
            slowest = largest(times)
            terms[slowest] += waves * steps * times[slowest]
        moved = float(sum(work.bytes(rows=rows, batch=count).values()))
        dram = moved / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
        walked = terms["compute"] + terms["l2"] + terms["latency"]
        terms["dram"] = dram
        seconds = terms["launch"] + max(dram, walked)
        flops = work.flops(rows=rows, batch=count)
        return Prediction(seconds, moved, flops, waves, largest(terms))


def chunk_columns(plan: TilePlan, work: MatmulChain) -> int:
    """Return the columns of the intermediate that are summed at a time."""
    return min(plan.reg_n, ceil_div(work.r, SLICE) * SLICE)


def _contiguous(work: MatmulChain) -> tuple[int, ...]:
    """Return the sizes along which operands lie, and are copied."""
    first, second = work.layouts
    return work.k, work.k if first == "nk" else work.r, work.r if second == "nk" else work.n


def _products(plan: TilePlan, work: MatmulChain) -> Iterator[tuple[int, int, int, int]]:
    """Yield the steps of each product, and of a step columns, depth, and elements that move."""
    chunk = chunk_columns(plan, work)
    steps = ceil_div(work.r, chunk) * ceil_div(work.k, plan.block_k)
    yield steps, chunk, plan.block_k, (plan.block_m + chunk) * plan.block_k
    stored = plan.block_m * plan.reg_n * (1 + work.outer.count("residual"))
    yield plan.block_n // plan.reg_n, plan.reg_n, work.r, plan.reg_n * work.r + stored


def _rate(plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> float:
    """Return the flop/s that one multiprocessor reaches with the tiles of `plan`."""
    intensity = plan.reg_m * plan.reg_n / (plan.reg_m + plan.reg_n)
    whole = HOPPER_RATE if dev.capabilities.warp_group_mma else NATIVE_RATE
    few = min(1.0, plan.num_warps / mma.GROUP_WARPS)  # a multiprocessor has four matrix units
    reached = whole * min(1.0, intensity / BEST_INTENSITY) ** 0.5 * few
    return dev.tensor_flops_per_s(work.dtype) / dev.sm_count * reached
