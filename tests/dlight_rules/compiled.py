"""The code that TVM makes of a workload: its kernels, and how they are launched."""

from __future__ import annotations

import re

import tvm
from tvm import tirx
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.dlight_rules.tensor_cores.dependent import launched_early
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.transforms.fixed_arguments import FIXED_ATTR, Fixed
from relax_fusion.workload import Workload

from ..support.quick import quick

Plans = PlanTable | TilePlan

LIMITS = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}


def cuda() -> Target:
    """Return a CUDA target that needs no GPU to compile for."""
    return quick(Target({"kind": "cuda", "arch": "sm_90a", "thread_warp_size": 32, **LIMITS}))


def unscheduled(work: Workload, plans: Plans) -> tirx.PrimFunc:
    table = PlanTable.single(plans) if isinstance(plans, TilePlan) else plans
    return build_prim_func(work, table).with_attr("global_symbol", "main")


def scheduled(work: Workload, plans: Plans, target: Target) -> tvm.IRModule:
    """Return a module of the scheduled kernels of a workload, called main."""
    return FusedRule().apply(unscheduled(work, plans), target, False).mod


def library_of(
    work: Workload, plans: Plans, target: Target | None = None
) -> tvm.runtime.Executable:
    """Schedule and cross-compile a workload."""
    target = target or cuda()
    return tvm.compile(scheduled(work, plans, target), target=target)


def cuda_source(work: Workload, plans: Plans, target: Target | None = None) -> str:
    """Return the device code of a workload."""
    return library_of(work, plans, target).mod.imports[0].inspect_source()


def kernels(source: str) -> list[str]:
    """Return the text of each kernel; there is at least one."""
    starts = [m.start() for m in re.finditer(r'extern "C" __global__[^;{]*\{', source)]
    assert starts
    return [source[a:b] for a, b in zip(starts, [*starts[1:], len(source)], strict=True)]


def divergent_barriers(kernel: str) -> int:
    """Count the barriers inside of an ``if`` or ``else``; TVM writes each brace on its line."""
    inside: list[bool] = []
    count = 0
    for line in kernel.splitlines():
        text = line.strip()
        if text.startswith("}"):
            inside.pop()
        if "__syncthreads" in text:
            count += any(inside)
        if text.endswith("{"):
            inside.append(text.startswith(("if", "}")))
    return count


def shared_bytes(kernel: str) -> int:
    """Add up the static shared memory of a kernel."""
    size = {"float": 4, "half": 2, "nv_bfloat16": 2}
    found = re.findall(r"__shared__ (?:alignas\(\d+\) )?(\w+) \w+\[(\d+)\]", kernel)
    return sum(size[dtype] * int(count) for dtype, count in found)


@tvm.ir.instrument.pass_instrument
class HostCode:
    """Notes the code that launches kernels."""

    def __init__(self) -> None:
        self.text = ""

    def run_after_pass(self, mod: tvm.ir.IRModule, info: tvm.ir.transform.PassInfo) -> None:
        if info.name == "tirx.SplitHostDevice":
            self.text = mod["main"].script()


def compiled(
    work: Workload, plans: Plans, target: Target | None = None, *, fixed: bool = False
) -> tuple[str, str]:
    """Return the CUDA source, and the code that launches the kernels.

    `fixed` tells that no kernel in front writes any argument.
    """
    func, target, noted = unscheduled(work, plans), target or cuda(), HostCode()
    if fixed:
        every = (True,) * len(work.graph.inputs)
        func = func.with_attr(FIXED_ATTR, Fixed(every, False, every).to_attr())
    with tvm.transform.PassContext(instruments=[noted]):
        made = FusedRule().apply(func, target, False).mod["main"]
        library = tvm.compile(launched_early(made, target), target=target)
    return library.mod.imports[0].inspect_source(), noted.text
