"""Plans of the Triton back end for attention: which there are, and which fit.

Families, by the kernels of `relax_fusion.triton_bridge.kernels`:

``pointer``  any device, lengths and head widths; query heads that share keys are rows of one tile,
             and a few queries over many keys have the keys cut into parts
``flash``    many queries on sm_90: a warp that copies, and two warp groups of 64 rows each
``groups``   short sequences on sm_90: all keys at once, `split_k` groups of `block_n`, a warp for
             each; they add up their results in shared memory
``halves``   the same with more rows: 64 of one head, and two warp groups that share the keys

`triton_attention_cost` prices them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..device import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import DTYPE_BYTES, Attention
from .prediction import HALF_DTYPES, ceil_div
from .shape import AttentionSize
from .triton import triton_plan

FAMILIES = ("pointer", "flash", "groups", "halves")

HOPPER_FAMILIES = ("flash", "groups", "halves")
"""Families that are written for sm_90."""

MAPPED_FAMILIES = ("flash", "halves")
"""Families that get queries, keys and values as tensor maps."""

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
"""Features of a head that a matrix instruction takes, and up to which tiles fit the registers."""

MAX_REGISTER_VALUES = {"pointer": 208, "flash": 180, "groups": 264, "halves": 180}
"""Scores, weights and results of a thread, in registers, beyond which they spill."""

FEW_SCORES = 2048
"""Scores of a block up to which the pointer kernel is bound by memory, and written for that."""

SMEM_RESERVE_BYTES = {"pointer": 1 << 10, "flash": 2 << 10, "groups": 1 << 10, "halves": 1 << 10}
"""Shared memory beside queries and stages: layout conversions, barriers."""

FEW_MERGED_ROWS = 64
"""Rows of parts up to which the keys are cut for two programs a multiprocessor, of which one loads
while the other computes.  With more, merging them costs what that gains: measured on an H200 at
batch 8, 4096 keys, 45.4 us instead of 38.7."""

POINTER_TILES = {
    **{(block_m, 64): (4, 3, 2) for block_m in (16, 32, 64, 128)},
    **{(block_m, 128): (3, 2) for block_m in (16, 32, 64, 128)},
    **{(block_m, 32): (4, 2) for block_m in (16, 32, 64, 128)},
}
"""Stages by rows and keys of the pointer tiles; for one query, 16 x 64 with 4 measured best."""

HALVES_KEYS, HALVES_BLOCKS = (128, 64), 4
"""Keys of a step of `halves`, and how many steps its two warp groups take together."""

FLASH_ROWS, FLASH_WARPS = 128, 12
"""Rows of the flash tiles, and their warps, of which four copy."""

FLASH_TILES = ((128, 3), (128, 2), (64, 4), (64, 2))
"""Keys and stages of the flash tiles."""

PARTS = (1, 32, 128)
"""Parts that keys are cut into at most.  One program puts those of a row together, and is compiled
for as many."""

GROUP_TILES = ((32, 64, 4), (16, 64, 4), (16, 64, 8), (16, 32, 8))
"""Rows, keys of a group, and groups of the tiles for short sequences."""


def unsupported(work: Attention, dev: DeviceSpec) -> str | None:
    """Return why the Triton kernels cannot compute `work` on `dev`; None if they can."""
    if dev.kind == "cpu":
        return "backend is 'triton', a CPU has 'tir' only"
    if work.dtype not in HALF_DTYPES:
        return f"dtype is {work.dtype}, the Triton kernels take {' and '.join(HALF_DTYPES)}"
    if not dev.tensor_flops_per_s(work.dtype):
        return f"the {dev.label} has no tensor cores for {work.dtype}"
    for name, value in (("head_dim", work.head_dim), ("v_dim", work.v_dim)):
        if not MIN_HEAD_DIM <= value <= MAX_HEAD_DIM:
            return f"{name} is {value}, the Triton kernels take {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    return None


def padded(features: int) -> int:
    """Return the width of a tile of `features`: a power of two that a matrix instruction takes."""
    return max(16, 1 << (features - 1).bit_length())


def two_tiles(features: int) -> int:
    """Return the width of `features` as `groups` has them: powers of two, the rest apart."""
    low = 1 << (features.bit_length() - 1)
    return low + (padded(features - low) if features > low else 0)


def heads_of_tile(plan: TilePlan, work: Attention) -> int:
    """Return the query heads whose rows share a tile, and the keys that it reads."""
    return 1 if plan.family in MAPPED_FAMILIES else work.q_heads // work.kv_heads


def capacity(plan: TilePlan) -> int | None:
    """Return the keys that a kernel can have which holds all of them at once; None for others."""
    blocks = {"groups": plan.split_k, "halves": HALVES_BLOCKS}
    return blocks[plan.family] * plan.block_n if plan.family in blocks else None


def row_tiles(plan: TilePlan, work: Attention, q_len: int) -> int:
    """Return the tiles of rows of one batch entry and head, or group of heads."""
    return ceil_div(q_len * heads_of_tile(plan, work), plan.block_m)


def key_parts(plan: TilePlan, work: Attention, dev: DeviceSpec, size: AttentionSize) -> int:
    """Return the parts into which the keys are cut: as many as fill the device."""
    if plan.family != "pointer" or plan.split_k == 1:
        return 1
    heads = work.q_heads // heads_of_tile(plan, work)
    tiles = size.batch * heads * row_tiles(plan, work, size.q_len)
    most = min(plan.split_k, ceil_div(size.kv_len, plan.block_n))
    wanted = programs_wanted(size.batch * work.q_heads * size.q_len, dev)
    return max(1, min(wanted // max(tiles, 1), most))


def programs_wanted(rows: int, dev: DeviceSpec) -> int:
    """Return the programs that the keys are cut for, if there are so many rows to merge."""
    return dev.sm_count * (2 if rows <= FEW_MERGED_ROWS else 1)


def candidates(work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield plans that fit `work` on `dev`; none where no kernel computes it."""
    if unsupported(work, dev) is None:
        for plan in _all(work):
            if next(violations(plan, work, dev), None) is None:
                yield plan


