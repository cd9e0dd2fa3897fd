"""Launches of the attention kernels for Hopper."""

from __future__ import annotations

from typing import Any

from ..estimator.triton_attention import padded, query_stages
from .arguments import OUT, TensorMap
from .attention_call import AttentionCall, at_most, int32
from .kernels.attention_flash import attention_flash
from .steps import Step, ceil_div

WARP_GROUP_ROWS = 64
"""Query rows of a warp group, the height of its matrix instructions."""

SECTION, EVERY_SECTION = 8, 1 << 16
"""Heads whose tiles are walked together, so that their keys and values are still in L2.  With a
causal mask, all: the longest tiles of all heads come first, which balances the programs."""


def flash_step(a: AttentionCall) -> Step:
    """Return the launch for long queries."""
    plan, work = a.plan, a.work
    args = {
        "q": _map(a, "q", WARP_GROUP_ROWS),
        "k": _map(a, "k", plan.block_n),
        "v": _map(a, "v", plan.block_n),
        **a.score_arguments(),
        "out_ptr": OUT,
        "BATCH": int32(a.batch),
        **a.lengths(),
        **a.stride_arguments("out"),
    }
    constants = {
        **a.constants(),
        "STAGES": plan.num_stages,
        "Q_STAGES": query_stages(work),
        "CONSUMERS": plan.block_m // WARP_GROUP_ROWS,
        "PACK": 1,
        "SECTION": EVERY_SECTION if work.causal != "none" and not work.window else SECTION,
    }
    tiles = a.batch * work.q_heads * ceil_div(a.q_len, plan.block_m)
    grid = (at_most(tiles, a.dev.sm_count),)
    # The other warps of the plan are those of the specialised warp groups
    return a.step(attention_flash, grid, args, constants, num_warps=4)


def _map(a: AttentionCall, name: str, rows: int) -> TensorMap:
    """Return q, k or v as ``[batch, heads, rows, features]``; of a cache, the keys in use."""
    strides = a.strides(name)
    length = a.q_len if name == "q" else a.kv_len
    width = a.dim(name, "h")
    shape: list[Any] = [a.batch, a.dim(name, "n"), length, width]
    block = (1, 1, rows, padded(width))
    return TensorMap(a.operands[name], block, shape, [*(strides[x] for x in "bns"), 1])
