"""Which launches compute an attention under a plan.

A plan of back end "triton" names a family of :mod:`.kernels` and its tiles.  Where the keys are cut
into parts, a second launch puts their results together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tvm import ir

from ..device import DeviceSpec
from ..errors import LoweringError
from ..estimator.triton_attention import PROGRAMS_PER_SM, heads_of_tile
from ..tile_plan import PlanTable, TilePlan
from ..workload import Attention
from .arguments import OUT, Workspace
from .attention_call import AttentionCall, at_least, at_most, int32
from .attention_hopper import flash_step
from .kernels.attention_combine import attention_combine
from .kernels.attention_pointer import attention_pointer
from .steps import Step, ceil_div

COMBINE_ROWS, COMBINE_PARTS = 4, 16
"""Rows of a program that puts parts together, a warp for each, and of how many parts a warp holds
the results at one time."""


def attention_steps(
    work: Attention,
    plan: TilePlan,
    inputs: Sequence[ir.Expr],
    most_queries: int | None,
    dev: DeviceSpec,
    rooms: dict[str, Workspace],
) -> list[Step]:
    """Return the launches that compute `work`, in order.

    Parameters
    ----------
    work : Attention
        What to compute; one that `relax_fusion.estimator.triton_attention.unsupported` has nothing
        against.
    plan : TilePlan
        Family and tiles.
    inputs : sequence of Expr
        Tensors, and maybe the number of keys, in the order of
        `relax_fusion.compute.attention.attention_prim_func`.
    most_queries : int, optional
        Query positions up to which the plan serves.
    dev : DeviceSpec
        Where it will run.
    rooms : dict
        Gets the workspaces, for the plans of other ranges to use the same.
    """
    a = AttentionCall(work, plan, _named(work, inputs), most_queries, dev, rooms)
    if plan.family == "pointer":
        return list(_pointer(a))
    if plan.family == "flash":
        return [flash_step(a)]
    raise LoweringError(f"plan {plan.key}: no kernel family {plan.family!r}")


def empty_cases(
    work: Attention, plans: PlanTable, inputs: Sequence[ir.Expr], dev: DeviceSpec
) -> list[tuple[Any, list[Step]]]:
    """Return what to launch where there are no keys, of which no tensor map can be made.

    The merging of no parts writes the zeros.  Nothing is returned where that cannot be, or no plan
    has tensor maps.
    """
    if isinstance(work.kv_len, int) or not any(p.family == "flash" for _, p in plans.entries):
        return []
    plan = plans.entries[-1][1]
    a = AttentionCall(work, plan, _named(work, inputs), None, dev, {})
    args = {**a.pointer_arguments(), "parts_ptr": OUT, "lse_ptr": OUT}
    return [(a.kv_len <= 0, [_combine(a, args, a.constants(), splits=0, most=2)])]


def _named(work: Attention, inputs: Sequence[ir.Expr]) -> dict[str, Any]:
    """Return the operands by name."""
    there = {
        **dict.fromkeys(("q", "k", "v"), True),
        "bias": work.bias_dims,
        "mask": work.mask_dims,
        "slopes": work.alibi,
        "sinks": work.sinks,
        "kv_len": work.kv_prefix,
    }
    return dict(zip((name for name, has in there.items() if has), inputs, strict=True))


def _pointer(a: AttentionCall) -> Iterator[Step]:
    """Yield the launches of `attention_pointer`."""
    work, split = a.work, a.plan.split_k > 1
    group = heads_of_tile(a.plan, work)
    pairs = a.batch * (work.q_heads // group)
    tiles = ceil_div(a.q_len * group, a.plan.block_m)
    splits = _splits(a, pairs * tiles) if split else 1
    parts, lse = _rooms(a, splits) if split else (OUT, OUT)
    args = {**a.pointer_arguments(), "parts_ptr": parts, "lse_ptr": lse}
    constants = {**a.constants(), "SPLIT": split, "NUM_STAGES": a.plan.num_stages}
    yield a.step(attention_pointer, (pairs, tiles, splits), args, constants)
    if split:
        yield _combine(a, args, constants, splits, a.plan.split_k)


def _combine(
    a: AttentionCall, args: dict[str, Any], constants: dict[str, Any], splits: Any, most: int
) -> Step:
    """Return the launch that merges parts, `most` of them at most."""
    rows = a.batch * a.work.q_heads * a.q_len
    parts = 1 << (most - 1).bit_length()
    args = {**args, "ROWS": int32(rows), "SPLITS": int32(splits)}
    constants = {
        **constants,
        "BLOCK_R": COMBINE_ROWS,
        "BLOCK_S": parts,
        "AT_ONCE": min(parts, COMBINE_PARTS),
    }
    grid = (ceil_div(rows, COMBINE_ROWS),)
    return a.step(attention_combine, grid, args, constants, num_warps=COMBINE_ROWS)


def _splits(a: AttentionCall, tiles: Any) -> Any:
    """Return the parts of the keys, as `relax_fusion.estimator.triton_attention.key_parts`."""
    blocks = ceil_div(a.kv_len, a.plan.block_n)
    room = a.dev.sm_count * PROGRAMS_PER_SM // at_least(tiles, 1)
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
        rows = at_least(heads * queries, a.dev.sm_count * PROGRAMS_PER_SM * a.plan.block_m)
    parts, lse = Workspace((rows, a.work.v_dim)), Workspace((rows,))
    return a.rooms.setdefault(f"parts {rows}", parts), a.rooms.setdefault(f"lse {rows}", lse)
