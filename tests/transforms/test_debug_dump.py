"""What a dump says of passes: which changed what, how large and how fast; equal between runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import tvm
from tvm import ir
from tvm.script import from_source

import relax_fusion
from relax_fusion.report.passes import PASSES, PassRecord, read_passes
from relax_fusion.transforms import record_passes
from relax_fusion.transforms.debug_dump import Wanted, phase_runner
from relax_fusion.transforms.record_passes import PassRecorder
from relax_fusion.transforms.running import name_of

MODULE = """
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((4, 32), "float32"), w: R.Tensor((32, 64), "float32")):
        with R.dataflow():
            m = R.matmul(x, w)
            s = R.nn.silu(m)
            R.output(s)
        return s

    @R.function
    def other(x: R.Tensor((4, 32), "float32")):
        with R.dataflow():
            a = R.add(x, x)
            R.output(a)
        return a
"""
PIPELINE = {"target": "llvm", "always_fuse": True}


def module() -> tvm.IRModule:
    return from_source(MODULE)


def without(mod: tvm.IRModule, name: str) -> tvm.IRModule:
    copy = mod.clone()
    del copy[copy.get_global_var(name)]
    return copy


def recorded(*passes: ir.transform.Pass) -> list[PassRecord]:
    mod = module()
    records: list[Future[PassRecord]] = []
    with ThreadPoolExecutor(1) as queue:
        PassRecorder(mod, queue).run(passes, mod, records)
    return [each.result() for each in records]


def test_changed_added_and_removed_functions() -> None:
    legalize = tvm.relax.transform.LegalizeOps()
    remove = tvm.transform.module_pass(lambda mod, _: without(mod, "other"), opt_level=0)
    first, second, third = recorded(legalize, tvm.relax.transform.Normalize(), remove)
    told = [(c.function, c.kind, c.what) for c in first.changes]
    assert told == [
        *(("main", "graph", "changed"), ("other", "graph", "changed")),
        *(("add", "kernel", "added"), ("matmul", "kernel", "added"), ("silu", "kernel", "added")),
    ]
    lines = "\n".join(first.changes[0].hunks[0].lines)
    assert "- " in lines and "+ " in lines and "R.call_tir(matmul" in lines
    assert (first.graphs, first.kernels) == (2, 3)
    assert second.changes == () and (second.lines, second.bindings) == (first.lines, first.bindings)
    (gone,) = third.changes
    assert (gone.function, gone.what, gone.after, gone.hunks) == ("other", "removed", 0, ())
    assert gone.before > 0 and (third.graphs, third.kernels) == (1, 3)
    assert third.lines == second.lines - gone.before


def test_only_what_changed_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    real = record_passes.function_text

    def noted(func: ir.BaseFunc) -> object:
        printed.append(str(func.attrs["global_symbol"]) if func.attrs else "?")
        return real(func)

    monkeypatch.setattr(record_passes, "function_text", noted)
    same = tvm.relax.transform.Normalize()
    rewritten = tvm.relax.transform.ConvertToDataflow()
    recorded(same, rewritten, same, rewritten, same)
    assert len(printed) == 2  # once each, for its size


def test_attributes_alone_are_told_without_the_text() -> None:
    legalize = tvm.relax.transform.LegalizeOps()
    pattern = tvm.relax.transform.AnnotateTIROpPattern()
    impure = tvm.relax.transform.RemovePurityChecking()
    _, second, third = recorded(legalize, pattern, impure)
    add, matmul, _ = second.changes
    assert (add.function, add.what, add.before) == ("add", "changed", add.after)
    assert [hunk.lines for hunk in add.hunks] == [("+attribute op_pattern = 0",)]
    assert matmul.hunks[0].lines == ("+attribute op_pattern = 4",)
    assert "attribute" not in "".join(third.changes[0].hunks[0].lines)  # purity is none


def test_passes_within_a_pass_are_that_pass() -> None:
    inner = tvm.transform.Sequential([tvm.relax.transform.LegalizeOps()], name="Own")
    unnamed = tvm.transform.Sequential([inner, tvm.relax.transform.FuseOps()])
    assert [record.name for record in recorded(inner, unnamed)] == ["Own", "Own, FuseOps"]
    assert name_of(tvm.relax.transform.CanonicalizeBindings()) == "CanonicalizeBindings"


def test_passes_that_the_context_turns_off_do_not_run() -> None:
    with tvm.transform.PassContext(disabled_pass=["LegalizeOps"]):
        (record,) = recorded(tvm.relax.transform.LegalizeOps())
    assert record.changes == ()


def test_a_pass_that_fails_is_named(tmp_path: Path) -> None:
    @tvm.transform.module_pass(opt_level=0, name="Failing")
    def failing(mod: tvm.IRModule, _: object) -> tvm.IRModule:
        raise relax_fusion.PipelineError("no")

    mod, passes = module(), [tvm.relax.transform.LegalizeOps(), failing]
    with (
        pytest.raises(relax_fusion.PipelineError, match="no"),
        phase_runner(Wanted(tmp_path), mod, {}) as run,
    ):
        run("debug-phase0.py", "trying", passes, mod)
    record = read_passes(tmp_path)
    assert record.failed == "Failing"
    assert [p.name for p in record.phases[0].passes] == ["LegalizeOps"]


def failing_pass() -> ir.transform.Pass:
    def fail(_mod: tvm.IRModule, _context: object) -> tvm.IRModule:
        raise relax_fusion.PipelineError("what the pass says")

    return tvm.transform.module_pass(fail, opt_level=0, name="Failing")


def test_a_pass_that_fails_is_told_though_the_dump_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    mod = module()
    with (
        pytest.raises(relax_fusion.PipelineError, match="what the pass says"),
        phase_runner(Wanted(tmp_path / "file"), mod, {}) as run,
    ):
        run("debug-phase0.py", "trying", [failing_pass()], mod)


def test_a_pass_that_fails_in_a_phase_that_is_not_dumped_is_named(tmp_path: Path) -> None:
    mod, passes = module(), [tvm.relax.transform.LegalizeOps(), failing_pass()]
    with (
        pytest.raises(relax_fusion.PipelineError, match="what the pass says"),
        phase_runner(Wanted(tmp_path, phases=("1",)), mod, {}) as run,
    ):
        run("debug-phase0.py", "trying", passes, mod)
    assert read_passes(tmp_path).failed == "Failing"


@pytest.mark.parametrize("name", ["index.html", "report.json"])
def test_what_is_of_something_else_is_not_replaced(tmp_path: Path, name: str) -> None:
    """A site has an index, and what `compile` made has a report."""
    (tmp_path / name).write_text("of somebody else")
    with pytest.raises(relax_fusion.PipelineError, match=f"no earlier dump, and its {name} would"):
        relax_fusion.partition(module(), debug_dump=tmp_path, **PIPELINE)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        (name, "of somebody else")
    ]


def test_what_fails_between_passes_leaves_no_report(tmp_path: Path) -> None:
    mod = module()
    dump = phase_runner(Wanted(tmp_path), mod, {})
    with pytest.raises(RuntimeError, match="later"), dump as run:
        run("debug-phase0.py", "trying", [tvm.relax.transform.LegalizeOps()], mod)
        raise RuntimeError("later")
    assert {path.name for path in tmp_path.iterdir()} == {"debug-phase0.py", PASSES}


def test_times_add_up_and_options_are_told(tmp_path: Path) -> None:
    relax_fusion.partition(module(), debug_dump=tmp_path, disable=["FuseProjections"], **PIPELINE)
    record = read_passes(tmp_path)
    assert [phase.file for phase in record.phases] == ["debug-phase0.py", "debug-phase1.py"]
    for phase in record.phases:
        assert phase.seconds == pytest.approx(sum(p.seconds for p in phase.passes))
    fusing = {p.name: p for p in record.phases[1].passes}
    assert fusing["FusePatterns"].changes[0].function == "main"
    assert "FuseProjections" not in fusing and record.failed == ""
    assert (
        record.options["disable"] == "FuseProjections" and record.options["always_fuse"] == "True"
    )
    assert "variable_bounds" not in record.options


def dumped(directory: Path, **options: object) -> dict[str, str]:
    relax_fusion.partition(module(), debug_dump=directory, **{**PIPELINE, **options})
    return {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}


def test_a_function_alone_with_what_it_calls(tmp_path: Path) -> None:
    files = dumped(tmp_path, dump_functions="main")
    for name in ("debug-phase0.py", "debug-phase1.py"):
        assert "def main" in files[name] and "def other" not in files[name]
    assert "def fuse_gated_ffn" in files["debug-phase1.py"]  # main calls it
    tvm.script.from_source(files["debug-phase1.py"])
    told = {c.function for p in read_passes(tmp_path).phases[1].passes for c in p.changes}
    assert "main" in told and any(name.startswith("fuse_gated_ffn") for name in told)
    files = dumped(tmp_path, dump_functions=["other"])
    assert "def main" not in files["debug-phase1.py"] and "fuse_" not in files[PASSES]


def test_a_phase_alone(tmp_path: Path) -> None:
    whole = dumped(tmp_path / "whole")
    files = dumped(tmp_path / "part", dump_phases=["1"])
    assert sorted(files) == ["debug-phase1.py", PASSES, "report.json"]
    assert files["debug-phase1.py"] == whole["debug-phase1.py"]
    (phase,) = read_passes(tmp_path / "part").phases
    assert [p.changes for p in phase.passes] == [
        p.changes for p in read_passes(tmp_path / "whole").phases[1].passes
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dump_functions": ["main", "mian"]}, "dump_functions names 'mian'; the module has main,"),
        ({"dump_phases": ["1", "7"]}, "dump_phases names '7'; there are 0, 1$"),
        ({"dump_phases": [1]}, "dump_phases"),
        ({"dump_phases": "1", "debug_dump": None}, "dump_phases needs debug_dump"),
        ({"dump_functions": "main", "debug_dump": None}, "dump_functions needs debug_dump"),
    ],
)
def test_what_there_is_not_is_refused(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    (tmp_path / PASSES).write_text("an earlier dump")
    given = {**PIPELINE, "debug_dump": tmp_path, **options}
    with pytest.raises(relax_fusion.PipelineError, match=words):
        relax_fusion.partition(module(), **given)
    assert (tmp_path / PASSES).read_text() == "an earlier dump"


def test_a_second_dump_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    own = ("notes.txt", "debug-phase9.py", "report.json.old")
    for name in (*own, "debug-phase5.py", "debug-final.py", "index.html"):
        (tmp_path / name).write_text("first")
    dumped(tmp_path)
    files = set(dumped(tmp_path, dump_phases=["0"]))
    assert files == {*own, "debug-phase0.py", PASSES, "report.json"}


@pytest.mark.slow
def test_two_dumps_are_equal_but_for_seconds(tmp_path: Path) -> None:
    texts = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        program = (
            "from tests.transforms.test_debug_dump import *\n"
            f"relax_fusion.partition(module(), debug_dump={str(out)!r}, **PIPELINE)\n"
        )
        env = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", program], check=True, env=env)
        files = sorted(out.iterdir())
        found = {path.name: path.read_text(encoding="utf-8") for path in files}
        found[PASSES] = re.sub(r'"seconds": [\d.e-]+', "", found[PASSES])
        texts.append(found)
    assert texts[0] == texts[1] and set(texts[0]) >= {PASSES, "debug-phase1.py"}
