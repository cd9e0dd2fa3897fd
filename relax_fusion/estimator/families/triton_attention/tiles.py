"""What a tile of attention's Triton kernels holds, and how many of them a launch has.

Shared memory, registers, the thread blocks that fit a multiprocessor at once, and the parts into
which keys are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil

from ....hardware import DeviceSpec
from ....validation import Count
from ....workload import DTYPE_BYTES, Attention
from ...prediction import ceil_div
from ...shape import AttentionSize
from ...tile_plan import TilePlan

FAMILIES = ("attention", "flash", "groups", "halves")

MAPPED_FAMILIES = ("flash", "halves")
"""Families that get queries, keys and values as tensor maps."""

FEW_SCORES = 2048
"""Scores of a block up to which the pointer kernel is bound by memory, and written for that."""

SMEM_RESERVE_BYTES = {"attention": 1 << 10, "flash": 2 << 10, "groups": 1 << 10, "halves": 1 << 10}
"""Shared memory beside queries and stages: layout conversions, barriers."""

MAPPED_KEYS = 8
"""What the keys must be a multiple of for a bias to have a tensor map."""

HALVES_BLOCKS = 4
"""Steps that the two warp groups of `halves` take together."""

FLASH_ROWS = 128
"""Rows of the flash tiles."""

REGISTERS, REGISTERS_PER_VALUE, REGISTERS_PER_LOADED = 40, 1.1, 0.5
"""Registers of a thread in a pointer tile: addresses and the like, for each score and result, and
for each element of a block of keys and values that it copies.  Read in what Triton 3.7 compiled for
sm_90a; that is within 20 % of them."""

OTHER_REGISTERS = 32
"""The same beside scores and results in the other families."""

FEW_MERGED_ROWS = 64
"""Rows of parts up to which the keys are cut for two programs a multiprocessor, of which one loads
while the other computes.  With more, merging them costs what that gains: measured on an H200 at
batch 8, 4096 keys, 45.4 us instead of 38.7."""


@dataclass(frozen=True)
class AttentionPlan(TilePlan):
    """Tile sizes of one of attention's Triton kernels."""

    groups: Count = 1
    """Groups of warps among which a program of "groups" or "halves" has the keys; they add up their
    results."""

    @property
    def text(self) -> str:
        """The tile for people to read, with the kernel family, parts and groups."""
        return super().text + (f", {self.groups} groups" if self.groups > 1 else "")


@cache
def padded(features: int) -> int:
    """Return the width of a tile of `features`: a power of two that a matrix instruction takes."""
    return max(16, 1 << (features - 1).bit_length())


def two_tiles(features: int) -> int:
    """Return the width of `features` as `groups` has them: powers of two, the rest apart."""
    low = 1 << (features.bit_length() - 1)
    return low + (padded(features - low) if features > low else 0)


def multiplied(features: int, family: str) -> int:
    """Return the width that matrix units multiply: past 64 features, "flash" cuts a tile in two."""
    in_two = family == "flash" and features > 64
    return two_tiles(features) if in_two else padded(features)


def heads_of_tile(plan: TilePlan, work: Attention) -> int:
    """Return the query heads whose rows share a tile, and the keys that it reads."""
    return 1 if plan.family in MAPPED_FAMILIES else work.q_heads // work.kv_heads


def capacity(plan: AttentionPlan) -> int | None:
    """Return the keys that a kernel can have which holds all of them at once; None for others."""
    blocks = {"groups": plan.groups, "halves": HALVES_BLOCKS}
    return blocks[plan.family] * plan.block_n if plan.family in blocks else None


def row_tiles(plan: TilePlan, work: Attention, q_len: int) -> int:
    """Return the tiles of rows of one batch entry and head, or group of heads."""
    return ceil_div(q_len * heads_of_tile(plan, work), plan.block_m)


