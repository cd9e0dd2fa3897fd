"""CPU kernels that repack weights into panels: the family "panels"."""

from __future__ import annotations

from collections.abc import Iterator

from ....hardware import DeviceSpec
from ....workload import GatedFFN, NormMatmul
from ...family import OWN_BASELINE_ERROR, Footprint, KernelFamily
from ...limits import core_limits
from ...prediction import Prediction
from ...shape import Size, matmul_shape, rows_of
from ...tile_plan import TilePlan
from ..matmuls import MatmulWork, refuses_integers
from . import tiles as panels
from .cost import price_panels


class Panels(KernelFamily[MatmulWork]):
    """Norm, matmul or gated projections: a task packs columns and takes them through the rows."""

    names = (panels.FAMILY,)
    kind = "cpu"
    takes = (NormMatmul, GatedFFN)
    emitter = "relax_fusion.dlight_rules.cpu.contraction:emit"
    error = OWN_BASELINE_ERROR
    cuts_rows = True

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse integers, which would be added up as float32."""
        return refuses_integers(work, "panels of a CPU")

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield the tall half of the register tiles of each width."""
        return panels.candidates(matmul_shape(work), dev)

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what panels ask for, and what a core has not."""
        yield from panels.violations(plan, matmul_shape(work))
        yield from core_limits(self.footprint(plan, work, dev), plan, dev)

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the vector registers of a tile."""
        return Footprint(0, panels.registers(plan, matmul_shape(work)), 1)

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Price packing and multiplying."""
        return price_panels(matmul_shape(work), plan, dev, rows_of(work, size))
