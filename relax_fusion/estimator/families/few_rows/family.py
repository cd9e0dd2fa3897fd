"""Tensor cores for at most 16 rows: the family "few_rows"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....hardware import DeviceSpec
from ....workload import GatedFFN, NormMatmul
from ...family import OWN_BASELINE_ERROR, Breaks, Footprint, KernelFamily
from ...prediction import HALF_DTYPES, Prediction
from ...shape import Size, matmul_shape, rows_of
from ...tile_plan import TilePlan
from ..fma_tiles import FmaTiles
from ..matmuls import MatmulWork, columns_fit, matmul_limits
from ..tensor_cores import tiles as mma
from . import cost as few_rows_cost
from . import tiles as few_rows


class FewRows(KernelFamily[MatmulWork]):
    """Norm, matmul or gated projections of a few rows; all warps of a block have its columns."""

    names = (few_rows.FAMILY,)
    takes = (NormMatmul, GatedFFN)
    emitter = "relax_fusion.dlight_rules.tensor_cores.contraction:emit"
    error = OWN_BASELINE_ERROR
    instead_of = (FmaTiles,)
    breaks = Breaks((1, 8, 16))

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse dtypes and devices that its instructions are not for."""
        if work.dtype not in HALF_DTYPES:
            halves = " and ".join(HALF_DTYPES)
            return f"dtype is {work.dtype}, family {few_rows.FAMILY!r} takes {halves}"
        return mma.unsupported(matmul_shape(work), dev, few_rows.FAMILY)

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield tiles of 8 and 16 rows, the reduction whole and in parts."""
        shape = matmul_shape(work)
        for plan in few_rows.candidates(work, shape, dev):
            if plan.block_n == few_rows.least_columns(shape) or columns_fit(shape, plan.block_n):
                yield plan

    def worth(
        self, plans: Sequence[TilePlan], work: MatmulWork, dev: DeviceSpec, rows: tuple[int, int]
    ) -> Iterable[TilePlan]:
        """Offer nothing for more rows; one instruction takes eight."""
        if rows[1] > few_rows.MOST_ROWS:
            return ()
        return (p for p in plans if p.block_m <= max(rows[1], few_rows.MMA_ROWS))

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what its tiles, copies and clusters ask for, and what a block has not."""
        yield from few_rows.violations(plan, work, matmul_shape(work), dev)
        yield from matmul_limits(self.footprint(plan, work, dev), plan, work, dev)

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the ring of steps in shared memory, and the registers of a warp."""
        shape = matmul_shape(work)
        threads = plan.num_warps * dev.warp_size
        return Footprint(few_rows.smem_bytes(plan, shape), few_rows.registers(plan, shape), threads)

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches of `plan` cost."""
        foot = self.footprint(plan, work, dev)
        return few_rows_cost.predict(work, plan, foot, dev, rows_of(work, size))
