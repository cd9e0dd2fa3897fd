"""Plans of the Triton back end for attention: which there are, and which fit.

Families, by the kernels of `relax_fusion.triton_bridge.kernels`:

``pointer``  any device, lengths and head widths; query heads that share keys are rows of one tile,
             and a few queries over many keys have the keys cut into parts
``flash``    many queries on sm_90: a warp that copies, and two warp groups of 64 rows each
``groups``   short sequences on sm_90: all keys at once, `split_k` groups of `block_n`, a warp or
             more for each; they add up their results in shared memory

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

FAMILIES = ("pointer", "flash")

HOPPER_FAMILIES = ("flash",)
"""Families that are written for sm_90."""

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
"""Features of a head that a matrix instruction takes, and up to which tiles fit the registers."""

MAX_REGISTER_VALUES = {"pointer": 208, "flash": 180, "groups": 264}
"""Scores, weights and results of a thread, in registers, beyond which they spill."""

SMEM_RESERVE_BYTES = {"pointer": 4 << 10, "flash": 2 << 10, "groups": 1 << 10}
"""Shared memory beside queries and stages: layout conversions, barriers."""

PROGRAMS_PER_SM = 2
"""Programs a multiprocessor that the keys are cut into parts for: so many fit at once, and one
loads while the other computes."""

POINTER_TILES = (
    *((16, block_n, 4) for block_n in (64, 128, 32)),
    *((block_m, block_n, 4) for block_m, block_n in product((32, 64), (64, 32, 128))),
    *((128, block_n, 8) for block_n in (64, 128, 32)),
)
"""Rows, keys and warps of the pointer tiles."""

FLASH_ROWS, FLASH_WARPS = 128, 12
"""Rows of the flash tiles, and their warps, of which four copy."""

FLASH_TILES = ((128, 3), (128, 2), (64, 4), (64, 2))
"""Keys and stages of the flash tiles."""

MOST_PARTS = 64
"""Parts that keys are cut into at most; one program puts them together."""


GROUP_TILES = (
    *((32, 64, 4), (16, 64, 4), (16, 32, 8), (32, 32, 8), (16, 64, 8), (32, 64, 8), (64, 32, 8)),
    *((16, 16, 16), (32, 32, 16), (16, 32, 16)),
)
"""Rows, keys of a group, and groups of the tiles for short sequences, a warp for each group."""


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
    return 1 if plan.family == "flash" else work.q_heads // work.kv_heads


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
    return max(1, min(dev.sm_count * PROGRAMS_PER_SM // max(tiles, 1), most))


def candidates(work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield plans that fit `work` on `dev`; none where no kernel computes it."""
    if unsupported(work, dev) is None:
        for plan in _all(work):
            if next(violations(plan, work, dev), None) is None:
                yield plan


def _all(work: Attention) -> Iterator[TilePlan]:
    width = padded(work.head_dim)
    for block_n, stages in FLASH_TILES:
        yield _plan("flash", (FLASH_ROWS, block_n, width), FLASH_WARPS, stages)
    for (block_m, block_n, warps), stages in product(POINTER_TILES, (4, 3, 2)):
        for parts in (1, MOST_PARTS):
            yield _plan("pointer", (block_m, block_n, width), warps, stages, parts)


def _plan(
    family: str, block: tuple[int, int, int], warps: int, stages: int, parts: int = 1
) -> TilePlan:
    return TilePlan(
        *block,
        split_k=parts,
        num_stages=stages,
        num_warps=warps,
        backend="triton",
        family=family,
    )


def smem_bytes(plan: TilePlan, work: Attention, dev: DeviceSpec) -> int:
    """Return the shared memory of one thread block: queries, stages of keys and values, rest."""
    if plan.family == "groups":
        each = 4 * two_tiles(work.v_dim) + 8  # results, highest score and sum of a row
        return plan.split_k * plan.block_m * each + SMEM_RESERVE_BYTES[plan.family]
    width, v_width = padded(work.head_dim), padded(work.v_dim)
    stages = plan.num_stages
    if plan.family == "pointer" and not _warp_groups(plan, dev):
        stages -= 1  # the operands of the others pass through registers, which frees theirs
    rows = plan.block_m * (query_stages(work) if plan.family == "flash" else 1)
    elements = rows * width + stages * plan.block_n * (width + v_width)
    if plan.family == "flash":
        elements += 64 * v_width  # results on their way out
    return elements * DTYPE_BYTES[work.dtype] + SMEM_RESERVE_BYTES[plan.family]


def query_stages(work: Attention) -> int:
    """Return how many tiles of queries `flash` holds: the next one's, too, where they fit."""
    return 2 if padded(work.head_dim) <= 128 else 1


def _warp_groups(plan: TilePlan, dev: DeviceSpec) -> bool:
    """Tell whether a tile is multiplied by the instructions of warp groups, from shared memory."""
    return dev.arch.startswith("sm_90") and plan.block_m >= 64


def register_values(plan: TilePlan, work: Attention) -> int:
    """Return the registers of scores and results, and of weights beside them, in one thread."""
    if plan.family == "flash":
        return padded(work.v_dim) // 2 + plan.block_n * 3 // 4
    if plan.family == "groups":
        rows = plan.block_m * plan.split_k // max(plan.num_warps, 1)
        width, v_width = two_tiles(work.head_dim), two_tiles(work.v_dim)
        loaded = (rows + plan.block_n) * width + plan.block_n * v_width
        return loaded // 64 + rows * plan.block_n // 32
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
        return
    given = {"block_m": FLASH_ROWS, "num_warps": FLASH_WARPS, "split_k": 1}
    for name, value in given.items():
        if getattr(plan, name) != value:
            yield f"{name} is {getattr(plan, name)}, family 'flash' has {value}"
    if work.kv_len == 0:
        yield "kv_len is 0, a tensor map needs 1 key"


def _groups_violations(plan: TilePlan, work: Attention) -> Iterator[str]:
    yield from _powers_of_two(plan, ("block_m", "num_warps"))
    row_warps = plan.num_warps // plan.split_k
    if plan.num_warps % plan.split_k or plan.block_m % (16 * max(row_warps, 1)):
        yield (
            f"num_warps is {plan.num_warps}, {plan.split_k} groups have as many warps each, with "
            "16 rows or a multiple for each warp"
        )
    most = work.kv_len if isinstance(work.kv_len, int) else work.kv_len.upper
    keys = plan.split_k * plan.block_n
    if most is None or most > keys:
        there = "without a bound" if most is None else f"up to {most}"
        yield f"the tile holds {keys} keys at once, there are keys {there}"
    for name, features in (("head_dim", work.head_dim), ("v_dim", work.v_dim)):
        if features > 128:
            yield f"{name} is {features}, family 'groups' takes up to 128"
