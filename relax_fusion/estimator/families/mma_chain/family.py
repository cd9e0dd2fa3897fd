"""Chains of matmuls by tensor cores, whose intermediate rows stay in registers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....hardware import DeviceSpec
from ....workload import MatmulChain
from ...family import Breaks, Footprint, KernelFamily
from ...limits import block_limits
from ...prediction import Prediction
from ...shape import Size, rows_of
from ...tile_plan import TilePlan
from ..tensor_cores import tiles as mma
from . import cost as mma_chain_cost
from . import tiles as mma_chain


class MmaChain(KernelFamily[MatmulChain]):
    """A block has a tile of rows; tensor cores multiply, the intermediate stays in registers."""

    names = (mma.FAMILY,)
    takes = (MatmulChain,)
    emitter = "relax_fusion.dlight_rules.tensor_cores.chain:emit"
    # On an H200 adapters of rank 64 that were predicted to win by 1.56 to 1.64 reached 0.71 to 1.06
    # of the speed of the two matmuls (2026-11-22-baseline.json); G1 to G3 of MCFuser, by 1.66 and
    # more, 1.6.
    error = 1.65
    breaks = Breaks((1, 8, 16, 32, 64, 128, 256, 384, 512, 896, 1024), 4096)

    def refuses(self, work: MatmulChain, dev: DeviceSpec) -> str | None:
        """Refuse dtypes and devices that its instructions are not for."""
        return mma_chain.unsupported(work, dev)

    def nothing_fits(self, work: MatmulChain, dev: DeviceSpec) -> str:
        """Name the size that has to fit."""
        return f"rows of {work.r} elements between the matmuls fit no tile of the {dev.label}"

    def plans(self, work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles that hold all of an intermediate row."""
        return mma_chain.candidates(work, dev)

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulChain, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Offer tiles of 64 rows at any size: they cost no more than fewer."""
        return (p for p in plans if p.block_m <= max(rows[1], mma.GROUP_ROWS))

    def violations(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Iterator[str]:
        """Yield what fragments and copies ask for, and what a block has not."""
        yield from mma_chain.violations(plan, work, dev)
        yield from block_limits(self.footprint(plan, work, dev), plan, work, dev)

    def footprint(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Footprint:
        """Return the stages of weights in shared memory, and the fragments of a thread."""
        smem = plan.num_stages * mma_chain.stage_bytes(plan, work)
        return Footprint(smem, mma_chain.registers(plan, work), plan.num_warps * dev.warp_size)

    def predict(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the kernel costs."""
        foot = self.footprint(plan, work, dev)
        return mma_chain_cost.predict(work, plan, foot, dev, rows_of(work, size))
