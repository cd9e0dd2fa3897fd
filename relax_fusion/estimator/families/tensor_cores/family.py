"""Tensor cores for many rows: the families "mma" and "wgmma"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....hardware import DeviceSpec
from ....workload import GatedFFN, NormMatmul
from ...family import OWN_BASELINE_ERROR, Breaks, Footprint, KernelFamily
from ...prediction import Prediction
from ...shape import Size, matmul_shape, rows_of
from ...tile_plan import TilePlan
from ..few_rows.family import FewRows
from ..fma_tiles import FmaTiles
from ..matmuls import MatmulWork, columns_fit, matmul_limits
from . import cost as mma_cost
from . import plans as mma_plans
from . import tiles as mma


class TensorCores(KernelFamily[MatmulWork]):
    """Norm, matmul or gated projections by ``mma.sync`` of warps or ``wgmma`` of warp groups."""

    names = mma.FAMILIES
    takes = (NormMatmul, GatedFFN)
    emitter = "relax_fusion.dlight_rules.tensor_cores.contraction:emit"
    error = OWN_BASELINE_ERROR
    instead_of = (FmaTiles,)
    # More regimes than FMAs have, and tiles of 128 rows: the ranges that end at 512 and 1024,
    # which are usual, have one number of them.
    breaks = Breaks((1, 8, 16, 32, 64, 128, 256, 384, 512, 896, 1024), 4096)

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse dtypes and devices that have no such instructions, and copies of odd sizes."""
        shape = matmul_shape(work)
        reason = mma.unsupported(shape, dev)
        lanes = mma.copy_lanes(shape)
        if reason is None and not any(all(s % n == 0 for s in mma.copied(shape)) for n in lanes):
            sizes = ", ".join(map(str, mma.copied(shape)))
            step = "are copied 4 bytes at least at once"
            return f"operands of {work.dtype} {step}, along {sizes} elements"
        return reason

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles of warp groups, then of warps, the reduction whole and in parts."""
        shape = matmul_shape(work)
        for plan in mma_plans.candidates(shape, work.rows, dev):
            if columns_fit(shape, plan.block_n):
                yield plan

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulWork, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Leave a few rows to the kernel that is for them, where there is one.

        An instruction of a warp group has 64 rows, which cost no more than fewer.
        """
        most, few = rows[1], FewRows()
        groups = max(most, mma.GROUP_ROWS) if most >= mma.FEWEST_ROWS else most
        if few.refuses(work, dev) or next(few.plans(work, dev), None) is None:
            most = groups = max(most, min((p.block_m for p in plans), default=0), mma.GROUP_ROWS)
        tallest = {mma.WARP_GROUPS: groups}
        return (p for p in plans if p.block_m <= tallest.get(p.family, most))

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what tiles, copies and clusters ask for, and what a block has not."""
        yield from mma.violations(plan, matmul_shape(work), dev)
        if plan.block_k > work.k:
            yield f"block_k is {plan.block_k}, the reduction has {work.k} elements"
        yield from matmul_limits(self.footprint(plan, work, dev), plan, work, dev)

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the stages in shared memory, and the sums and fragments of a thread."""
        shape = matmul_shape(work)
        threads = plan.num_warps * dev.warp_size
        return Footprint(mma.smem_bytes(plan, shape), mma.registers(plan, shape), threads)

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches of `plan` cost."""
        foot = self.footprint(plan, work, dev)
        return mma_cost.predict(work, plan, foot, dev, rows_of(work, size))
