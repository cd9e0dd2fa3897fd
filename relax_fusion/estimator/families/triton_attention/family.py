"""Attention in Triton and Gluon."""

from __future__ import annotations

from collections.abc import Iterator

from ....hardware import DeviceSpec
from ....workload import Attention
from ...family import Breaks, Footprint, KernelFamily
from ...prediction import Prediction, ceil_div
from ...shape import Size, attention_size
from ...tile_plan import TilePlan
from . import cost as triton_attention_cost
from . import plans as triton_attention


class TritonAttention(KernelFamily[Attention]):
    """Attention: "pointer", "flash", "groups" and "halves"."""

    names = triton_attention.FAMILIES
    backend = "triton"
    takes = (Attention,)
    error = 0.9
    breaks = Breaks((1, 16, 64, 256, 512, 1024), 4096)

    def refuses(self, work: Attention, dev: DeviceSpec) -> str | None:
        """Refuse dtypes, features and devices that the kernels are not for."""
        return triton_attention.unsupported(work, dev)

    def plans(self, work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield the plans of all kernels."""
        return triton_attention.candidates(work, dev)

    def violations(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Iterator[str]:
        """Yield what tiles and copies ask for, and what a block has not."""
        return triton_attention.violations(plan, work, dev)

    def footprint(self, plan: TilePlan, work: Attention, dev: DeviceSpec) -> Footprint:
        """Return the tiles in shared memory, and the scores and results of a thread."""
        threads = plan.num_warps * dev.warp_size
        smem = triton_attention.smem_bytes(plan, work, dev)
        return Footprint(smem, triton_attention.register_values(plan, work), threads)

    def predict(self, plan: TilePlan, work: Attention, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches of `plan` cost."""
        return triton_attention_cost.predict(work, plan, dev, attention_size(work, size))

    def blocks(
        self, plan: TilePlan, work: Attention, most: int | None
    ) -> Iterator[tuple[str, int]]:
        """Yield the query positions, and the heads."""
        group = work.q_heads // work.kv_heads
        yield "the query positions", ceil_div((most or 0) * group, plan.block_m)
        yield "the heads", work.q_heads
