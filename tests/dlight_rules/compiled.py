"""The code that TVM makes of a contraction: its kernels, and how they are launched."""

from __future__ import annotations

import tvm
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.dlight_rules.tensor_cores.dependent import launched_early
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.transforms.fixed_arguments import FIXED_ATTR, Fixed
from relax_fusion.workload import GatedFFN, NormMatmul

from .test_attention import cuda

Work = NormMatmul | GatedFFN


@tvm.ir.instrument.pass_instrument
class HostCode:
    """Notes the code that launches kernels."""

    def __init__(self) -> None:
        self.text = ""

    def run_after_pass(self, mod: tvm.ir.IRModule, info: tvm.ir.transform.PassInfo) -> None:
        if info.name == "tirx.SplitHostDevice":
            self.text = mod["main"].script()


def compiled(
    work: Work, plans: PlanTable | TilePlan, target: Target | None = None, *, fixed: bool = False
) -> tuple[str, str]:
    """Return the CUDA source, and the code that launches the kernels.

    `fixed` tells that no kernel in front writes any argument.
    """
    table = PlanTable.single(plans) if isinstance(plans, TilePlan) else plans
    func = build_prim_func(work, table).with_attr("global_symbol", "main")
    if fixed:
        known = Fixed((True,) * len(work.graph.inputs), leads=False)
        func = func.with_attr(FIXED_ATTR, known.to_attr())
    target = target or cuda()
    noted = HostCode()
    with tvm.transform.PassContext(instruments=[noted]):
        made = FusedRule().apply(func, target, False).mod["main"]
        library = tvm.compile(launched_early(made, target), target=target)
    return library.mod.imports[0].inspect_source(), noted.text
