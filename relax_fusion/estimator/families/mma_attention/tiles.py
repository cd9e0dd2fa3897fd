"""Plans of TIR's tensor-core kernels for attention (family ``mma``, sm_80 and newer).

A thread block has ``block_m`` rows, each a query of one of the heads that share keys, ``reg_m`` of
them in a warp, and walks over the keys, ``block_n`` at a time, with ``num_stages`` such blocks of
keys and values in shared memory or on their way to it.  With few rows, the keys are cut into
``split_k`` parts for as many blocks, whose results another kernel puts together.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ....hardware import DeviceSpec
from ....hardware.instructions import PIECE_BYTES, SLICE_BYTES
from ....workload import DTYPE_BYTES, Attention
from ...prediction import HALF_DTYPES, ceil_div
from ...tile_plan import TilePlan
from ..tensor_cores.tiles import FAMILY, WARP_TILE, lacks_instructions

MOST_FEATURES = 256
"""Of a head; more leave no registers for the sums of a row."""

QUERY_REGISTERS = 32
"""Registers in which a lane keeps its queries; more are loaded for every block of keys."""

LEAST_STAGES = 2

OVERHEAD_REGISTERS = 44
"""Of a thread, beside sums, scores and queries: operands on their way, addresses, rows."""

ADDRESS_REGISTERS = 24
"""Of a thread, beside those, where it reads something for each score."""

TILES = ((128, 32), (128, 16), (64, 16), (64, 32), (32, 16), (16, 16))
"""Rows of a block and of a warp."""

KEYS = (64, 128, 32)

FEW_ROWS = 16
"""Rows of a block up to which longer pipelines, and keys in parts, are looked at.  With more rows,
third stages gained nothing where they fit, and cost the room for other blocks."""

STAGES, PARTS = (2, 3), (1, 4, 8, 16, 32, 64)


def slices(features: int, work: Attention) -> int:
    """Return how many instructions it takes to multiply some features."""
    return ceil_div(features * DTYPE_BYTES[work.dtype], SLICE_BYTES)


def holds_queries(plan: TilePlan, work: Attention) -> bool:
    """Tell whether a warp keeps its queries in registers."""
    return plan.reg_m // WARP_TILE * slices(work.head_dim, work) * 4 <= QUERY_REGISTERS


def smem_bytes(plan: TilePlan, work: Attention) -> int:
    """Return the shared memory of a thread block."""
    head, value = (slices(n, work) * SLICE_BYTES for n in (work.head_dim, work.v_dim))
    return plan.block_m * head + plan.num_stages * plan.block_n * (head + value)


def registers(plan: TilePlan, work: Attention) -> int:
    """Return the registers of a thread."""
    sums = plan.reg_m * slices(work.v_dim, work) * WARP_TILE // 32
    scores = plan.reg_m * plan.reg_n // 32
    queries = plan.reg_m // WARP_TILE * 4
    if holds_queries(plan, work):
        queries *= slices(work.head_dim, work)
    addresses = ADDRESS_REGISTERS if work.bias_dims or work.mask_dims else 0
    return sums + scores + queries + addresses + OVERHEAD_REGISTERS


def unsupported(work: Attention, dev: DeviceSpec) -> str | None:
    """Return why no such plan computes `work` on `dev`; None if there may be one."""
    if work.dtype not in HALF_DTYPES:
        return f"dtype is {work.dtype}, family {FAMILY!r} takes {' and '.join(HALF_DTYPES)}"
    for name, value in (("head_dim", work.head_dim), ("v_dim", work.v_dim)):
        if value % 2 or value > MOST_FEATURES:
            most = f"even widths up to {MOST_FEATURES}"
            return f"{name} is {value}, family {FAMILY!r} takes {most}"
    lacking = lacks_instructions(work.dtype, dev)
    return f"family {FAMILY!r} {lacking}" if lacking else None


def candidates(work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield plans for `work`, which may not all fit; of equal prices, the first is to be taken."""
    if unsupported(work, dev) is not None:
        return
    lanes = copy_lanes(work)
    for block_m, reg_m in TILES:
        for block_n in KEYS:
            few = block_m <= FEW_ROWS
            for stages, parts in product(STAGES, PARTS) if few else ((LEAST_STAGES, 1),):
                yield TilePlan(
                    *(block_m, block_n, work.head_dim),
                    reg_m=reg_m,
                    reg_n=block_n,
                    lanes=lanes,
                    split_k=parts,
                    num_stages=stages,
                    num_warps=block_m // reg_m,
                    family=FAMILY,
                )


def copy_lanes(work: Attention) -> int:
    """Return the elements of one copy: as many as divide both widths, which are even."""
    most = PIECE_BYTES // DTYPE_BYTES[work.dtype]
    return next(n for n in (most, most // 2, 2) if not (work.head_dim % n or work.v_dim % n))


def violations(plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
    """Yield what is wrong with `plan`, besides the limits of the device."""
    family = f"family {plan.family!r}"
    for name in ("block_m", "block_n", "reg_m", "reg_n"):
        if getattr(plan, name) % WARP_TILE:
            yield f"{name} is {getattr(plan, name)}, {family} takes multiples of {WARP_TILE}"
    if plan.reg_n != plan.block_n:
        yield f"reg_n is {plan.reg_n}, a warp of {family} takes all {plan.block_n} keys of a block"
    if plan.num_stages < LEAST_STAGES:
        yield f"num_stages is {plan.num_stages}, {family} needs {LEAST_STAGES}"
    warps = plan.block_m // plan.reg_m
    if plan.num_warps != warps:
        yield f"num_warps is {plan.num_warps}, {plan.block_m} rows of {plan.reg_m} make {warps}"
    if plan.lanes < 2:
        yield f"lanes is {plan.lanes}, {family} copies 2 elements at least"
