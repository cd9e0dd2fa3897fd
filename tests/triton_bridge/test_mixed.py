"""One function of kernels of both back ends: which sizes come to which, and that it compiles."""

from __future__ import annotations

import re
from dataclasses import replace

import tvm
from tvm import ir, relax

from relax_fusion import Report
from relax_fusion.dlight_rules import FusedRule, ScheduleKernels
from relax_fusion.estimator import candidates
from relax_fusion.estimator.tile_plan import Box, PlanTable, TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.triton_bridge import EmbedTritonKernels, EmitTritonKernels
from relax_fusion.workload import DynamicDim, NormMatmul, Projection, Workload

from ..support.contraction_cases import RMS
from ..support.estimator_cases import CACHE
from ..support.triton_modules import module_of

H200 = make_target("h200")
STEPS = Projection(256, "nk", ("bias", "residual"))
WORK = NormMatmul(DynamicDim("rows"), 256, (STEPS,), RMS, "float16", "float16")


def plan(work: Workload, backend: str, family: str) -> TilePlan:
    """Return the first plan of a family."""
    found = candidates(work, device_of(H200), backend)
    return next(p for p in found if p.family == family)


TRITON, FEW = plan(WORK, "triton", "pointer"), plan(WORK, "tir", "few_rows")
WGMMA = plan(WORK, "tir", "wgmma")
TABLE = PlanTable(((4, FEW), (16, TRITON), (64, WGMMA), (None, replace(TRITON, block_m=64))))


def scheduled(work: Workload, table: PlanTable) -> ir.IRModule:
    """Return the module with the kernels of both back ends in place."""
    mod = ScheduleKernels(H200, [FusedRule()])(module_of(work, table, outputs=1))
    return EmitTritonKernels(H200)(mod)


def branches(mod: ir.IRModule) -> list[str]:
    """Return conditions, launches and grids of the fused function, as they follow each other."""
    found = []
    for line in mod["fused"].script(show_meta=False).splitlines():
        text = line.strip()
        if text.startswith("if T.tvm_thread_invariant"):
            found.append(re.sub(r"T\.tvm_thread_invariant|T\.int64|^if|:$|[()]", "", text).strip())
        elif "launch_" in text and "call_cpacked" in text:
            found.append("triton")
        elif "blockIdx.x" in text and "thread_binding" in text:
            found.append("tir")
    return found


def test_sizes_of_each_back_end() -> None:
    mod = scheduled(WORK, TABLE)
    assert branches(mod) == [
        *("not rows <= 4 and rows <= 16", "triton"),
        *("not rows <= 4 and not rows <= 64", "triton", "triton"),
        "rows > 0",
        *("rows <= 4", "tir", "tir"),
        *("tir", "tir"),
    ]


def test_a_static_size_meets_one_back_end() -> None:
    for rows, backend in ((3, "tir"), (10, "triton"), (50, "tir"), (100, "triton")):
        found = branches(scheduled(replace(WORK, rows=rows), TABLE))
        assert set(found) == {backend}, rows


def test_boxes_of_batch_and_keys() -> None:
    first, second = plan(CACHE, "triton", "attention"), plan(CACHE, "tir", "fma_attention")
    table = PlanTable(((Box(1, keys=512, batch=4), first), (None, second)))
    found = branches(scheduled(CACHE, table))
    assert found[0] == "q_len <= 1 and kv_len <= 512 and batch <= 4"
    assert found.count("triton") >= 1 and "tir" in found


def test_a_mixed_module_compiles() -> None:
    source = """
    @R.function
    def main(x: R.Tensor(("n", 256), "float16"), w: R.Tensor((256, 256), "float16"),
             r: R.Tensor(("n", 256), "float16")):
        with R.dataflow():
            t = R.permute_dims(w)
            m = R.matmul(x, t)
            y = R.add(m, r)
            R.output(y)
        return y
    """
    mod = tvm.script.from_source(f"@I.ir_module\nclass M:\n{source}")
    report = Report()
    plans = {"FuseMatmulEpilogue": PlanTable(((4, FEW), (None, TRITON)))}
    pipeline = relax.get_pipeline("relax_fusion", target=H200, plans=plans, report=report)
    executable = tvm.compile(mod, H200, relax_pipeline=pipeline)
    (decision,) = report.fused
    assert decision.plans is not None
    assert {p.family for _, p in decision.plans.boxes} == {"few_rows", "pointer"}
    kinds = {m.kind for m in executable.mod._collect_from_import_tree(lambda m: True)}
    assert "cuda" in kinds


def test_it_is_embedded_once() -> None:
    mod = scheduled(WORK, TABLE)
    assert EmitTritonKernels(H200)(mod).same_as(mod)
    again = EmbedTritonKernels()(mod)
    assert EmbedTritonKernels()(again).same_as(again)
