"""The CPU kernel of a chain of any kind, as the chain engine orders its loops."""

from __future__ import annotations

from tvm import tirx
from tvm.target import Target

from ...compute.scheduled_chain import scheduled_chain, scheduled_parts
from ...compute.weight_panels import TURNED, Packing
from ...estimator.families.cpu_generated.family import CpuChainPlan, schedule_of
from ...estimator.families.cpu_generated.price import Registers
from ...estimator.families.cpu_products import products_of, registers_of
from ...estimator.families.generated.plan import many
from ...estimator.tile_plan import TilePlan
from ...hardware.target import device_of
from ...workload import Chain
from .panels import transpose_in_registers


def emit(work: Chain, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernel of a plan: a parallel loop over the tiles of the result."""
    assert isinstance(plan, CpuChainPlan)
    registers = Registers.of(device_of(target))
    packing: Packing = "once" if plan.loops == "rows" else "blocks"
    schedule = schedule_of(work.graph, plan)
    func = scheduled_chain(work.graph, schedule, many(work.graph), registers, packing)
    return transpose_in_registers(func, TURNED, registers.lanes)


def emit_products(work: Chain, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernel of a plan: a parallel loop over the columns of each product."""
    parts = [(each.graph, each.schedule(plan)) for each in products_of(work.graph)]
    return scheduled_parts(work.graph, parts, many(work.graph), registers_of(plan), "none")
