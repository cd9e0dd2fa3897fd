"""Kernels in Triton and Gluon for matmuls and attention."""

from __future__ import annotations

from collections.abc import Iterator

from ...hardware import DeviceSpec
from ...tile_plan import TilePlan
from ...workload import Attention, GatedFFN, NormMatmul
from .. import triton, triton_attention, triton_attention_cost, triton_cost
from ..family import Breaks, Footprint, KernelFamily
from ..prediction import Prediction, ceil_div
from ..shape import Size, attention_size, matmul_shape, rows_of
from .matmuls import MatmulWork


class TritonMatmul(KernelFamily[MatmulWork]):
    """Norm, matmul or gated projections: "gemv", "pointer", "stream" and "persistent"."""

    names = triton.FAMILIES
    backend = "triton"
    takes = (NormMatmul, GatedFFN)
    # Triton's kernels and TVM's are far apart, or predicted to be level (one row): then Triton's
    # were 1.1 to 1.2 times as fast on an H200.
    error = 0.9
    breaks = Breaks((1, 16, 32, 64, 128, 256, 384, 512, 768, 896, 1024), 4096)

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse dtypes, epilogues and devices that the kernels are not for."""
        return triton.unsupported(work, dev)

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield the plans of all kernels."""
        return triton.candidates(work)

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what tiles, copies and epilogues ask for, and what a block has not."""
        return triton.violations(plan, work, dev)

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the stages in shared memory, and the sums of a thread."""
        shape = matmul_shape(work, pairs=False)
        threads = plan.num_warps * dev.warp_size
        sums = triton.accumulators(plan, shape)
        return Footprint(triton.smem_bytes(plan, shape), sums, threads)

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches of `plan` cost."""
        return triton_cost.predict(work, plan, dev, rows_of(work, size))

    def fill_s(self, plan: TilePlan) -> float:
        """Return the time in which a kernel fills and drains the device, which is priced here."""
        return triton_cost.FILL_S[plan.family]

    def blocks(
        self, plan: TilePlan, work: MatmulWork, most: int | None
    ) -> Iterator[tuple[str, int]]:
        """Yield the rows of dot products."""
        if plan.family == "gemv":
            yield "the rows", most or 0


class TritonAttention(KernelFamily[Attention]):
    """Attention: "pointer", "flash", "groups" and "halves"."""

    names = triton_attention.FAMILIES
    backend = "triton"
    takes = (Attention,)
    error = 0.9
    breaks = Breaks((1, 16, 64, 256, 512, 1024), 4096, (32, 8, 1))

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
