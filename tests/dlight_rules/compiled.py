"""The code that TVM makes of a contraction: its kernels, and how they are launched."""

from __future__ import annotations

import tvm
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import ContractionRule
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
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
    work: Work, plans: PlanTable | TilePlan, target: Target | None = None
) -> tuple[str, str]:
    """Return the CUDA source, and the code that launches the kernels."""
    table = PlanTable.single(plans) if isinstance(plans, TilePlan) else plans
    func = build_prim_func(work, table).with_attr("global_symbol", "main")
    target = target or cuda()
    noted = HostCode()
    with tvm.transform.PassContext(instruments=[noted]):
        library = tvm.compile(ContractionRule().apply(func, target, False).mod, target=target)
    return library.mod.imports[0].inspect_source(), noted.text
