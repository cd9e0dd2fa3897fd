"""Attention by register tiles of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

from ...hardware import DeviceSpec
from ...workload import Attention
from ..cpu_cost import attention_on_cpu
from ..family import Footprint, KernelFamily
from ..limits import core_limits, one_stage
from ..prediction import Prediction, ceil_div, power_dividing, powers
from ..shape import Size, attention_size
from ..tile_plan import TilePlan
from .attention_tiles import (
    FEW_ROWS,
    ROW_VECTORS,
    attention_width,
    holds_features,
    most_kv,
    most_q,
)
from .cpu_tiles import OPERAND_REGISTERS


class CpuAttention(KernelFamily[Attention]):
    """A task has a tile of query rows, and goes through the keys in blocks."""

    kind = "cpu"
    takes = (Attention,)
    emitter = "relax_fusion.dlight_rules.attention:emit"
    error = 1.0

    def plans(self, work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield blocks of rows and keys in powers of two, in register tiles of whole vectors."""
        lanes = power_dividing(work.v_dim, dev.vector_bytes // 4)
        for block_m in powers(1, most_q(work, 128)):
            for block_n in powers(16, most_kv(work, 256)):
                # Tall first: of equal prices, 4 rows x 2 vectors measured best (Zen 5).
                for reg_m in reversed([*powers(1, min(block_m, 4))]):
                    for reg_n in powers(lanes, min(block_n, 4 * lanes)):
                        tile = (block_m, block_n, work.head_dim)
                        yield TilePlan(*tile, reg_m=reg_m, reg_n=reg_n, lanes=lanes)

    def violations(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
        """Yield what a core has not, and what vectors do not divide."""
        yield from one_stage(plan)
        yield from holds_features(plan, work)
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
