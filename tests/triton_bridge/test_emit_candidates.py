"""`autotune`: from the pipeline's argument to functions with candidates, and what reports say."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tvm
from tvm import ir, relax, tirx
from tvm.relax.frontend import nn
from tvm.target import Target

from relax_fusion import PipelineOptions, Report
from relax_fusion.errors import KernelError, PipelineError
from relax_fusion.estimator.embedded import EMBEDDED_ATTR, Embedded
from relax_fusion.estimator.shape import rows_of
from relax_fusion.estimator.tile_plan import Box, PlanTable, TilePlan
from relax_fusion.launch.launcher import BEGIN, NEXT
from relax_fusion.launch.mixed import PLACE
from relax_fusion.passes.options import FuseOptions
from relax_fusion.pipeline import phase0_annotate, phase1_fuse
from relax_fusion.transforms.cuda_graph import RUN_OR_CAPTURE
from relax_fusion.triton_bridge import EmitTritonKernels
from relax_fusion.triton_bridge.kernel import KernelSource

from ..support.triton_modules import module_of, with_candidates
from .common import H200, kernels, launched, not_compiled
from .test_emit import GEMV, PERSISTENT, SPLIT, TALL, WORK, launchers

TIR = TilePlan(64, 64, 32, reg_m=4, reg_n=4, lanes=8, num_warps=8)


def emitted(found: Sequence[Embedded], table: PlanTable | None = None) -> ir.IRModule:
    plans = table or PlanTable.of([(each.box, each.plans[0]) for each in found])
    return EmitTritonKernels(H200)(with_candidates(module_of(WORK, plans, outputs=1), found))


RANGES = [Embedded(Box(16), (GEMV, SPLIT)), Embedded(Box(), (TALL, PERSISTENT))]


ASKED = [name.rsplit("_", 1)[0] for name in (BEGIN, NEXT)]
"""What `launched` makes of these names."""


@pytest.mark.usefixtures("not_compiled")
def test_plans_of_a_range_are_candidates() -> None:
    few = ["gemv", "matmul_pointer", "split_reduce"]
    many = ["row_norm", "matmul_pointer", "row_norm", "matmul_persistent"]
    assert launched(emitted(RANGES)) == [*ASKED, *few, *ASKED, *many]


@pytest.mark.usefixtures("not_compiled")
def test_the_body_is_a_loop_over_what_the_library_asks_for() -> None:
    text = emitted([Embedded(Box(), (GEMV, SPLIT))]).script(show_meta=False)
    lines = [line.strip() for line in text[text.index("def fused") :].splitlines()]
    shape = [
        r"(\w+).* = T\.call_cpacked\(\"begin_candidates\", 2\)",
        r"for (\w+) in range\(\w+\):",
        r"(\w+).* = T\.call_cpacked\(\"next_candidate\", \w+\)",
        r"if \w+ == 0:",
        r"T\.call_cpacked\(\"launch_gemv_\w+\", .*",
        r"if \w+ == 1:",
        r"T\.call_cpacked\(\"launch_matmul_pointer_\w+\", .*",
        r"T\.call_cpacked\(\"launch_split_reduce_\w+\", .*",
    ]
    start = next(i for i, line in enumerate(lines) if BEGIN in line)
    for pattern, line in zip(shape, lines[start : start + len(shape)], strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.usefixtures("not_compiled")
def test_a_range_of_one_plan_is_launched_at_once() -> None:
    mod = emitted([Embedded(Box(16), (GEMV,)), Embedded(Box(), (TALL,))])
    assert launched(mod) == ["gemv", "row_norm", "matmul_pointer"]


@pytest.mark.usefixtures("not_compiled")
def test_equal_kernels_of_ranges_are_one() -> None:
    three = [Embedded(Box(upper), (GEMV, SPLIT)) for upper in (1, 4, 16)]
    found = kernels(emitted([*three, Embedded(Box(), (PERSISTENT,))]))
    assert {name: len(each) for name, each in found.items()} == {
        "gemv": 1, "matmul_pointer": 1, "split_reduce": 1, "row_norm": 1, "matmul_persistent": 1
    }  # fmt: skip


@pytest.mark.usefixtures("not_compiled")
def test_kernels_of_tir_keep_their_place() -> None:
    found = [Embedded(Box(16), (TIR,)), Embedded(Box(), (TALL, PERSISTENT))]
    mod = emitted(found)
    assert launched(mod) == [*ASKED, "row_norm", "matmul_pointer", "row_norm", "matmul_persistent"]
    text = mod.script(show_meta=False)
    assert text.count("T.sblock(") > 3 and PLACE.value not in text


def failing(*names: str) -> Callable[..., list[Any]]:
    """Return what compiles all kernels but those of some functions."""

    def compile_them(sources: Sequence[KernelSource], **_: Any) -> list[Any]:
        made = zip(sources, not_compiled(sources), strict=True)
        return [KernelError(f"no {s.name}") if s.name in names else k for s, k in made]

    return compile_them


EMIT = "relax_fusion.triton_bridge.emit.try_kernels"


def test_a_plan_that_does_not_compile_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EMIT, failing("split_reduce"))
    with caplog.at_level(logging.WARNING):
        mod = emitted([Embedded(Box(), (GEMV, SPLIT, PERSISTENT))])
    assert launched(mod)[2:] == ["gemv", "row_norm", "matmul_persistent"]
    (said,) = caplog.messages
    assert said == f"fused: plan {SPLIT.key} is not among those that are measured: no split_reduce"
    monkeypatch.setattr(EMIT, failing("split_reduce", "gemv"))
    assert launched(emitted([Embedded(Box(), (GEMV, SPLIT, PERSISTENT))])) == [
        "row_norm",
        "matmul_persistent",
    ]


def test_where_no_plan_compiles_the_first_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EMIT, failing("split_reduce", "gemv"))
    with pytest.raises(KernelError, match=r"^no gemv$"):
        emitted([Embedded(Box(), (GEMV, SPLIT))])


class Layer(nn.Module):
    """A gated FFN and its down projection, some times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.gate_up = nn.Linear(256, 1024, bias=False)
        self.down = nn.Linear(512, 256, bias=False)

    def main(self, x: nn.Tensor) -> nn.Tensor:
        for _ in range(self.times):
            gate, up = nn.op.split(self.gate_up(x), 2, axis=-1)
            x = self.down(nn.op.silu(gate) * up)
        return x


