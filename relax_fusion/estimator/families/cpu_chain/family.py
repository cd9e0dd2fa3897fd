"""Chains of matmuls on a CPU, whose intermediate rows stay in its caches."""

from __future__ import annotations

from collections.abc import Iterator

from ....hardware import DeviceSpec
from ....workload import MatmulChain
from ...family import Footprint, KernelFamily
from ...limits import core_limits
from ...prediction import Prediction
from ...shape import Size, rows_of
from ...tile_plan import TilePlan
from . import cost as chain_cost
from . import tiles as cpu_chain


class CpuChain(KernelFamily[MatmulChain]):
    """A task has some rows: in a row, or in blocks with packed weights."""

    names = ("", cpu_chain.PANELS)
    kind = "cpu"
    takes = (MatmulChain,)
    emitter = "relax_fusion.dlight_rules.cpu.matmul_chain:emit"
    error = 1.0

    def plans(self, work: MatmulChain, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield plans in a row, then in blocks."""
        return cpu_chain.candidates(work, dev)

    def violations(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Iterator[str]:
        """Yield what tiles and caches ask for, and what a core has not."""
        yield from cpu_chain.violations(plan, work, dev)
        yield from core_limits(self.footprint(plan, work, dev), plan, dev)

    def footprint(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec) -> Footprint:
        """Return accumulators, and the rows of the intermediate that a task holds."""
        stack, scratch = cpu_chain.stack_bytes(plan, work), cpu_chain.scratch_bytes(plan, work)
        return Footprint(0, cpu_chain.registers(plan, work), 1, stack, scratch)

    def predict(self, plan: TilePlan, work: MatmulChain, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the fused kernel costs."""
        return chain_cost.predict(work, plan, dev, rows_of(work, size))
