"""Launches of the attention kernels for Hopper."""

from __future__ import annotations

from math import prod
from typing import Any

from triton.language import constexpr
from tvm import tirx

from ..estimator.families.triton_attention.tiles import (
    HALVES_BLOCKS,
    MAPPED_KEYS,
    bias_tiles,
    heads_of_tile,
    padded,
    query_stages,
)
from ..hardware.instructions import WARP_GROUP_MMA
from ..launch.arguments import TensorMap
from ..workload import DTYPE_BYTES
from .attention_call import AttentionCall, Case, at_most, int32, int64
from .kernels.attention_flash import attention_flash
from .kernels.attention_flash_scores import late_scale
from .kernels.attention_groups import attention_groups
from .kernels.attention_halves import attention_halves
from .steps import Step, ceil_div

WARP_GROUP_ROWS = WARP_GROUP_MMA["float16"].m
"""Query rows of a warp group, the height of its matrix instructions."""

SECTION, EVERY_SECTION = 8, 1 << 16
"""Heads whose tiles are walked together, so that their keys and values are still in L2; or all:
with a causal mask, the longest tiles of all heads come first, which balances the programs."""

L2_SHARE = 2 / 3
"""Part of L2 that keys and values of all heads may take for that."""


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
        bias_tiles=tiles,
        stages=plan.num_stages,
        q_stages=query_stages(plan, work),
        section=section,
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
