"""Matmuls in Triton and Gluon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....hardware import DeviceSpec
from ....workload import GatedFFN, NormMatmul
from ...family import OWN_BASELINE_ERROR, Breaks, Footprint, KernelFamily
from ...prediction import Prediction
from ...shape import Size, matmul_shape, rows_of
from ...tile_plan import TilePlan
from ..matmuls import MatmulWork
from . import cost as triton_cost
from . import plans as triton_matmul


class TritonMatmul(KernelFamily[MatmulWork]):
    """Norm, matmul or gated projections: "gemv", "pointer", "stream" and "persistent"."""

    names = triton_matmul.FAMILIES
    backend = "triton"
    takes = (NormMatmul, GatedFFN)
    error = OWN_BASELINE_ERROR
    breaks = Breaks((1, 16, 32, 64, 128, 256, 384, 512, 768, 896, 1024), 4096)

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse dtypes, epilogues and devices that the kernels are not for."""
        return triton_matmul.unsupported(work, dev)

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield the plans of all kernels."""
        return triton_matmul.candidates(work)

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulWork, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Offer the lowest tiles of tensor cores to any number of rows but one."""
        most = rows[1] if rows[1] == 1 else max(rows[1], triton_matmul.LEAST_ROWS)
        return (plan for plan in plans if plan.block_m <= most)

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what tiles, copies and epilogues ask for, and what a block has not."""
        return triton_matmul.violations(plan, work, dev)

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the stages in shared memory, and the sums of a thread."""
        shape = matmul_shape(work, pairs=False)
        threads = plan.num_warps * dev.warp_size
        sums = triton_matmul.accumulators(plan, shape)
        return Footprint(triton_matmul.smem_bytes(plan, shape), sums, threads)

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches of `plan` cost."""
        return triton_cost.predict(work, plan, dev, rows_of(work, size))

    def blocks(
        self, plan: TilePlan, work: MatmulWork, most: int | None
    ) -> Iterator[tuple[str, int]]:
        """Yield the rows of dot products."""
        if plan.family == "gemv":
            yield "the rows", most or 0
