"""Plans of TIR's tensor-core kernels for many rows.

``mma``    sm_80 and newer: warps multiply what they load into registers
``wgmma``  sm_90: groups of four warps multiply what lies in shared memory; weights ``[n, k]``

A thread block has ``block_m x block_n`` results, its warps ``reg_m x reg_n`` each (of every part),
and ``num_stages`` tiles of both operands, ``block_k`` deep, in shared memory or on their way to it.
``split_k`` blocks that share a tile are a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from ....hardware import DeviceSpec
from ....hardware.instructions import COPY_BYTES, MMA, SLICE_BYTES, WARP_GROUP_MMA
from ....workload import INTEGER_DTYPES
from ...prediction import HALF_DTYPES, ceil_div
from ...shape import MatmulShape
from ...tile_plan import TilePlan

_HALF, _GROUP = MMA["float16"], WARP_GROUP_MMA["float16"]

FAMILY, WARP_GROUPS = FAMILIES = ("mma", "wgmma")

FEWEST_ROWS = 17
"""Rows from which on tiles of this family are looked at for two-byte types; fewer have kernels that
stream weights."""

WARP_TILE = _HALF.m
"""Rows and columns of a warp come in multiples of this: the operands that one ``ldmatrix.x4``
loads."""

DTYPES = (*HALF_DTYPES, *INTEGER_DTYPES, "float32")
"""Element types of operands; float32 is multiplied as tf32, where that is allowed."""

SUM_BYTES = 4
"""Of one sum."""

SYSTEM_SMEM_BYTES = 1 << 10
"""Shared memory that the system keeps for itself in each thread block."""

OVERHEAD_REGISTERS = 40
"""Of a thread, beside its accumulators and two sets of operands.  Compiled for sm_90: 232 with 128
accumulators and 64 operands, 144 with 64 and 48."""

GROUP_ROWS, GROUP_WARPS = _GROUP.m, _GROUP.warps
"""Rows of one ``wgmma`` instruction, and the warps that execute it."""

GROUP_COLUMNS = _GROUP.n
"""Most columns of one ``wgmma`` instruction, those of both parts together."""

GROUP_LINE_BYTES = 128
"""Bytes of k of a step of ``wgmma``: the lines that it reads without conflicts."""

SPLITS = (1, 2, 3, 4, 6, 8)
"""Parts of a reduction: thread blocks of a cluster, of which every sm_90 device runs 8."""

GROUP_ALIGNMENT_BYTES = 1024
"""What the stages of ``wgmma`` are aligned to, at the cost of as much shared memory."""


def unsupported(shape: MatmulShape, dev: DeviceSpec, family: str = FAMILY) -> str | None:
    """Return why no plan of a tensor-core family runs on `dev`; None if there may be one."""
    if shape.dtype == "float32" and not shape.allow_tf32:
        return f"dtype is float32, family {family!r} multiplies it as tf32, which is not allowed"
    if shape.dtype not in DTYPES:
        return f"dtype is {shape.dtype}, family {family!r} takes {', '.join(DTYPES)}"
    if family == WARP_GROUPS and not dev.can_generate(WARP_GROUP_MMA[shape.dtype]):
        needed = f"wgmma of {shape.dtype} (CUDA, arch sm_90a)"
        return f"family {family!r} needs {needed}, which the {dev.label} lacks"
    lacking = lacks_instructions(shape.dtype, dev)
    return f"family {family!r} {lacking}" if lacking else None


def lacks_instructions(dtype: str, dev: DeviceSpec) -> str | None:
    """Return what `dev` lacks of the instructions of a tensor-core kernel; None if nothing."""
    if dev.capabilities.async_copies and dev.can_generate(MMA[dtype]):
        return None
    needed = f"cp.async and mma.{MMA[dtype].shape} of {dtype} (CUDA, sm_80 or newer)"
    return f"needs {needed}, which the {dev.label} lacks"


def warp_columns(shape: MatmulShape) -> int:
    """Return what the columns of a warp are a multiple of.

    Of weights ``[k, n]`` with elements of one byte, a lane transposes four columns at once.
    """
    return 2 * WARP_TILE if shape.in_bytes == 1 and "kn" in shape.layouts else WARP_TILE


def copy_lanes(shape: MatmulShape) -> tuple[int, ...]:
    """Return how many elements a copy may move, most first."""
    return tuple(b // shape.in_bytes for b in COPY_BYTES if b >= shape.in_bytes)


def copied(shape: MatmulShape) -> tuple[int, ...]:
    """Return the extents along which operands are copied."""
    return (shape.k, *(shape.contiguous if "kn" in shape.layouts else ()))


def smem_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the shared memory of a thread block."""
    lines = plan.block_m + shape.parts * plan.block_n
    stages = lines * plan.block_k * shape.in_bytes * plan.num_stages
    if plan.split_k > 1:  # the sums take the place of the operands
        stages = max(stages, plan.block_m * shape.parts * plan.block_n * SUM_BYTES)
    return stages + (GROUP_ALIGNMENT_BYTES if plan.family == WARP_GROUPS else 0)


def registers(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the registers of a thread."""
    columns = plan.reg_n * shape.parts
    sums = plan.reg_m * columns // 32
    if plan.family == WARP_GROUPS:
        return sums + OVERHEAD_REGISTERS
    operands = (plan.reg_m + columns) * SLICE_BYTES // 32 // 4
    return sums + 2 * operands + OVERHEAD_REGISTERS


def violations(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[str]:
    """Yield what is wrong with `plan`, besides the limits of the device."""
    reason = unsupported(shape, dev, plan.family)
    if reason is not None:
        yield reason
        return
    family = f"family {plan.family!r}"
    step = 2 * SLICE_BYTES // shape.in_bytes  # one is loaded while the other is used
    columns = warp_columns(shape)
    for name, unit in (("reg_m", WARP_TILE), ("reg_n", columns), ("block_k", step)):
        if getattr(plan, name) % unit:
            yield f"{name} is {getattr(plan, name)}, {family} takes multiples of {unit}"
    least = 3 if plan.family == WARP_GROUPS else 2
    if plan.num_stages < least:
        yield f"num_stages is {plan.num_stages}, {family} needs {least} to copy while it multiplies"
    yield from split_violations(plan, shape, dev)
    warps = plan.block_m // plan.reg_m * (plan.block_n // plan.reg_n)
    if plan.num_warps != warps:
        yield f"num_warps is {plan.num_warps}, tiles of {plan.reg_m}x{plan.reg_n} make {warps}"
    if plan.family == WARP_GROUPS:
        yield from _group_violations(plan, shape)
    yield from _copy_violations(plan, shape)


def split_violations(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[str]:
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