def _all(work: Attention) -> Iterator[TilePlan]:
    width = padded(work.head_dim)
    for block_m, block_n, groups in GROUP_TILES:
        yield triton_plan("groups", (block_m, block_n, width), groups, 1, groups)
    if _is_plain(work):
        for block_n in HALVES_KEYS:
            if work.kv_len == HALVES_BLOCKS * block_n:
                yield triton_plan("halves", (64, block_n, width), 8, 2, 2)
    for block_n, stages in FLASH_TILES:
        yield triton_plan("flash", (FLASH_ROWS, block_n, width), FLASH_WARPS, stages)
    for (block_m, block_n), depths in POINTER_TILES.items():
        for stages, parts in product(depths, PARTS):
            warps = 8 if block_m == 128 else 4
            yield triton_plan("pointer", (block_m, block_n, width), warps, stages, parts)


def _is_plain(work: Attention) -> bool:
    """Tell whether nothing is done to scores, of heads of 64 features that share no keys.

    `halves` was run for such workloads only.
    """
    modified = (work.bias_dims, work.mask_dims, work.window, work.softcap, work.alibi, work.sinks)
    usual = work.q_heads == work.kv_heads and work.head_dim == work.v_dim == 64
    return usual and work.causal == "none" and all(given is None for given in modified)


def smem_bytes(plan: TilePlan, work: Attention, dev: DeviceSpec) -> int:
    """Return the shared memory of one thread block: queries, stages of keys and values, rest."""
    if plan.family == "groups":
        each = 4 * two_tiles(work.v_dim) + 8  # results, highest score and sum of a row
        return plan.split_k * plan.block_m * each + SMEM_RESERVE_BYTES[plan.family]
    width, v_width = padded(work.head_dim), padded(work.v_dim)
    stages, rest = plan.num_stages, 0
    if plan.family == "halves":
        queries, stages, rest = 1, HALVES_BLOCKS, 64 * (4 * v_width + 8)
    elif plan.family == "flash":
        queries, rest = query_stages(work), 64 * max(v_width, 128)  # results on their way out
    elif _warp_groups(plan, dev):
        queries = stages if few_scores(plan) else 1
    else:
        stages -= 1  # the operands of these instructions pass through registers
        queries = stages if few_scores(plan) else 1
        # Weights change their layout on the way to the next product; scores, to meet a mask
        rest = plan.block_m * plan.block_n * (2 if work.mask_dims and work.mask_dims[3] else 1)
    elements = queries * plan.block_m * width + stages * plan.block_n * (width + v_width) + rest
    used = elements * DTYPE_BYTES[work.dtype] + SMEM_RESERVE_BYTES[plan.family]
    if plan.family == "pointer":  # what is read for each score is copied ahead, too
        used += (plan.num_stages - 1) * plan.block_m * plan.block_n * _bytes_per_score(work)
    return used


def _bytes_per_score(work: Attention) -> int:
    """Return the bytes of bias and mask for each score, where they have the keys' dimension."""
    bias = DTYPE_BYTES[work.bias_dtype] if work.bias_dims and work.bias_dims[3] else 0
    return bias + (1 if work.mask_dims and work.mask_dims[3] else 0)


def few_scores(plan: TilePlan) -> bool:
    """Tell whether a pointer tile reads its queries along with every block of keys."""
    return plan.block_m * plan.block_n <= FEW_SCORES


