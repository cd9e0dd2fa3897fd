"""What the fusing passes can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import InstanceOf, SkipValidation
from tvm.target import Target

from ..errors import PipelineError, TilePlanError
from ..estimator.database import Measured
from ..estimator.family import Backend
from ..estimator.tile_plan import PlanTable, TilePlan
from ..hardware import DeviceSpec
from ..hardware.target import device_of, host_target
from ..report.decision import Decision
from ..validation import Count, check, shown
from ..workload.expert_load import ExpertLoad

Plans = Mapping[str, TilePlan | PlanTable]
Bound = Count
"""The largest value of a symbolic variable; sizes of tensors have to fit 64 bits."""


@dataclass(frozen=True)
class FuseOptions:
    """What a user can say about fusing; shared by all passes.

    Parameters
    ----------
    target : Target, optional
        The device; by default the target in scope, else this machine's CPU.
    plans : mapping of str to TilePlan or PlanTable
        Plans that replace the estimator's, by workload key or by pass name.
    always_fuse : bool
        Fuse also where the estimator predicts a loss: to look at kernels, or to measure them.
    bounds : mapping of str to int
        Largest values of symbolic variables, by name.
    decisions : list of Decision, optional
        Gets a record of every chain that was looked at.
    backend : {"auto", "tir", "triton"}
        Which families of kernels are looked at: those of TIR, the others, or all, of which for each
        size the one of the least price is taken.  Those that are not TIR are put in place by
        `relax_fusion.triton_bridge.EmitTritonKernels`, which runs later.
    allow_tf32 : bool
        Let tensor cores multiply float32 as tf32, which has 10 bits of mantissa.
    allow_int8_rows : bool
        Let CPUs round rows to int8 in front of weights of 4 and 8 bits, each by its largest number.
    validate : bool or "strict"
        Interpret what every kernel replaces beside what it computes, and leave a chain alone where
        they differ; "strict" raises `EquivalenceError` there.
    measured : Measured, optional
        Times on the device, by which plans are chosen where there are some:
        ``Database(path).measured(str(target))``.
    disable : tuple of str
        Names of passes that do not run, and keys of workloads of which no kernel is made: what
        they would take is free for others.
    expert_load : ExpertLoad, optional
        How many rows went to each expert of a model, for the prices of those that have as many.
    """

    target: Target | None = None
    plans: Annotated[Plans, SkipValidation] = field(default_factory=dict)
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    decisions: Annotated[list[Decision], InstanceOf()] | None = None
    always_fuse: bool = False
    backend: Backend = "tir"
    allow_tf32: bool = False
    validate: bool | Literal["strict"] = False
    measured: InstanceOf[Measured] | None = None
    disable: tuple[str, ...] = ()
    allow_int8_rows: bool = False
    expert_load: InstanceOf[ExpertLoad] | None = None

    def __post_init__(self) -> None:
        """Refuse values that no pass could honour, before any chain is looked at."""
        check(self, PipelineError)
        if not isinstance(self.plans, Mapping):
            raise TilePlanError(f"plans is {shown(self.plans)}; must map names to tile plans")
        for name, plan in self.plans.items():
            if not isinstance(plan, TilePlan | PlanTable):
                detail = f"is {shown(plan)}; must be a TilePlan or PlanTable"
                raise TilePlanError(f"plans[{shown(name)}] {detail}")

    def skew(self, experts: int, chosen: int) -> float:
        """Return how unevenly rows go to experts; 0 where `expert_load` counts other layers."""
        load = self.expert_load
        known = load is not None and (load.experts, load.chosen) == (experts, chosen)
        return load.skew if load is not None and known else 0.0

    def resolved_device(self) -> DeviceSpec:
        """Return the device of the target, as far as a user lets its kernels go."""
        dev = device_of(self.resolved_target())
        allowed = replace(dev.capabilities, int8_rows=self.allow_int8_rows)
        return replace(dev, capabilities=allowed) if self.allow_int8_rows else dev

    def resolved_target(self) -> Target:
        """Return the target, falling back to the one in scope and then to this machine."""
        return self.target or Target.current(allow_none=True) or host_target()
