"""Attention by TIR: tiles of FMAs and of tensor cores on a GPU, and register tiles of a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from ...hardware import DeviceSpec
from ...tile_plan import TilePlan
from ...workload import DTYPE_BYTES, Attention
from .. import mma, mma_attention, mma_attention_cost
from ..cpu_cost import attention_on_cpu
from ..family import Breaks, Footprint, KernelFamily
from ..gpu_attention_cost import attention_on_gpu
from ..limits import block_limits, core_limits, has_warps, one_stage, vector_loads
from ..prediction import Prediction, ceil_div, next_power, power_dividing, powers
from ..shape import Size, attention_size
from .attention_tiles import FEW_ROWS, ROW_VECTORS, attention_width, head_extents
from .cpu_tiles import OPERAND_REGISTERS
from .matmuls import THREAD_OVERHEAD_REGISTERS

FMA_TILES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4))
"""Rows and columns of a thread's register tile."""


def _holds_features(plan: TilePlan, work: Attention) -> Iterator[str]:
    if plan.block_k != work.head_dim:
        yield f"block_k is {plan.block_k}, attention holds all {work.head_dim} of head_dim"


def _most_q(work: Attention, limit: int) -> int:
    """Return the most rows of a tile; those of query heads that share keys share it, too."""
    if not isinstance(work.q_len, int):
        return limit
    return min(limit, next_power(work.q_len * work.q_heads // work.kv_heads))


def _most_kv(work: Attention, limit: int) -> int:
    return max(16, min(limit, next_power(work.kv_len))) if isinstance(work.kv_len, int) else limit


class CpuAttention(KernelFamily[Attention]):
    """A task has a tile of query rows, and goes through the keys in blocks."""

    kind = "cpu"
    takes = (Attention,)
    error = 1.0

    def plans(self, work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield blocks of rows and keys in powers of two, in register tiles of whole vectors."""
        lanes = power_dividing(work.v_dim, dev.vector_bytes // 4)
        for block_m in powers(1, _most_q(work, 128)):
            for block_n in powers(16, _most_kv(work, 256)):
                # Tall first: of equal prices, 4 rows x 2 vectors measured best (Zen 5).
                for reg_m in reversed([*powers(1, min(block_m, 4))]):
                    for reg_n in powers(lanes, min(block_n, 4 * lanes)):
                        tile = (block_m, block_n, work.head_dim)
                        yield TilePlan(*tile, reg_m=reg_m, reg_n=reg_n, lanes=lanes)

    def violations(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
        """Yield what a core has not, and what vectors do not divide."""
        yield from one_stage(plan)
        yield from _holds_features(plan, work)
        foot = self.footprint(plan, work, dev)
        yield from core_limits(foot, plan, dev)
        if foot.scratch_bytes > dev.l2_bytes:
            yield (
                f"needs {foot.scratch_bytes} B of cache, a core of the {dev.label} has "
                f"{dev.l2_bytes} B of L2"
            )
        for name, value in (("block_n", plan.block_n), ("v_dim", work.v_dim)):
            if value % plan.lanes:
                yield f"lanes is {plan.lanes}, does not divide {name}={value}"

    def footprint(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Footprint:
        """Return a register tile, and queries, keys or values (in turn), scores and results."""
        bm, bn, d, dv = plan.block_m, plan.block_n, work.head_dim, work.v_dim
        width = attention_width(plan)
        vectors = plan.reg_m * ceil_div(width, plan.lanes)
        registers = vectors + plan.reg_m + OPERAND_REGISTERS
        # In float32, beside the result so far
        staged = bm * d + (0 if bm <= FEW_ROWS else bn * max(d, dv))
        scratch_bytes = 4 * (staged + bm * bn + bm * dv + ROW_VECTORS * bm)
        return Footprint(0, registers, 1, plan.reg_m * width * 4, scratch_bytes)

    def predict(self, plan: TilePlan, work: Attention, dev: DeviceSpec, size: Size) -> Prediction:
        """Price the fused attention; tiles of keys that no row of theirs sees are skipped."""
        foot = self.footprint(plan, work, dev)
        return attention_on_cpu(work, plan, foot, dev, attention_size(work, size))


class FmaAttention(KernelFamily[Attention]):
    """A block has a tile of query rows in shared memory; FMAs multiply."""

    takes = (Attention,)
    error = 1.2

    def plans(self, work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles whose register tiles keep at least half of the threads busy."""
        for block_m in powers(1, _most_q(work, 128)):
            for block_n in powers(16, _most_kv(work, 256)):
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
        no_warps = list(has_warps(plan, dev))
        yield from no_warps
        if no_warps:
            return
        yield from _holds_features(plan, work)
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


class MmaAttention(KernelFamily[Attention]):
    """A block has a tile of query rows; tensor cores multiply what lies in shared memory."""

    names = (mma.FAMILY,)
    takes = (Attention,)
    error = 1.2
    instead_of = (FmaAttention,)
    breaks = Breaks((1, 16, 64, 256, 512, 1024), 4096, (32, 8, 1))

    def refuses(self, work: Attention, dev: DeviceSpec) -> str | None:
        """Refuse dtypes, features and devices that its instructions are not for."""
        return mma_attention.unsupported(work, dev)

    def plans(self, work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles of rows and keys, few rows with the keys in parts."""
        return mma_attention.candidates(work, dev)

    def worth(
        self, plans: Sequence[TilePlan], work: Attention, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Offer tiles of 64 rows at any size: they cost no more than fewer."""
        return (p for p in plans if p.block_m <= max(rows[1], mma.GROUP_ROWS))

    def violations(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
        """Yield what fragments and copies ask for, and what a block has not."""
        yield from mma_attention.violations(plan, work, dev)
        no_warps = list(has_warps(plan, dev))
        yield from no_warps
        if no_warps:
            return
        yield from _holds_features(plan, work)
        yield from block_limits(self.footprint(plan, work, dev), plan, work, dev)
        yield from vector_loads(plan, work.dtype, head_extents(work))

    def footprint(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Footprint:
        """Return the stages of keys and values, and the fragments of a thread."""
        threads = plan.num_warps * dev.warp_size
        smem = mma_attention.smem_bytes(plan, work)
        return Footprint(smem, mma_attention.registers(plan, work), threads)

    def predict(self, plan: TilePlan, work: Attention, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the kernels of `plan` cost."""
        foot = self.footprint(plan, work, dev)
        return mma_attention_cost.predict(work, plan, foot, dev, attention_size(work, size))