def key_parts(plan: TilePlan, work: Attention, dev: DeviceSpec, size: AttentionSize) -> int:
    """Return the parts into which the keys are cut: as many as fill the device."""
    if plan.family != "attention" or plan.split_k == 1:
        return 1
    heads = work.q_heads // heads_of_tile(plan, work)
    tiles = size.batch * heads * row_tiles(plan, work, size.q_len)
    keys = size.kv_len
    if work.window is not None and work.causal != "none":
        keys = min(keys, size.q_len + work.window - 1)  # those that a query sees, of all of them
    most = min(plan.split_k, ceil_div(keys, plan.block_n))
    wanted = programs_wanted(size.batch * work.q_heads * size.q_len, dev)
    return max(1, min(wanted // max(tiles, 1), most))


def programs_wanted(rows: int, dev: DeviceSpec) -> int:
    """Return the programs that the keys are cut for, if there are so many rows to merge."""
    return dev.sm_count * (2 if rows <= FEW_MERGED_ROWS else 1)


def smem_bytes(plan: AttentionPlan, work: Attention, dev: DeviceSpec) -> int:
    """Return the shared memory of one thread block: queries, stages of keys and values, rest."""
    if plan.family == "groups":
        each = 4 * two_tiles(work.v_dim) + 8  # results, highest score and sum of a row
        return plan.groups * plan.block_m * each + SMEM_RESERVE_BYTES[plan.family]
    width, v_width = padded(work.head_dim), padded(work.v_dim)
    stages, rest = plan.num_stages, 0
    if plan.family == "halves":
        queries, stages, rest = 1, HALVES_BLOCKS, 64 * (4 * v_width + 8)
    elif plan.family == "flash":
        queries, rest = query_stages(plan, work), 64 * max(v_width, 128)  # results on their way out
        rest += plan.block_m * plan.block_n if bias_tiles(plan, work) else 0
    elif warp_groups(plan, dev):
        queries = stages if few_scores(plan) else 1
    else:
        stages -= 1  # the operands of these instructions pass through registers
        queries = stages if few_scores(plan) else 1
        # Weights change their layout on the way to the next product; scores, to meet a mask
        rest = plan.block_m * plan.block_n * (2 if work.mask_dims and work.mask_dims[3] else 1)
    elements = queries * plan.block_m * width + stages * plan.block_n * (width + v_width) + rest
    used = elements * DTYPE_BYTES[work.dtype] + SMEM_RESERVE_BYTES[plan.family]
    if plan.family == "attention":  # what is read for each score is copied ahead, too
        used += (plan.num_stages - 1) * plan.block_m * plan.block_n * _bytes_per_score(work)
    return used


def _bytes_per_score(work: Attention) -> int:
    """Return the bytes of bias and mask for each score, where they have the keys' dimension."""
    bias = DTYPE_BYTES[work.bias_dtype] if work.bias_dims and work.bias_dims[3] else 0
    return bias + (1 if work.mask_dims and work.mask_dims[3] else 0)


def few_scores(plan: TilePlan) -> bool:
    """Tell whether a pointer tile reads its queries along with every block of keys."""
    return plan.block_m * plan.block_n <= FEW_SCORES


def query_stages(plan: TilePlan, work: Attention) -> int:
    """Return how many tiles of queries `flash` holds: the next one's, too, where they fit."""
    return 2 if padded(work.head_dim) <= 128 and not bias_tiles(plan, work) else 1


def bias_tiles(plan: TilePlan, work: Attention) -> bool:
    """Tell whether `flash` copies tiles of a bias, instead of loading what each score needs.

    They must fit beside keys and values.  The copy engine takes rows of multiples of 16 bytes;
    where the number of keys is not known, that is seen at run time.
    """
    dims = work.bias_dims
    if plan.family != "flash" or dims is None or not (dims[2] and dims[3]) or work.kv_prefix:
        return False
    if DTYPE_BYTES[work.bias_dtype] != 2 or max(padded(work.head_dim), padded(work.v_dim)) > 128:
        return False
    return not isinstance(work.kv_len, int) or work.kv_len % MAPPED_KEYS == 0


def warp_groups(plan: TilePlan, dev: DeviceSpec) -> bool:
    """Tell whether a tile is multiplied by the instructions of warp groups, from shared memory."""
    return dev.capabilities.warp_group_mma and plan.block_m >= 64


def register_values(plan: TilePlan, work: Attention) -> int:
    """Return the registers of scores and results, and of weights beside them, in one thread."""
    if plan.family in MAPPED_FAMILIES:
        return multiplied(work.v_dim, plan.family) // 2 + plan.block_n * 3 // 4
    if plan.family == "groups":
        width, v_width = two_tiles(work.head_dim), two_tiles(work.v_dim)
        loaded = (plan.block_m + plan.block_n) * width + plan.block_n * v_width
        return loaded // 64 + plan.block_m * plan.block_n // 32
    values = plan.block_m * (plan.block_n + padded(work.v_dim))
    return ceil_div(values, 32 * max(plan.num_warps, 1))


def resident(plan: AttentionPlan, work: Attention, dev: DeviceSpec) -> int:
    """Return how many thread blocks a multiprocessor holds at once."""
    if plan.family == "flash":
        return 1  # its threads have all registers
    threads = 32 * plan.num_warps
    by_smem = dev.smem_per_sm_bytes // max(1, smem_bytes(plan, work, dev))
    by_registers = dev.registers_per_sm // (_registers(plan, work, dev) * threads)
    return max(1, min(by_smem, by_registers, dev.max_threads_per_sm // threads))


def _registers(plan: TilePlan, work: Attention, dev: DeviceSpec) -> int:
    """Return the registers of a thread; warps get them in eights."""
    values = register_values(plan, work)
    if plan.family == "attention":
        loaded = plan.block_n * (padded(work.head_dim) + padded(work.v_dim)) / (32 * plan.num_warps)
        found = REGISTERS + REGISTERS_PER_VALUE * values + REGISTERS_PER_LOADED * loaded
    else:
        found = OTHER_REGISTERS + values
    return min(8 * ceil(found / 8), dev.max_registers_per_thread)