def query_stages(work: Attention) -> int:
    """Return how many tiles of queries `flash` holds: the next one's, too, where they fit."""
    return 2 if padded(work.head_dim) <= 128 else 1


def _warp_groups(plan: TilePlan, dev: DeviceSpec) -> bool:
    """Tell whether a tile is multiplied by the instructions of warp groups, from shared memory."""
    return dev.arch.startswith("sm_90") and plan.block_m >= 64


def register_values(plan: TilePlan, work: Attention) -> int:
    """Return the registers of scores and results, and of weights beside them, in one thread."""
    if plan.family in MAPPED_FAMILIES:
        return padded(work.v_dim) // 2 + plan.block_n * 3 // 4
    if plan.family == "groups":
        width, v_width = two_tiles(work.head_dim), two_tiles(work.v_dim)
        loaded = (plan.block_m + plan.block_n) * width + plan.block_n * v_width
        return loaded // 64 + plan.block_m * plan.block_n // 32
    values = plan.block_m * (plan.block_n + padded(work.v_dim))
    return ceil_div(values, 32 * max(plan.num_warps, 1))


def violations(plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
    """Yield why `plan` cannot run `work` on `dev`, one sentence each, with both numbers."""
    reason = unsupported(work, dev)
    if reason is not None:
        yield reason
        return
    if plan.family not in FAMILIES:
        yield f"family is {plan.family!r}, attention has {', '.join(FAMILIES)}"
        return
    if plan.family in HOPPER_FAMILIES:
        yield from _hopper_violations(plan, work, dev)
    else:
        yield from _powers_of_two(plan, ("block_m", "num_warps"))
    yield from _powers_of_two(plan, ("block_n",))
    keys = capacity(plan)
    most_keys = work.kv_len if isinstance(work.kv_len, int) else work.kv_len.upper
    if keys is not None and (most_keys is None or most_keys > keys):
        there = "without a bound" if most_keys is None else f"up to {most_keys}"
        yield f"the tile holds {keys} keys at once, there are keys {there}"
    if plan.block_k != padded(work.head_dim):
        yield (
            f"block_k is {plan.block_k}, a tile holds all {work.head_dim} of head_dim, padded to "
            f"{padded(work.head_dim)}"
        )
    used, most = smem_bytes(plan, work, dev), dev.smem_per_block_bytes
    if used > most:
        yield f"needs {used} B of shared memory, the {dev.label} has {most} B per block"
    values, limit = register_values(plan, work), MAX_REGISTER_VALUES[plan.family]
    if values > limit:
        yield f"a thread holds {values} scores and results, at most {limit} fit its registers"


def _powers_of_two(plan: TilePlan, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value, least = getattr(plan, name), 1 if name == "num_warps" else 16
        if value < least or value & (value - 1):
            yield f"{name} is {value}, triton needs a power of two >= {least}"


def _hopper_violations(plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
    """Check what the kernels for Hopper must meet."""
    if not dev.arch.startswith("sm_90"):
        yield f"family {plan.family!r} needs sm_90, the {dev.label} is {dev.arch}"
    for name, features in (("head_dim", work.head_dim), ("v_dim", work.v_dim)):
        if features % 8:
            yield f"{name} is {features}, rows of a tensor map must be multiples of 8 elements"
    if plan.family == "groups":
        yield from _groups_violations(plan, work)
    else:
        yield from _warp_group_violations(plan, work)


def _warp_group_violations(plan: TilePlan, work: Attention) -> Iterator[str]:
    given = {"block_m": FLASH_ROWS, "num_warps": FLASH_WARPS, "split_k": 1}
    if plan.family == "halves":
        given = {"block_m": 64, "num_warps": 8, "split_k": 2, "num_stages": 2}
        most = 64 if work.bias_dims or work.mask_dims else 128
        if plan.block_n > most:
            yield f"block_n is {plan.block_n}, family 'halves' has up to {most} for this"
    for name, value in given.items():
        if getattr(plan, name) != value:
            yield f"{name} is {getattr(plan, name)}, family {plan.family!r} has {value}"
    if work.kv_len == 0:
        yield "kv_len is 0, a tensor map needs 1 key"


def _groups_violations(plan: TilePlan, work: Attention) -> Iterator[str]:
    yield from _powers_of_two(plan, ("block_m", "num_warps"))
    if plan.split_k not in (4, 8, 16):
        yield f"split_k is {plan.split_k}, family 'groups' has 4, 8 or 16 groups"
    if plan.num_warps != plan.split_k:
        yield f"num_warps is {plan.num_warps}, {plan.split_k} groups have a warp each"
    for name, features in (("head_dim", work.head_dim), ("v_dim", work.v_dim)):
        if features > 128:
            yield f"{name} is {features}, family 'groups' takes up to 128"
