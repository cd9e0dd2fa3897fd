"""Which launches compute an attention under a plan.

A plan of back end "triton" names a family of :mod:`.kernels` and its tiles.  Where the keys are cut
into parts, a second launch puts their results together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from triton.language import constexpr
from tvm import ir, tirx

from ..errors import LoweringError
from ..estimator import AttentionSize
from ..estimator.families.triton_attention.tiles import (
    FEW_MERGED_ROWS,
    HALVES_BLOCKS,
    MAPPED_FAMILIES,
    MAPPED_KEYS,
    AttentionPlan,
    bias_tiles,
    capacity,
    heads_of_tile,
    key_parts,
    padded,
    programs_wanted,
    query_stages,
)
from ..estimator.tile_plan import PlanTable, TilePlan
from ..hardware import DeviceSpec
from ..hardware.instructions import WARP_GROUP_MMA
from ..launch.arguments import OUT, TensorMap, Workspace
from ..workload import DTYPE_BYTES, Attention
from .attention_call import Appended, AttentionCall, Case, at_least, at_most, int32, int64
from .kernels.attention_combine import attention_combine
from .kernels.attention_flash import attention_flash
from .kernels.attention_flash_scores import late_scale
from .kernels.attention_groups import attention_groups
from .kernels.attention_halves import attention_halves
from .kernels.attention_pointer import attention_pointer
from .launches import Step, ceil_div
from .operands import named_operands

MERGED_PARTS, MERGED_COLUMNS = 32, 32
"""Parts of a row that a program merges at once, at most, and their columns that it has: each thread
of its warp then loads 32 floats."""

ANY_LENGTH: dict[str, Any] = {
    "family": "attention",
    "block_m": 64,
    "block_n": 64,
    "split_k": 1,
    "groups": 1,
    "num_stages": 2,
    "num_warps": 4,
}
"""This tile is for more keys than a kernel holds that should have held all."""


def attention_cases(
    work: Attention,
    plan: TilePlan,
    inputs: Sequence[ir.Expr],
    most_queries: int | None,
    dev: DeviceSpec,
    workspaces: dict[str, Workspace],
    appended: Appended | None = None,
) -> list[Case]:
    """Return the launches that compute `work`, the last ones on the condition True.

    `inputs` are tensors, and maybe the number of keys, in the order of ``work.graph``; the plan
    serves up to `most_queries` positions.  `workspaces` gets the workspaces, for the plans of other
    ranges to use the same.  What is `appended`, plans of family "attention" write into k and v.
    """
    operands = named_operands(work, inputs)
    own = AttentionPlan.of(plan)
    a = AttentionCall(work, own, operands, most_queries, dev, workspaces, appended)
    whole = {"attention": _pointer, "flash": flash_cases}
    if plan.family in whole:
        return whole[plan.family](a)
    makers = {"groups": groups_step, "halves": halves_step}
    if plan.family not in makers:
        raise LoweringError(f"plan {plan.key}: no kernel family {plan.family!r}")
    step, keys = makers[plan.family](a), capacity(own)
    if keys is None or isinstance(work.kv_len, int):
        return [(True, [step])]
    # Bounds of symbolic variables are a caller's word
    rest = replace(a, plan=replace(own, **ANY_LENGTH))
    return [(a.kv_len <= keys, [step]), *_pointer(rest)]


def empty_cases(
    work: Attention, plans: PlanTable, inputs: Sequence[ir.Expr], dev: DeviceSpec
) -> list[Case]:
    """Return what to launch where there are no keys, of which no tensor map can be made.

    The merging of no parts writes the zeros.  Nothing is returned where that cannot be, or no plan
    has tensor maps.
    """
    mapped = any(plan.family in MAPPED_FAMILIES for _, plan in plans.entries)
    if isinstance(work.kv_len, int) or not mapped:
        return []
    plan = AttentionPlan.of(plans.entries[-1][1])
    a = AttentionCall(work, plan, named_operands(work, inputs), None, dev, {})
    return [(a.kv_len <= 0, [_combine(a, (OUT, OUT), splits=0, most=2)])]


def _pointer(a: AttentionCall) -> list[Case]:
    """Return the launches of `attention_pointer`: for one part of the keys, and for several."""
    group = heads_of_tile(a.plan, a.work)
    pairs = a.batch * (a.work.q_heads // group)
    tiles = ceil_div(a.q_len * group, a.plan.block_m)
    splits = _splits(a, pairs * tiles) if a.plan.split_k > 1 else 1
    args, c = a.pointer_arguments(), a.constants(stages=a.plan.num_stages)
    unused = {"parts_ptr": OUT, "lse_ptr": OUT}
    whole = a.step(attention_pointer, (pairs, tiles, 1), {**args, **unused}, c)
    if splits == 1:
        return [(True, [whole])]
    rooms = _rooms(a, splits)
    args |= dict(zip(unused, rooms, strict=True))
    part = a.step(attention_pointer, (pairs, tiles, splits), args, c._replace(split=True))
    most = splits if isinstance(splits, int) else a.plan.split_k
    several = [part, _combine(a, rooms, splits, most)]
    if isinstance(splits, int) or _always_cut(a):
        return [(True, several)]
    return [(splits <= 1, [whole]), (True, several)]


def _always_cut(a: AttentionCall) -> bool:
    """Tell whether many keys are cut into parts at every size that the plan serves."""
    if not isinstance(a.work.batch, int) or a.most_queries is None:
        return False
    many = AttentionSize(a.work.batch, a.most_queries, a.plan.split_k * a.plan.block_n)
    return key_parts(a.plan, a.work, a.dev, many) > 1


def _combine(a: AttentionCall, rooms: tuple[Any, Any], splits: Any, most: int) -> Step:
    """Return the launch that merges parts, `most` of them at most."""
    parts = min(1 << (most - 1).bit_length(), MERGED_PARTS)
    others = a.other_arguments()
    args = {name: others[name] for name in ("sinks_ptr", "out", "Q_LEN")}
    args |= {"parts_ptr": rooms[0], "lse_ptr": rooms[1], "SPLITS": int32(splits)}
    # Nothing of the plan, so that the plans of other ranges have the same kernel
    constants = a.constants(block_m=0, block_n=MERGED_COLUMNS, parts=parts)
    grid = (a.batch * a.work.q_heads * a.q_len, ceil_div(a.work.v_dim, MERGED_COLUMNS))
    return a.step(attention_combine, grid, args, constants, num_warps=1)


def _splits(a: AttentionCall, tiles: Any) -> Any:
    """Return the parts of the keys, as `key_parts` does for numbers."""
    keys = a.kv_len
    if a.work.window is not None and a.work.causal != "none":
        keys = at_most(keys, a.q_len + (a.work.window - 1))
    blocks = ceil_div(keys, a.plan.block_n)
    rows = a.batch * a.work.q_heads * a.q_len
    if isinstance(rows, int):
        wanted: Any = programs_wanted(rows, a.dev)
    else:
        few = tirx.IntImm("int64", programs_wanted(1, a.dev))
        wanted = tirx.Select(rows <= FEW_MERGED_ROWS, few, tirx.IntImm("int64", a.dev.sm_count))
    room = wanted // at_least(tiles, 1)
    return at_least(at_most(at_most(room, a.plan.split_k), blocks), 1)


def _rooms(a: AttentionCall, splits: Any) -> tuple[Workspace, Workspace]:
    """Return the workspaces for the parts of the result, and for the sums of their weights.

    More than one part means that all programs fit the device at once, each with its rows.
    """
    heads = a.batch * a.work.q_heads
    if isinstance(splits, int) and isinstance(heads, int) and isinstance(a.q_len, int):
        rows = splits * heads * a.q_len
    else:
        queries = a.q_len if a.most_queries is None else at_most(a.q_len, a.most_queries)
        rows = at_least(heads * queries, programs_wanted(1, a.dev) * a.plan.block_m)
    parts, lse = Workspace((rows, a.work.v_dim)), Workspace((rows,))
    return a.workspaces.setdefault(f"parts {rows}", parts), a.workspaces.setdefault(
        f"lse {rows}", lse
    )


WARP_GROUP_ROWS = WARP_GROUP_MMA["float16"].m
"""Query rows of a warp group, the height of its matrix instructions."""

SECTION, EVERY_SECTION = 8, 1 << 16
"""Heads whose tiles are walked together, so that their keys and values are still in L2; or all:
with a causal mask, the longest tiles of all heads come first, which balances the programs."""

L2_SHARE = 2 / 3
"""Keys and values of all heads may take this part of L2 for that."""


def flash_cases(a: AttentionCall) -> list[Case]:
    """Return the launch for long queries, with a bias in tiles where its rows can be copied."""
    if not bias_tiles(a.plan, a.work):
        return [(True, [_flash_step(a, tiles=False)])]
    in_tiles = [_flash_step(a, tiles=True)]
    if isinstance(a.work.kv_len, int):
        return [(True, in_tiles)]
    even = tirx.EQ(tirx.floormod(a.kv_len, int64(MAPPED_KEYS)), int64(0))
    return [(even, in_tiles), (True, [_flash_step(a, tiles=False)])]


def _flash_step(a: AttentionCall, tiles: bool) -> Step:
    plan, work = a.plan, a.work
    args = {**_mapped_arguments(a, plan.block_n), "BATCH": int32(a.batch)}
    if tiles:
        bias = TensorMap(a.operands["bias"], (1, 1, WARP_GROUP_ROWS, plan.block_n))
        args["bias"] = args["bias"]._replace(ptr=bias)
    programs = a.batch * work.q_heads * ceil_div(a.q_len, plan.block_m)
    grid = at_most(programs, a.dev.sm_count)  # programs that go on to another tile without a pause
    section = SECTION
    if work.causal != "none" and not work.window:
        if _in_l2(a):
            section = EVERY_SECTION
        else:  # tiles of different lengths, each to whichever multiprocessor is free
            grid = programs
    constants = a.constants(
        bias_tiles=tiles, stages=plan.num_stages, q_stages=query_stages(plan, work), section=section
    )
    # The other warps of the plan are those of the specialised warp groups
    return a.step(attention_flash, (grid,), args, late_scale(constants), num_warps=4)


def _in_l2(a: AttentionCall) -> bool:
    """Tell whether keys and values of all heads are known to fit L2 well."""
    sizes = [d if isinstance(d, int) else d.upper for d in (a.work.batch, a.work.kv_len)]
    if None in sizes:
        return False
    each = a.work.kv_heads * (a.work.head_dim + a.work.v_dim) * DTYPE_BYTES[a.work.dtype]
    return prod(n for n in sizes if n is not None) * each <= a.dev.l2_bytes * L2_SHARE


def groups_step(a: AttentionCall) -> Step:
    """Return the launch for short sequences."""
    plan, heads = a.plan, heads_of_tile(a.plan, a.work)
    rows, keys = a.q_len * heads, plan.groups * plan.block_n
    args = a.pointer_arguments()
    for name in ("q", "k", "v"):
        args[name] = args[name]._replace(s=constexpr(args[name].s))
    constants = a.constants(
        groups=plan.groups,
        even_rows=isinstance(rows, int) and rows % plan.block_m == 0,
        even_keys=isinstance(a.kv_len, int) and a.kv_len == keys,
    )
    grid = (a.batch, a.work.q_heads // heads, ceil_div(rows, plan.block_m))
    return a.step(attention_groups, grid, args, constants)


def halves_step(a: AttentionCall) -> Step:
    """Return the launch for short sequences of which two warp groups share the keys."""
    plan, work = a.plan, a.work
    constants = a.constants(even_keys=work.kv_len == HALVES_BLOCKS * plan.block_n)
    grid = (a.batch, work.q_heads, ceil_div(a.q_len, plan.block_m))
    # Each copy is for both warp groups; the second is specialised
    args = _mapped_arguments(a, plan.groups * plan.block_n)
    return a.step(attention_halves, grid, args, constants, num_warps=4)


def _mapped_arguments(a: AttentionCall, keys: int) -> dict[str, Any]:
    """Return the arguments of a kernel that gets q, k and v as tensor maps."""
    maps = {"q": _map(a, "q", WARP_GROUP_ROWS), "k": _map(a, "k", keys), "v": _map(a, "v", keys)}
    return {**maps, **a.other_arguments()}


def _map(a: AttentionCall, name: str, rows: int) -> TensorMap:
    """Return q, k or v as ``[batch, heads, rows, features]``; of a cache, the keys in use."""
    heads, width = a.heads(name), a.dim(name, "h")
    count, length = (a.work.q_heads, a.q_len) if name == "q" else (a.work.kv_heads, a.kv_len)
    shape: list[Any] = [a.batch, count, length, width]
    block = (1, 1, rows, padded(width))
    return TensorMap(heads.ptr, block, shape, [heads.b, heads.n, heads.s, 1])
