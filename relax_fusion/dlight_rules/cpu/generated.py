"""The CPU kernel of a chain of any kind, as the chain engine orders its loops."""

from __future__ import annotations

from tvm import tirx
from tvm.target import Target

from ...compute.register_tiles import TURNED
from ...compute.scheduled_chain import scheduled_chain
from ...estimator.families.cpu_generated.registers import Registers
from ...estimator.families.generated.plan import TilingPlan, many, scheduled
from ...estimator.tile_plan import TilePlan
from ...hardware.target import device_of
from ...workload import Chain, MatmulChain
from .vector_transpose import transpose_in_registers


def emit(work: MatmulChain | Chain, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernel of a plan: a parallel loop over the tiles of the result."""
    assert isinstance(plan, TilingPlan)
    schedule = scheduled(work.graph, plan.expression, plan.tile)
    registers = Registers.of(device_of(target))
    func = scheduled_chain(work.graph, schedule, many(work.graph), registers)
    return transpose_in_registers(func, TURNED, registers.lanes)
