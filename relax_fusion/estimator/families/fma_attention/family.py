"""Attention by tiles of fused multiply-adds in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ....hardware import DeviceSpec
from ....workload import DTYPE_BYTES, Attention
from ...family import Footprint, KernelFamily
from ...limits import block_limits, one_stage, vector_loads
from ...prediction import Prediction, ceil_div, powers
from ...shape import Size, attention_size
from ...tile_plan import TilePlan
from ..attention_tiles import (
    ROW_VECTORS,
    attention_width,
    head_extents,
    holds_features,
    most_kv,
    most_q,
)
from ..matmuls import THREAD_OVERHEAD_REGISTERS
from .cost import attention_on_gpu

FMA_TILES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4))
"""Rows and columns of a thread's register tile."""


class FmaAttention(KernelFamily[Attention]):
    """A block has a tile of query rows in shared memory; FMAs multiply."""

    takes = (Attention,)
    emitter = "relax_fusion.dlight_rules.attention:emit"
    error = 1.2

    def plans(self, work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles whose register tiles keep at least half of the threads busy."""
        for block_m in powers(1, most_q(work, 128)):
            for block_n in powers(16, most_kv(work, 256)):
                for num_warps in (1, 2, 4, 8):
                    for reg_m, reg_n in FMA_TILES:
                        tiles = block_m * block_n // (reg_m * reg_n)
                        if block_m % reg_m == 0 and tiles >= num_warps * 16:
                            yield TilePlan(
                                *(block_m, block_n, work.head_dim),
                                reg_m=reg_m,
                                reg_n=reg_n,
                                num_warps=num_warps,
                            )

    def violations(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
        """Yield what a block has not; shared memory is declared statically."""
        yield from one_stage(plan)
        yield from holds_features(plan, work)
        foot = self.footprint(plan, work, dev)
        yield from block_limits(foot, plan, work, dev, is_static=True)
        yield from vector_loads(plan, work.dtype, head_extents(work))

    def footprint(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Footprint:
        """Return the tiles of queries, of keys or values (in turn), of scores, and row vectors."""
        bm, bn, d, dv = plan.block_m, plan.block_n, work.head_dim, work.v_dim
        width = attention_width(plan)
        threads = max(plan.num_warps, 1) * dev.warp_size
        # A row of scores is one longer than its keys, against bank conflicts.
        scores = 4 * (bm * (bn + 1) + ROW_VECTORS * bm)
        smem = (bm * d + bn * max(d, dv)) * DTYPE_BYTES[work.dtype] + scores
        tile = plan.reg_m * math.gcd(dv, width)
        kept = ceil_div(bm * dv // tile, threads) * tile
        operands = plan.reg_m * width + plan.reg_m + width
        return Footprint(smem, kept + operands + THREAD_OVERHEAD_REGISTERS, threads)

    def predict(self, plan: TilePlan, work: Attention, dev: DeviceSpec, size: Size) -> Prediction:
        """Price the fused attention; tiles that a causal mask hides are skipped."""
        foot = self.footprint(plan, work, dev)
        return attention_on_gpu(work, plan, foot, dev, attention_size(work, size))

    def blocks(
        self, plan: TilePlan, work: Attention, most: int | None
    ) -> Iterator[tuple[str, int]]:
        """Yield the heads: query positions lie along the first dimension."""
        yield "the heads", work.q_heads
