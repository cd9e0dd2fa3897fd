"""Plans of the Triton back end for attention: which there are, and which fit.

Families, by the kernels of `relax_fusion.triton_bridge.kernels`:

``pointer``  any device, lengths and head widths; query heads that share keys are rows of one tile,
             and a few queries over many keys have the keys cut into parts
``flash``    many queries on sm_90: a warp that copies, and two warp groups of 64 rows each
``groups``   short sequences on sm_90: all keys at once, `groups` groups of `block_n`, a warp for
             each; they add up their results in shared memory
``halves``   the same with more rows: 64 of one head, and two warp groups that share the keys

`cost` has the terms of their price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ....hardware import DeviceSpec
from ....hardware.instructions import MMA
from ....workload import Attention
from ...family import Breaks, KernelFamily, Offer
from ...limits import GRID_YZ, grid_limits
from ...prediction import HALF_DTYPES, Bound, Footprint, Formula, Prediction, ceil_div, largest
from ...shape import AttentionSize, Problem, Size, attention_qo_bytes, attention_size
from ...tile_plan import TilePlan
from . import cost, tiles

HOPPER_FAMILIES = ("flash", "groups", "halves")
"""Families that are written for sm_90."""

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
"""Features of a head that a matrix instruction takes, and up to which tiles fit the registers."""

MAX_REGISTER_VALUES = {"attention": 208, "flash": 180, "groups": 264, "halves": 180}
"""Scores, weights and results of a thread, in registers, beyond which they spill."""

POINTER_TILES = {
    **{(block_m, 64): (4, 3, 2) for block_m in (16, 32, 64, 128)},
    **{(block_m, 128): (3, 2) for block_m in (16, 32, 64, 128)},
    **{(block_m, 32): (4, 2) for block_m in (16, 32, 64, 128)},
}
"""Stages by rows and keys of the pointer tiles."""

UNEVEN = (16, 32)
"""This tile is not for numbers of keys that a tensor tells, which are seldom round: up to 6 %
faster than blocks of 64 keys at round ones, it measured 40 % slower at 1025, where one of 32
programs had two blocks."""

HALVES_KEYS = (128, 64)
"""Keys of a step of `halves`."""

FLASH_WARPS = 12
"""Warps of the flash tiles, of which four copy."""

FLASH_TILES = ((128, 3), (128, 2), (64, 4), (64, 2))
"""Keys and stages of the flash tiles."""

PARTS, WORTH_MORE_PARTS = (1, 32, 128), 1.25
"""Parts that keys are cut into at most.  One program puts those of a row together, and is compiled
for as many.  And by what factor there must be more of them for a higher bound to be looked at."""

MANY_KEYS = 1 << 20
"""Keys where no bound is known: more than any device cuts."""

HALVES = 2
"""Warp groups of `halves`."""

GROUP_TILES = ((32, 64, 4), (16, 64, 4), (16, 64, 8), (16, 32, 8))
"""Rows, keys of a group, and groups of the tiles for short sequences."""


class TritonAttention(KernelFamily[Attention]):
    """Attention: "attention", "flash", "groups" and "halves"."""

    names = tiles.FAMILIES
    plan = tiles.AttentionPlan
    language = "triton"
    error = 0.9
    breaks = Breaks((1, 16, 64, 256, 512, 1024), 4096)

    def takes(self, problem: Problem[Any]) -> bool:
        """Take all whose keys are one tensor."""
        return problem.is_plain("gpu", Attention) and not problem.work.shared

    def refuses(self, problem: Problem[Attention]) -> str | None:
        """Refuse dtypes, features and devices that the kernels are not for."""
        work, dev = problem.work, problem.dev
        if work.dtype not in HALF_DTYPES:
            return f"dtype is {work.dtype}, the Triton kernels take {' and '.join(HALF_DTYPES)}"
        if MMA[work.dtype] not in dev.capabilities.matrix_instructions:
            return f"the {dev.label} has no tensor cores for {work.dtype}"
        for name, value in (("head_dim", work.head_dim), ("v_dim", work.v_dim)):
            if not MIN_HEAD_DIM <= value <= MAX_HEAD_DIM:
                return (
                    f"{name} is {value}, the Triton kernels take {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
                )
        return None

    def plans(self, problem: Problem[Attention]) -> Iterator[Offer]:
        """Yield the plans of all kernels."""
        group = problem.work.q_heads // problem.work.kv_heads
        for plan in _plans(problem.work, problem.dev):
            yield Offer(plan, most=GRID_YZ * plan.block_m // group)

    def violations(self, plan: TilePlan, problem: Problem[Attention]) -> Iterator[str]:
        """Yield what tiles and copies ask for, and what a block has not."""
        work, dev, plan = problem.work, problem.dev, tiles.AttentionPlan.of(plan)
        if plan.family in HOPPER_FAMILIES:
            if work.lengths is not None:
                yield f"family {plan.family!r} is told a number of keys, not a tensor of them"
            yield from _hopper_violations(plan, work, dev)
        else:
            yield from _powers_of_two(plan, ("block_m", "num_warps"))
            if plan.groups != 1:
                yield f"groups is {plan.groups}, family {plan.family!r} has 1"
        yield from _powers_of_two(plan, ("block_n",))
        keys = tiles.capacity(plan)
        most_keys = work.kv_len if isinstance(work.kv_len, int) else work.kv_len.upper
        if keys is not None and (most_keys is None or most_keys > keys):
            there = "without a bound" if most_keys is None else f"up to {most_keys}"
            yield f"the tile holds {keys} keys at once, there are keys {there}"
        if plan.block_k != tiles.padded(work.head_dim):
            yield (
                f"block_k is {plan.block_k}, a tile holds all {work.head_dim} of head_dim, "
                f"padded to {tiles.padded(work.head_dim)}"
            )
        group, used = work.q_heads // work.kv_heads, tiles.smem_bytes(plan, work, dev)
        most = dev.smem_per_block_bytes
        if used > most:
            yield f"needs {used} B of shared memory, the {dev.label} has {most} B per block"
        values, limit = tiles.register_values(plan, work), MAX_REGISTER_VALUES[plan.family]
        if values > limit:
            yield f"a thread holds {values} scores and results, at most {limit} fit its registers"

        yield from grid_limits(
            {
                "the query positions": ceil_div((problem.most or 0) * group, plan.block_m),
                "the heads": work.q_heads,
            }
        )

    def price(self, plan: TilePlan, problem: Problem[Attention]) -> Formula:
        """Return a price by a model that was fitted to these kernels."""
        work, dev, plan = problem.work, problem.dev, tiles.AttentionPlan.of(plan)
        values, threads = tiles.register_values(plan, work), plan.num_warps * dev.warp_size
        foot = Footprint(tiles.smem_bytes(plan, work, dev), values, threads)
        return Formula(foot, partial(_predict, plan, work, dev))


def _predict(plan: tiles.AttentionPlan, work: Attention, dev: DeviceSpec, of: Size) -> Prediction:
    """Return what the launches cost."""
    size = attention_size(work, of)
    load = cost.load(work, plan, dev, size)
    moved = attention_qo_bytes(work, size) + cost.kv_bytes(work, size)
    times: dict[Bound, float] = {"dram": moved / (dev.dram_bytes_per_s * dev.read_part)}
    launch = dev.launch_s + cost.FILL_S[plan.family]
    if plan.family in cost.SHORT_S_PER_SCORE:
        at_once = min(load.resident, ceil_div(load.programs, dev.sm_count))
        times["latency"] = load.rounds * at_once * cost.short_s(work, plan)
        launch += (load.rounds - 1) * cost.FILL_S[plan.family]
    else:
        edges = cost.edges(work, plan, size)
        times["compute"] = load.blocks * cost.block_s(work, plan, dev) + load.per_sm * edges
    if plan.family == "attention":
        blocks = max(load.rounds * load.mean, load.most)
        first = cost.pointer_first_s(work, plan, blocks)
        step = cost.pointer_step_s(work, plan, dev, blocks)
        times["latency"] = blocks * step + (load.rounds - 1) * first
        launch = dev.launch_s + first + cost.combine_s(work, plan, dev, size, load)
    seconds = launch + cost.joined(*times.values())
    waves = ceil_div(max(load.programs, 1), dev.sm_count * load.resident)
    bound = largest({**times, "launch": launch})
    return Prediction(seconds, moved, work.flops(**size._asdict()), waves, bound)


def _plans(work: Attention, dev: DeviceSpec) -> Iterator[tiles.AttentionPlan]:
    """Yield the plans of all kernels."""
    width = tiles.padded(work.head_dim)
    for block_m, block_n, groups in GROUP_TILES:
        yield _plan("groups", (block_m, block_n, width), groups, 1, groups)
    if _is_plain(work):
        for block_n in HALVES_KEYS:
            if work.kv_len == tiles.HALVES_BLOCKS * block_n:
                yield _plan("halves", (64, block_n, width), 8, 2, HALVES)
    for block_n, stages in FLASH_TILES:
        yield _plan("flash", (tiles.FLASH_ROWS, block_n, width), FLASH_WARPS, stages)
    for (block_m, block_n), depths in POINTER_TILES.items():
        if work.lengths is not None and (block_m, block_n) == UNEVEN:
            continue
        warps = 8 if block_m == 128 else 4
        for stages in depths:
            whole = _plan("attention", (block_m, block_n, width), warps, stages)
            yield from _cut(whole, work, dev)


def _plan(
    family: str, block: tuple[int, int, int], warps: int, stages: int, groups: int = 1
) -> tiles.AttentionPlan:
    return tiles.AttentionPlan(
        *block, num_stages=stages, num_warps=warps, family=family, groups=groups
    )


def _cut(
    whole: tiles.AttentionPlan, work: Attention, dev: DeviceSpec
) -> Iterator[tiles.AttentionPlan]:
    """Yield a plan with every bound of parts that makes a difference at some size."""
    batch, q_len = (dim if isinstance(dim, int) else 1 for dim in (work.batch, work.q_len))
    keys = work.kv_len if isinstance(work.kv_len, int) else work.kv_len.upper or MANY_KEYS
    before = 0.0
    for bound in PARTS:
        plan = replace(whole, split_k=bound)
        parts = tiles.key_parts(plan, work, dev, AttentionSize(batch, q_len, keys))
        if parts > before * WORTH_MORE_PARTS:
            before = parts
            yield plan


def _is_plain(work: Attention) -> bool:
    """Tell whether nothing is done to scores, of heads of 64 features that share no keys.

    `halves` was run for such workloads only.
    """
    scores = (work.bias_dims, work.mask_dims, work.softcap, work.alibi, work.sinks)
    modified = (*scores, work.window, work.lengths)
    usual = work.q_heads == work.kv_heads and work.head_dim == work.v_dim == 64
    return usual and work.causal == "none" and all(given is None for given in modified)


def _powers_of_two(plan: TilePlan, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value, least = getattr(plan, name), 1 if name == "num_warps" else 16
        if value < least or value & (value - 1):
            yield f"{name} is {value}, triton needs a power of two >= {least}"


def _hopper_violations(
    plan: tiles.AttentionPlan, work: Attention, dev: DeviceSpec
) -> Iterator[str]:
    """Check what the kernels for Hopper must meet."""
    if not (dev.capabilities.tma and dev.capabilities.warp_group_mma):
        yield f"family {plan.family!r} needs TMA and wgmma (sm_90), which the {dev.label} lacks"
    for name, features in (("head_dim", work.head_dim), ("v_dim", work.v_dim)):
        if features % 8:
            yield f"{name} is {features}, rows of a tensor map must be multiples of 8 elements"
    if plan.family == "groups":
        yield from _groups_violations(plan, work)
    else:
        yield from _warp_group_violations(plan, work)


def _warp_group_violations(plan: TilePlan, work: Attention) -> Iterator[str]:
    given = {"block_m": tiles.FLASH_ROWS, "num_warps": FLASH_WARPS, "split_k": 1, "groups": 1}
    if plan.family == "halves":
        given = {"block_m": 64, "num_warps": 8, "groups": HALVES, "num_stages": 2, "split_k": 1}
        most = 64 if work.bias_dims or work.mask_dims else 128
        if plan.block_n > most:
            yield f"block_n is {plan.block_n}, family 'halves' has up to {most} for this"
    for name, value in given.items():
        if getattr(plan, name) != value:
            yield f"{name} is {getattr(plan, name)}, family {plan.family!r} has {value}"
    if work.kv_len == 0:
        yield "kv_len is 0, a tensor map needs 1 key"


def _groups_violations(plan: tiles.AttentionPlan, work: Attention) -> Iterator[str]:
    yield from _powers_of_two(plan, ("block_m", "num_warps"))
    if plan.groups not in (4, 8, 16):
        yield f"groups is {plan.groups}, family 'groups' has 4, 8 or 16"
    if plan.split_k != 1:
        yield f"split_k is {plan.split_k}, family 'groups' holds all keys at once"
    if plan.num_warps != plan.groups:
        yield f"num_warps is {plan.num_warps}, {plan.groups} groups have a warp each"
    for name, features in (("head_dim", work.head_dim), ("v_dim", work.v_dim)):
        if features > 128:
            yield f"{name} is {features}, family 'groups' takes up to 128"
