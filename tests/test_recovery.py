"""A step that fails is left out and named; what fails without the library fails as before."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import ir, relax, tirx

import relax_fusion
from relax_fusion import FusingPass, Report, SchedulingError, phases
from relax_fusion.canonical import CANONICAL
from relax_fusion.dlight_rules import fused
from relax_fusion.options import make_options
from relax_fusion.passes import PATTERNS
from relax_fusion.pipeline import relax_fusion_pipeline
from relax_fusion.studio import report_html
from relax_fusion.transforms import report_leftovers

from .support.chains import Chain, module
from .support.quick import machine, quick_host, quick_passes, quickly

CHAIN = Chain(
    "main", "x[4,8] W[8,16] V[16,8]", "h = R.nn.silu(R.matmul(x, W)); y = R.matmul(h, V)", "y"
)


def broken(how: str) -> Any:
    """Return a pass that fails, or makes of a module what others fail on."""

    @tvm.transform.module_pass(opt_level=0, name="Broken")
    class Broken:
        def transform_module(self, mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
            if how == "raises":
                raise ValueError("no reason\nat all")
            mod = mod.clone()
            if how == "a pass":  # of a function that there is not
                call = relax.Call(ir.GlobalVar("nothing"), mod["main"].params)
                mod["other"] = relax.Function(mod["main"].params, call, relax.ObjectType())
            else:
                mod["other"] = for_a_gpu()
            return mod

    return Broken


def for_a_gpu() -> tirx.PrimFunc:
    """Return a function of which LLVM makes no code."""
    text = """
@T.prim_func(s_tir=True)
def other(a: T.handle):
    A = T.match_buffer(a, (4,), "float32")
    for i in T.serial(4):
        with T.sblock("b"):
            v = T.axis.spatial(4, i)
            A[v] = T.float32(0)
            T.evaluate(T.tvm_storage_sync("shared"))
"""
    return tvm.script.from_source(text)


def assert_runs(executable: Any) -> None:
    """Run the chain, and compare it with numpy."""
    x, w, v = CHAIN.arrays()
    made = machine(executable)["main"](*map(tvm.runtime.tensor, (x, w, v))).numpy()
    h = x @ w
    np.testing.assert_allclose(made, (h / (1 + np.exp(-h))) @ v, 1e-4, 1e-5)


@pytest.fixture
def _quick() -> Iterator[None]:
    with quick_passes():
        yield


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("how", "where", "error"),
    [
        ("raises", "Broken", "ValueError: no reason"),
        ("a pass", "", ""),
        ("code", "code generation", ""),
    ],
)
def test_a_pass_that_fails_or_has_others_fail_is_left_out(
    how: str, where: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted, report = Report(), Report()
    relax_fusion.build(module([CHAIN]), quick_host(), report=wanted)
    monkeypatch.setitem(CANONICAL, "Broken", broken(how))
    with pytest.warns(RuntimeWarning, match="relax_fusion: compiled without Broken") as told:
        made = relax_fusion.build(
            module([CHAIN]), quick_host(), report=report, debug_dump=tmp_path / "dump"
        )
    assert len([w for w in told if w.category is RuntimeWarning]) == 1
    assert_runs(made)
    (left,) = report.left_out
    assert left.name == "Broken" and where in left.where and error in left.error
    assert left.error in report.text() and left.name in report_html(report)
    for name in ("decisions", "leftovers", "launches", "schedules"):
        assert len(getattr(report, name)) == len(getattr(wanted, name)), name
    assert report.material.after == wanted.material.after
    assert (tmp_path / "dump" / "debug-final.py").exists()


def test_within_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that propose together, the one that fails is left out."""

    @tvm.transform.module_pass(opt_level=0, name="Broken")
    class Broken(FusingPass):
        def match(self, view: Any, var: relax.Var) -> None:
            raise ValueError("no reason")

    monkeypatch.setitem(PATTERNS, "Broken", Broken)
    pipeline = relax_fusion_pipeline(quick_host())
    with pytest.warns(RuntimeWarning, match=r"without Broken \(Broken failed: ValueError"):
        assert_runs(quickly(module([CHAIN]), pipeline))
    with pytest.raises(Exception, match="no reason"):  # the warning is an error in all tests
        quickly(module([CHAIN]), pipeline)


def raising(*_: object) -> None:
    raise LookupError("an emitter")


@pytest.mark.usefixtures("_quick")
def test_a_chain_without_a_kernel_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_emitter", lambda family: raising)
    both = module([CHAIN, Chain("other", "x[4,8]", "y = R.nn.softmax(x)", "y")])
    report = Report()
    with pytest.warns(RuntimeWarning, match="ScheduleKernels failed: SchedulingError"):
        assert_runs(relax_fusion.build(both, quick_host(), report=report, always_fuse=True))
    refused = {d.workload.key for d in report.declined if "is disabled" in str(d.decline)}
    assert refused and refused == {each.name for each in report.left_out}
    (first,) = wanted_decisions()
    with warnings.catch_warnings(), pytest.raises(SchedulingError, match="an emitter"):
        warnings.simplefilter("default")
        relax_fusion.build(both, quick_host(), plans={first.workload.key: first.plans})


def wanted_decisions() -> list[Any]:
    report = Report()
    relax_fusion.partition(module([CHAIN]), quick_host(), report=report, always_fuse=True)
    return report.fused


@pytest.mark.usefixtures("_quick")
def test_what_fails_without_the_library_says_where() -> None:
    mod = module([CHAIN])
    mod["other"] = for_a_gpu()
    with (
        pytest.raises(
            Exception, match=r"in code generation, .* without the passes of relax_fusion"
        ),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        relax_fusion.build(mod, quick_host())


def test_what_a_function_of_the_caller_raises_is_raised_at_once() -> None:
    calls = []

    def progress(sentence: str) -> None:
        calls.append(sentence)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"), warnings.catch_warnings():
        warnings.simplefilter("default")
        relax_fusion.partition(module([CHAIN]), quick_host(), progress=progress)
    assert len(calls) == 1


def test_a_report_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    monkeypatch.setattr(report_leftovers, "_Looker", raising)
    with pytest.warns(RuntimeWarning, match="without ReportLeftovers"):
        relax_fusion.partition(module([CHAIN]), quick_host(), report=report)
    assert report.decisions and not report.leftovers


def test_workloads_are_disabled_by_their_keys() -> None:
    first, report = wanted_decisions(), Report()
    keys = tuple({d.workload.key for d in first})
    options = make_options(quick_host(), {"disable": keys, "report": report, "always_fuse": True})
    relax_fusion.partition(module([CHAIN]), quick_host(), disable=options.disable, report=report)
    assert not {d.workload.key for d in report.fused} & {*keys}


@pytest.mark.parametrize("error", [ValueError("why"), KeyError(3), OSError(2, "x"), Exception()])
def test_any_error_names_its_pass(error: Exception) -> None:
    named = phases._named(phases._Failure(error, "FuseTIR", ""))
    assert named is error and "in FuseTIR, and without" in str(named.args)
