"""Tensor cores for many rows: the families "mma" and "wgmma"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import gcd

from ....hardware import DeviceSpec
from ....hardware.instructions import SLICE_BYTES
from ...family import OWN_BASELINE_ERROR, Breaks, Offer
from ...prediction import HALF_DTYPES, Footprint, ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan
from .. import matmuls
from ..few_rows.family import FewRows
from ..fma_tiles import FmaTiles
from ..triton_matmul.tiles import FINER_ROWS
from . import cost
from .tiles import (
    FAMILIES,
    FEWEST_ROWS,
    GROUP_ALIGNMENT_BYTES,
    GROUP_COLUMNS,
    GROUP_LINE_BYTES,
    GROUP_ROWS,
    OVERHEAD_REGISTERS,
    SPLITS,
    SUM_BYTES,
    WARP_GROUPS,
    WARP_TILE,
    Elements,
    copied,
    copy_lanes,
    filling_stages,
    unsupported,
    warp_columns,
    warp_plans,
    warp_registers,
)

GROUP_TILES = (
    *((128, 256), (256, 128), (128, 192), (128, 128)),
    *((64, 256), (64, 192), (64, 128), (64, 64)),
)
"""Blocks of warp groups have so many rows and columns (of all parts)."""

GROUP_STAGES = range(3, 9)
"""So many stages are in flight, of which one is multiplied, and one waits for its readers."""


class TensorCores(matmuls.GpuMatmul):
    """Norm, matmul or gated projections by ``mma.sync`` of warps or ``wgmma`` of warp groups."""

    names = FAMILIES
    emitter = "relax_fusion.dlight_rules.tensor_cores.contraction:emit"
    error = OWN_BASELINE_ERROR
    fallback = True
    instead_of = (FmaTiles,)
    # More regimes than FMAs have, and tiles of 128 rows: the ranges that end at 512 and 1024,
    # which are usual, have one number of them.
    breaks = Breaks((1, 8, 16, 32, 64, 128, 256, 384, 512, 896, 1024), 4096, finer=FINER_ROWS)

    def refuses(self, problem: matmuls.MatmulProblem) -> str | None:
        """Refuse dtypes and devices that have no such instructions, and copies of odd sizes.

        Words across k are refused too: for few rows, tensor cores take these unfused.
        """
        shape = problem.shape
        reason = matmuls.refuses_scattered(problem) or unsupported(shape, problem.dev)
        lanes = copy_lanes(shape)
        if reason is None and not any(all(s % n == 0 for s in copied(shape)) for n in lanes):
            sizes = ", ".join(map(str, copied(shape)))
            step = "are copied 4 bytes at least at once"
            return f"operands of {shape.dtype} {step}, along {sizes} elements"
        return reason

    def plans(self, problem: matmuls.MatmulProblem) -> Iterator[Offer]:
        """Yield tiles of warp groups, then of warps, the reduction whole and in parts.

        A few rows are left to the kernel that is for them, where there is one.  An instruction of a
        warp group has 64 rows, which cost no more than fewer.
        """
        shape, dev, rows = problem.shape, problem.dev, problem.work.rows
        wide = copy_lanes(shape)
        lanes = next((n for n in wide if all(size % n == 0 for size in copied(shape))), None)
        if lanes is None:
            return
        if shape.dtype in HALF_DTYPES and isinstance(rows, int) and rows < FEWEST_ROWS:
            return
        most = 2 * max(rows, FEWEST_ROWS) if isinstance(rows, int) else max(GROUP_TILES)[0]
        if shape.dtype not in HALF_DTYPES:  # few rows have nothing better than these
            most = max(most, GROUP_ROWS)
        warps = warp_plans(Elements.of(shape, lanes), dev)
        few = FewRows()
        alone = few.refuses(problem) or next(few.plans(problem), None) is None
        low = {WARP_GROUPS: FEWEST_ROWS} if not alone else dict.fromkeys(FAMILIES, 1)
        for plan in chain(_groups(shape, lanes, dev), warps):
            if plan.block_m <= most and matmuls.columns_fit(shape, plan.block_n):
                first = low.get(plan.family) if plan.block_m <= GROUP_ROWS else None
                for part in _splits(plan, shape, dev):
                    yield Offer(part, first)

    def violations(self, plan: TilePlan, problem: matmuls.MatmulProblem) -> Iterator[str]:
        """Yield what tiles, copies and clusters ask for, and what a block has not."""
        shape, dev = problem.shape, problem.dev
        reason = unsupported(shape, dev, plan.family)
        yield from [reason] if reason else _tile_violations(plan, shape, dev)
        if plan.block_k > shape.k:
            yield f"block_k is {plan.block_k}, the reduction has {shape.k} elements"
        yield from matmuls.matmul_limits(_footprint(plan, shape, dev), plan, problem)

    def price(self, plan: TilePlan, problem: matmuls.MatmulProblem) -> matmuls.TilePrice:
        """Price the launches, with that of a norm in front."""
        shape, dev = problem.shape, problem.dev
        foot, rates = _footprint(plan, shape, dev), cost.rates_of(plan, shape, dev)
        return matmuls.TilePrice(
            dev, foot, cost.tile_of(plan, shape, foot, dev), rates, matmuls.Columns.of(shape)
        )


def _footprint(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Footprint:
    """Return the stages in shared memory, and the sums and fragments of a thread."""
    columns = plan.reg_n * shape.parts
    lines = plan.block_m + shape.parts * plan.block_n
    smem_bytes = lines * plan.block_k * shape.in_bytes * plan.num_stages
    if plan.split_k > 1:  # the sums take the place of the operands
        smem_bytes = max(smem_bytes, plan.block_m * shape.parts * plan.block_n * SUM_BYTES)
    if plan.family == WARP_GROUPS:
        smem_bytes += GROUP_ALIGNMENT_BYTES
        registers = plan.reg_m * columns // 32 + OVERHEAD_REGISTERS
    else:
        registers = warp_registers(plan.reg_m, columns)
    return Footprint(smem_bytes, registers, plan.num_warps * dev.warp_size)


def _splits(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield `plan`, and it with as many parts of the reduction as the device has room for."""
    yield plan
    tiles = max(ceil_div(n, plan.block_n) for n in shape.n_parts)
    for split in SPLITS[1:] if dev.capabilities.clusters else ():
        parts = replace(plan, split_k=split)
        much = tiles * split > 2 * dev.sm_count
        if not much and next(_split_violations(parts, shape, dev), None) is None:
            yield parts


