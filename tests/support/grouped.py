"""Small functions as the pipeline lowers them, by our fusion plans or by TVM's FuseOps."""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.target import Target

from relax_fusion import Report, make_target
from relax_fusion.matching.pattern import calls_in
from relax_fusion.options import make_options
from relax_fusion.pipeline import (
    count_launches,
    phase0_annotate,
    phase1_fuse,
    phase2_lower,
    phase3_tir,
)

from .chains import HEADER

CPU = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2})
PHASES = (phase0_annotate, phase1_fuse, phase2_lower, phase3_tir, count_launches)


def function(params: str, body: str, result: str = "y") -> ir.IRModule:
    """Return ``main``, whose statements `body` has between semicolons."""
    lines = "".join(f"            {line.strip()}\n" for line in body.split(";"))
    return tvm.script.from_source(
        f"{HEADER}    @R.function\n    def main({params}):\n        with R.dataflow():\n{lines}"
        f"            R.output({result})\n        return {result}\n"
    )


def lowered(
    mod: ir.IRModule, target: Target | str = CPU, by_tvm: bool = False
) -> tuple[ir.IRModule, Report]:
    """Return a module before kernels are scheduled, and the report."""
    report = Report()
    options = make_options(make_target(target), {"report": report})
    passes = [p for phase in PHASES for p in phase(options) if p.info.name != "FoldConstants"]
    if by_tvm:
        passes = [relax.transform.FuseOps() if p.info.name == "FuseGroups" else p for p in passes]
    with options.target:
        return tvm.transform.Sequential(passes)(mod), report


def kernels(mod: ir.IRModule) -> list[str]:
    """Return the PrimFuncs that ``main`` calls, in order."""
    return [call.args[0].name_hint for call in calls_in(mod["main"], "relax.call_tir")]