def layer(rows: int | str, times: int = 1) -> ir.IRModule:
    module = Layer(times)
    module.to("float16")
    return module.export_tvm(spec={"main": {"x": nn.spec.Tensor([rows, 256], "float16")}})[0]


def fused(rows: int | str = "n", **options: Any) -> tuple[ir.IRModule, Report]:
    """Run the phases that decide."""
    report = Report()
    made = PipelineOptions(H200, report=report, always_fuse=True, **options)
    with made.target:
        passes = [*phase0_annotate(made), *phase1_fuse(made)]
        return tvm.transform.Sequential(passes)(layer(rows)), report


def marked(mod: ir.IRModule) -> list[str]:
    """Return the functions of which several plans are embedded."""
    found = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    return [name for name, func in found.items() if EMBEDDED_ATTR in (func.attrs or {})]


def test_reports_name_the_plans_of_each_range() -> None:
    mod, report = fused(autotune=True)
    assert sorted(marked(mod)) == sorted(d.kernel for d in report.fused) and report.fused
    text = report.text()
    for decision, record in zip(report.fused, json.loads(report.to_json()), strict=True):
        assert [(r.get("rows"), len(r["plans"])) for r in record["autotune"]] == [
            (each.box.rows, len(each.plans)) for each in decision.embedded
        ]
        last = decision.plans.plan_for(rows_of(decision.workload, decision.predictions[-1].size))
        assert record["autotune"][-1]["plans"][0] == last.to_attr()
        for each in decision.embedded:
            assert len(each.plans) == 4
            (line,) = [x for x in text.splitlines() if f"  {each.box}  " in x and told(each) in x]
            assert line
    assert "kernel" in text and "measured at the first call" in text


def told(each: Embedded) -> str:
    return "; ".join(f"{p.text} ({p.num_warps} warps, {p.num_stages} stages)" for p in each.plans)


def test_without_it_nothing_is_embedded() -> None:
    mod, report = fused()
    assert marked(mod) == [] and "measured at" not in report.text()
    assert all("autotune" not in record for record in json.loads(report.to_json()))


def test_of_a_users_plan_that_one_alone_is_embedded() -> None:
    given = PlanTable.single(PERSISTENT)
    mod, report = fused(autotune=True, plans={"FuseMatmulEpilogue": given})
    (own,) = [d for d in report.fused if d.pattern == "FuseMatmulEpilogue"]
    assert own.embedded == (Embedded(Box(), (PERSISTENT,), "given by the user"),)
    assert own.kernel not in marked(mod) and len(marked(mod)) == len(report.fused) - 1
    assert f"nothing: {PERSISTENT.text} (8 warps, 4 stages), given by the user" in report.text()


OLD = Target({"kind": "cuda", "arch": "sm_75", "model": "rtx3080"})


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("h200", {"backend": "tir"}, r"sm_80 or newer; backend is 'tir': .*sm_90"),
        (
            "llvm",
            {},
            r"autotune=True measures kernels of Triton, .*the target is no such GPU: .*llvm",
        ),
        ("llvm", {"backend": "tir"}, "the target is no such GPU"),
        (OLD, {}, r"the target is no such GPU: .*sm_75"),
        ("h200", {"autotune": 4}, "autotune is 4"),
    ],
)
def test_where_it_is_refused(target: str | Target, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        relax.get_pipeline("relax_fusion", target=target, **{"autotune": True, **options})


def test_passes_by_themselves_refuse_it_too() -> None:
    with pytest.raises(PipelineError, match=r"autotune=True .*backend is 'tir'"):
        FuseOptions(H200, autotune=True)


@pytest.mark.usefixtures("not_compiled")
def test_a_library_has_a_range_for_each_range_of_each_function() -> None:
    report = Report()
    given = {"autotune": True, "report": report, "variable_bounds": {"n": 64}, "always_fuse": True}
    pipeline = relax.get_pipeline("relax_fusion", target=H200, **given)
    (source,) = launchers(tvm.compile(layer("n"), H200, relax_pipeline=pipeline))
    ranges = sum(len(decision.embedded) for decision in report.fused)
    assert source.count("static rf_range rf_range_") == ranges > 4
    plans = {plan for d in report.fused for each in d.embedded for plan in each.plans}
    assert source.count("static rf_kernel rf_kernel_") <= 2 * len(plans)


@pytest.mark.usefixtures("not_compiled")
def test_functions_that_measure_are_recorded_as_graphs() -> None:
    """TVM runs a function before it records it: there it is measured."""
    pipeline = relax.get_pipeline("relax_fusion", target=H200, autotune=True, always_fuse=True)
    built = tvm.compile(layer(8, times=3), H200, relax_pipeline=pipeline)
    assert RUN_OR_CAPTURE in built.as_text()
    assert "rf_range_0" in launchers(built)[0]