def _groups(shape: MatmulShape, lanes: int, dev: DeviceSpec) -> Iterator[TilePlan]:
    if unsupported(shape, dev, WARP_GROUPS) is not None or shape.layouts != {"nk"}:
        return
    for block_m, columns in GROUP_TILES:
        block_n, stage_bytes = columns // shape.parts, (block_m + columns) * GROUP_LINE_BYTES
        for stages in filling_stages(stage_bytes, GROUP_STAGES, dev, GROUP_ALIGNMENT_BYTES):
            yield TilePlan(
                *(block_m, block_n, GROUP_LINE_BYTES // shape.in_bytes),
                reg_m=WARP_TILE,
                reg_n=block_n,
                lanes=lanes,
                num_stages=stages,
                num_warps=block_m // WARP_TILE,
                family=WARP_GROUPS,
            )


def _tile_violations(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[str]:
    """Check what fragments and copies ask for."""
    family = f"family {plan.family!r}"
    step = 2 * SLICE_BYTES // shape.in_bytes  # one is loaded while the other is used
    columns = warp_columns(shape)
    for name, unit in (("reg_m", WARP_TILE), ("reg_n", columns), ("block_k", step)):
        if getattr(plan, name) % unit:
            yield f"{name} is {getattr(plan, name)}, {family} takes multiples of {unit}"
    least = 3 if plan.family == WARP_GROUPS else 2
    if plan.num_stages < least:
        yield f"num_stages is {plan.num_stages}, {family} needs {least} to copy while it multiplies"
    yield from _split_violations(plan, shape, dev)
    warps = plan.block_m // plan.reg_m * (plan.block_n // plan.reg_n)
    if plan.num_warps != warps:
        yield f"num_warps is {plan.num_warps}, tiles of {plan.reg_m}x{plan.reg_n} make {warps}"
    if plan.family == WARP_GROUPS:
        yield from _group_violations(plan, shape)
    yield from _copy_violations(plan, shape)


def _split_violations(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[str]:
    """Check that there are clusters, with a part of the reduction and of the tile for each block.

    A block finishes so many runs of each lane: of up to 8 columns, or 2 of a weight ``[k, n]``.
    """
    split, steps = plan.split_k, ceil_div(shape.k, plan.block_k)
    if split == 1:
        return
    if not dev.capabilities.clusters:
        yield f"split_k is {split}, the {dev.label} has no clusters to add up the parts"
    if split > max(SPLITS):
        yield f"split_k is {split}, a cluster has {max(SPLITS)} blocks"
    if split > steps:
        yield f"split_k is {split}, k has {steps} steps of {plan.block_k}"
    for layout in sorted(shape.layouts):
        columns = gcd(plan.reg_n, 32) if layout == "nk" or shape.in_bytes == 1 else 8
        runs = plan.reg_m // 8 * (plan.reg_n // columns)
        if runs % split:
            yield f"split_k is {split}, does not divide the {runs} runs of columns of a lane"


def _group_violations(plan: TilePlan, shape: MatmulShape) -> Iterator[str]:
    """Check what the instructions of warp groups ask for."""
    line = GROUP_LINE_BYTES // shape.in_bytes
    given = {"block_k": line, "reg_m": WARP_TILE, "reg_n": plan.block_n}
    for name, value in given.items():
        if getattr(plan, name) != value:
            yield f"{name} is {getattr(plan, name)}, family 'wgmma' has {value} with this block"
    if plan.block_m % GROUP_ROWS:
        yield f"block_m is {plan.block_m}, family 'wgmma' takes multiples of {GROUP_ROWS}"
    if plan.block_n * shape.parts > GROUP_COLUMNS:
        yield (
            f"block_n is {plan.block_n}, an instruction has {GROUP_COLUMNS // shape.parts} columns "
            "at most"
        )
    if shape.layouts != {"nk"}:
        yield "a weight is [k, n], family 'wgmma' takes [n, k]"


def _copy_violations(plan: TilePlan, shape: MatmulShape) -> Iterator[str]:
    """Check that whole copies of `lanes` elements make up the tiles, as many for each thread."""
    if plan.lanes not in copy_lanes(shape):
        text = ", ".join(map(str, copy_lanes(shape)))
        yield f"lanes is {plan.lanes}, family {plan.family!r} copies {text} elements at once"
        return
    for size in copied(shape):
        if size % plan.lanes:
            yield f"lanes is {plan.lanes}, does not divide {size}, along which operands are copied"
    threads = 32 * max(plan.num_warps, 1)
    for name, lines in (("block_m", plan.block_m), ("block_n", plan.block_n)):
        copies = lines * plan.block_k // plan.lanes
        if copies % threads:
            yield (
                f"{name} is {lines}, its tile has {copies} copies of {plan.lanes} elements for "
                f"{threads} threads"
            )
