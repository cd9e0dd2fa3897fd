"""Measuring plans: what is measured, checked, kept and told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm import relax, rpc
from tvm.relax.frontend import nn

from relax_fusion import PipelineOptions, Report, make_target, pipeline, tune
from relax_fusion.cli import main
from relax_fusion.cli import tune as tune_module
from relax_fusion.errors import DatabaseError, PipelineError, TuningError
from relax_fusion.estimator import AttentionSize, Choice, candidates, choose
from relax_fusion.estimator.database import Database, Measured, package_version, workload_key
from relax_fusion.estimator.registry import is_launched, plan_of
from relax_fusion.estimator.tile_plan import OPEN, Box
from relax_fusion.hardware.target import device_of
from relax_fusion.tuning import device, search, trial
from relax_fusion.tuning.contests import MOST_TOLD, Contest, Tuning, shortlist
from relax_fusion.tuning.device import MeasuringDevice, tables_of
from relax_fusion.tuning.inputs import dims_at, draw
from relax_fusion.tuning.trial import Subject, Trial
from relax_fusion.workload import DynamicDim
from relax_fusion.workload.json import to_json
from relax_fusion.workload.reference import evaluate

from ..estimator.test_measured import module
from ..support.estimator_cases import GPU, attention, norm_matmul
from ..support.gpu import gpu
from ..support.quick import quick_host, quick_passes
from ..support.small_workloads import CACHE, GATED_SILU, RMS_ADDED, ROTATED

PLANS = 3


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile():
    """Compile few plans, without optimisations."""
    made = quick_host()
    with pytest.MonkeyPatch.context() as patch, quick_passes():
        patch.setattr("relax_fusion.hardware.target.host_target", lambda: made)
        patch.setattr(trial, "ENOUGH_S", 1e-3)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "times.jsonl"


def tuned(path: Path, **options) -> Tuning:
    return tune(module(), path, "llvm", always_fuse=True, **{"most": PLANS, **options})


def times_in(path: Path) -> dict[str, float]:
    """Return seconds by the key of the plan."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {plan_of(line["plan"]).key: line["seconds"] for line in lines}


def test_measuring_decides_what_is_compiled(path: Path) -> None:
    told: list[str] = []
    found = tuned(path, progress=told.append)
    assert found.measurements == len(times_in(path)) == PLANS
    assert (found.wrong, found.left) == ([], [])
    (outcome,) = found.outcomes
    name = f"{outcome.chain} ({outcome.key})"
    assert told == [
        f"{name}, 1 of 1 workloads",
        f"compiling {PLANS} plans of {name}",
        f"measuring {name}, any size",
    ]
    times = times_in(path)
    assert outcome.fastest.key == min(times, key=times.__getitem__)
    assert outcome.priced_s == times[outcome.priced.key] >= outcome.fastest_s
    report, other = Report(), next(key for key in times if key != outcome.priced.key)
    slower = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["library"] for line in slower} == {package_version("relax-fusion")}
    for line in slower:  # whatever the machine says, the file decides
        line["seconds"] = 1e-9 if plan_of(line["plan"]).key == other else 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in slower))
    options = {"always_fuse": True, "database": path, "report": report}
    made = relax.get_pipeline("relax_fusion", target=make_target("llvm"), **options)
    tvm.compile(module(), make_target("llvm"), relax_pipeline=made)
    assert report.fused[0].plans.plan_for(32).key == other


def test_what_has_a_time_is_not_measured_again(path: Path) -> None:
    tuned(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    assert tuned(path).measurements == 1
    found = tuned(path)
    assert found.measurements == 0 and len(found.outcomes) == 1
    assert tuned(path, again=True).measurements == PLANS


def changed(monkeypatch, wrong: Sequence[str], change) -> None:
    """Have functions of these names return something else."""
    results = MeasuringDevice.results

    def run(self, function, arguments):
        made = results(self, function, arguments)
        return [change(array) for array in made] if function[1] in wrong else made

    monkeypatch.setattr(MeasuringDevice, "results", run)


@pytest.mark.parametrize("change", [lambda a: a * 1.01, lambda a: a * np.nan], ids=["far", "nan"])
def test_a_wrong_kernel_has_no_time(path: Path, monkeypatch, change) -> None:
    changed(monkeypatch, ["run_1"], change)
    found = tuned(path)
    assert found.measurements == PLANS - 1
    assert len(found.wrong) == 1 and "at 32 rows, allowed" in found.wrong[0]
    assert "not recorded: " + found.wrong[0] in found.text()


def test_where_most_differ_none_is_trusted(path: Path, monkeypatch) -> None:
    changed(monkeypatch, ["run_0"], lambda a: a + 1)
    found = tuned(path)
    assert found.measurements == 0 and not path.read_text()
    assert len(found.wrong) == PLANS and "none is trusted" in found.wrong[0]
    assert found.text().startswith("nothing was measured")


def test_a_kernel_that_fails_is_told(path: Path, monkeypatch) -> None:
    def broken(_):
        raise RuntimeError("no such luck\nframes")

    changed(monkeypatch, ["run_2"], broken)
    found = tuned(path)
    assert found.measurements == PLANS - 1
    assert found.wrong[0].endswith("fails at 32 rows: RuntimeError: no such luck")


def test_a_kernel_that_fails_while_it_is_timed_is_told(path: Path, monkeypatch) -> None:
    sample = MeasuringDevice.sample

    def lost(self, function, *given):
        if function[1] == "run_1":
            raise RuntimeError("the session is lost")
        return sample(self, function, *given)

    monkeypatch.setattr(MeasuringDevice, "sample", lost)
    found = tuned(path)
    assert found.measurements == PLANS - 1
    assert found.wrong[0].endswith("fails at 32 rows: RuntimeError: the session is lost")


def test_a_plan_that_does_not_compile_leaves_the_others(path: Path, monkeypatch) -> None:
    build, bad = device.build_prim_func, []

    def refusing(work, table):
        bad.append(table)
        if table == bad[1]:
            raise ValueError("too large")
        return build(work, table)

    monkeypatch.setattr(device, "build_prim_func", refusing)
    found = tuned(path)
    assert found.measurements == PLANS - 1
    assert [s.endswith("does not compile: ValueError: too large") for s in found.wrong] == [True]


def test_many_failures_are_counted() -> None:
    found = Tuning(wrong=[f"plan {n}" for n in range(MOST_TOLD + 3)])
    assert "not recorded: 3 more" in found.text() and f"plan {MOST_TOLD}\n" not in found.text()


def test_no_time(path: Path) -> None:
    found = tuned(path, seconds=0)
    assert found.measurements == 0 and len(found.left) == 1
    assert f"no time was left for {found.left[0]}" in found.text()


def test_what_was_compiled_has_a_time(path: Path, monkeypatch) -> None:
    """Compiling alone takes longer than there is time."""
    monkeypatch.setattr(trial, "TOGETHER", 2)
    compile_some = Trial._compile

    def slow(self, *given) -> None:
        compile_some(self, *given)
        self.deadline = 0.0

    monkeypatch.setattr(Trial, "_compile", slow)
    told: list[str] = []
    found = tuned(path, seconds=3600, progress=told.append)
    assert [text for text in told if "compiling" in text] == [told[1]] and "2 plans" in told[1]
    assert found.measurements == 2 and len(found.left) == 1 and not found.nothing


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_that_measures_nothing_fails(path: Path, capsys, as_json: bool) -> None:
    arguments = ["tune", "demo-llama", "--target", "llvm", "--seconds", "0", "-q"]
    assert main([*arguments, "--database", str(path), *["--json"] * as_json]) == 1
    assert "nothing was measured: no time was left" in capsys.readouterr().err


def test_time_that_ends_between_two_sizes(path: Path) -> None:
    work = norm_matmul(DynamicDim("rows"), k=64, n=32, dtype="float32")
    target = make_target("llvm")
    plans = tuple(list(candidates(work, device_of(target), "tir"))[:2])
    contests = (Contest(Box(2), (1,), plans, 1.0), Contest(OPEN, (3,), plans, 1.0))
    tuning = Tuning()
    there = device.open_device(target, None)
    late = Trial(target, there, Database(path), float("inf"), tuning)
    record = Trial._record

    def last(self, *told) -> None:
        record(self, *told)
        self.deadline = 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trial, "_record", last)
        times = late.run(Subject(work, "chain", 1, contests), {})
    assert list(times) == [1] and len(times[1]) == 2
    assert tuning.left == [f"some plans of chain ({work.key})"]


def test_time_that_ends_between_sizes_of_a_range(path: Path, monkeypatch) -> None:
    work = norm_matmul(DynamicDim("rows"), k=64, n=32, dtype="float32")
    target = make_target("llvm")
    plans = tuple(list(candidates(work, device_of(target), "tir"))[:2])
    there, tuning = device.open_device(target, None), Tuning()
    late = Trial(target, there, Database(path), float("inf"), tuning)
    sampled = Trial._sampled

    def last(self, *given):
        self.deadline = 0.0
        return sampled(self, *given)

    monkeypatch.setattr(Trial, "_sampled", last)
    times = late.run(Subject(work, "chain", 1, (Contest(OPEN, (1, 3), plans, 1.0),)), {})
    assert list(times) == [1] and len(tuning.left) == 1


def test_an_interrupted_run_keeps_what_it_has(path: Path, monkeypatch) -> None:
    record = Trial._record

    def interrupted(self, *told) -> None:
        record(self, *told)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "_record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned(path)
    assert len(times_in(path)) == 1
    monkeypatch.undo()
    assert tuned(path).measurements >= PLANS - 1


def test_the_most_expensive_comes_first() -> None:
    work = norm_matmul(rows=4, dtype="float32")
    plan = next(candidates(work, GPU, "tir"))
    cheap = Subject(work, "", 3, (Contest(OPEN, (4,), (plan,), 1.0),))
    costly = replace(cheap, calls=2, contests=cheap.contests * 2)
    assert (cheap.expense, costly.expense) == (3.0, 4.0)


def test_expensive_chains_of_a_module_come_first(path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            self.small = nn.Linear(64, 256, bias=False)
            self.large = nn.Linear(256, 512, bias=False)
            self.norms = nn.ModuleList([nn.RMSNorm(n, -1, bias=False) for n in (64, 256)])

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.large(self.norms[1](self.small(self.norms[0](x))))

    spec = {"forward": {"x": nn.spec.Tensor([32, 64], "float32")}}
    mod = Two().export_tvm(spec)[0]
    how = {"always_fuse": True, "disable": ("FuseChains",)}
    found = tune(mod, path, "llvm", seconds=0, **how)
    report = Report()
    options = PipelineOptions(make_target("llvm"), report=report, **how)
    with options.target:
        passes = [*pipeline.phase0_annotate(options), *pipeline.phase1_fuse(options)]
        tvm.transform.Sequential(passes)(mod)
    keys = {d.workload.k: d.workload.key for d in report.fused}
    assert [name[-9:-1] for name in found.left] == [keys[256], keys[64]]


def test_a_gpus_caches_are_emptied(monkeypatch) -> None:
    asked = []

    class Loaded:
        def __getitem__(self, _name: str):
            return lambda *_: None

        def time_evaluator(self, *_, cache_flush_bytes: int, **__):
            asked.append(cache_flush_bytes)
            return lambda: SimpleNamespace(results=[1.0])

    function = (SimpleNamespace(module=Loaded()), "run_0")
    for on_gpu in (True, False):
        assert MeasuringDevice(tvm.cpu(), on_gpu).sample(function, [], 1) == [1.0]
    assert asked == [device.FLUSH_BYTES, 0]


def test_a_gpu_is_busy_before_the_first_sample_at_a_size(path: Path, monkeypatch) -> None:
    began = []
    monkeypatch.setattr(MeasuringDevice, "warm_up", lambda self, *_: began.append(None))
    sample = MeasuringDevice.sample

    def counted(self, *given):
        assert len(began) == 1
        return sample(self, *given)

    monkeypatch.setattr(MeasuringDevice, "sample", counted)
    assert tuned(path).measurements == PLANS


def test_a_gpu_is_kept_busy_and_a_cpu_is_left_alone(monkeypatch) -> None:
    clock = iter(range(10))
    monkeypatch.setattr(device.time, "monotonic", lambda: 0.5 * device.WARM_UP_S * next(clock))
    asked = []
    monkeypatch.setattr(MeasuringDevice, "sample", lambda self, *_: asked.append(self.on_gpu))
    for on_gpu in (False, True):
        MeasuringDevice(tvm.cpu(), on_gpu).warm_up((None, "run_0"), [])
    assert asked == [True]


KINDS = {
    "gated": (GATED_SILU, 3),
    "rotated": (ROTATED, 5),
    "several results": (RMS_ADDED, 2),
    "cache": (CACHE, AttentionSize(2, 3, 9)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_workload_is_measured(path: Path, kind: str) -> None:
    work, size = KINDS[kind]
    target = make_target("llvm")
    plans = tuple(list(candidates(work, device_of(target), "tir"))[:2])
    contests = (Contest(OPEN, (size,), plans, 1.0),)
    tuning = Tuning()
    there = device.open_device(target, None)
    measuring = Trial(target, there, Database(path), float("inf"), tuning)
    times = measuring.run(Subject(work, "", 1, contests), {})
    assert (tuning.wrong, tuning.left) == ([], [])
    assert set(times[size]) == set(plans)
    assert Database(path).measured(str(target)).of(work) == times


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_give_numbers(kind: str) -> None:
    work, size = KINDS[kind]
    sizes = dims_at(work, size)
    drawn = {o.name: draw(work, o, sizes) for o in work.graph.inputs}
    for result in evaluate(work.graph, drawn).values():
        assert np.isfinite(result).all() and 0.01 < np.abs(result).mean() < 10


def test_ranges_of_tritons_plans() -> None:
    work = norm_matmul(DynamicDim("rows"))
    tir = next(candidates(work, GPU, "tir"))
    one, two = list(candidates(work, GPU, "triton"))[:2]
    contests = (
        Contest(Box(1, keys=64), (1,), (one, tir), 1.0),
        Contest(Box(1), (1,), (one, tir), 1.0),
        Contest(Box(16), (16,), (one, two), 1.0),
        Contest(OPEN, (1024,), (two, tir), 1.0),
    )
    tables = tables_of(contests)
    assert tables[one].entries == ((1, one), (16, one), (None, two))
    assert tables[two].entries == ((16, two), (None, two))
    assert tables[tir].entries == ((None, tir),)


def test_shortlists_begin_with_the_plan_of_the_best_price() -> None:
    work = norm_matmul(DynamicDim("rows", 300))
    found = shortlist(work, GPU, "auto", 8)
    assert {is_launched(plan) for contest in found for plan in contest.plans} == {False, True}
    assert [c.box.rows for c in found][-1] is None and len(found) > 3
    assert all(len(set(c.plans)) == len(c.plans) <= 8 for c in found)


def test_reports_tell_times_of_every_range() -> None:
    work = attention(2, *map(DynamicDim, ("q_len", "kv_len")))
    times = {s: {c.plans[0]: 1e-3} for c in shortlist(work, GPU, "tir", 2) for s in c.sizes}
    measured = Measured("", {workload_key(json.loads(to_json(work))): times})
    choice = choose(work, GPU, always=True, measured=measured, backend="tir")
    assert isinstance(choice, Choice) and len(choice.predictions) > 3
    assert {p.measured_s for p in choice.predictions} == {1e-3}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rpc": "nowhere"}, TuningError, "rpc is 'nowhere'; must be host:port"),
        ({"rpc": "127.0.0.1:9"}, TuningError, "rpc 127.0.0.1:9: no session"),
        ({"seconds": -1}, TuningError, "seconds is -1"),
        ({"most": 0}, TuningError, "most is 0"),
        ({"surprise": 1}, PipelineError, "no argument 'surprise'"),
    ],
)
def test_arguments_that_are_refused(path: Path, options, error, words: str) -> None:
    with pytest.raises(error, match=words):
        tuned(path, **options)
    assert not path.exists()


@pytest.mark.skipif(bool(gpu()), reason="there is such a device")
def test_a_device_that_is_not_here(path: Path) -> None:
    words = r"target cuda: no such device on this machine; rpc='host:port'"
    with pytest.raises(TuningError, match=words):
        tune(module(), path, "h200")


def test_a_damaged_database_is_told_before_anything_is_compiled(path: Path, monkeypatch) -> None:
    path.write_text("damaged\n")
    monkeypatch.setattr(search, "shortlist", None)
    with pytest.raises(DatabaseError, match="line 1 is no JSON"):
        tuned(path, again=True)


def test_a_file_that_cannot_be_made_is_told_at_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(search, "shortlist", None)
    with pytest.raises(DatabaseError, match=r"none/x cannot be written \(No such file"):
        tuned(tmp_path / "none" / "x")


def test_a_session_of_tvms_rpc(path: Path, monkeypatch) -> None:
    asked: list[tuple] = []
    monkeypatch.setattr(rpc, "connect", lambda *where: asked.append(where) or rpc.LocalSession())
    assert tuned(path, rpc="there:9090").measurements == PLANS
    assert asked == [("there", 9090)]


def test_a_tracker_is_asked_by_a_key(path: Path, monkeypatch) -> None:
    class Tracker:
        def request(self, key: str, session_timeout: int) -> rpc.LocalSession:
            assert key == "board" and session_timeout > 0
            return rpc.LocalSession()

    monkeypatch.setattr(rpc, "connect_tracker", lambda *_: Tracker())
    assert tuned(path, rpc="there:9190/board").measurements == PLANS


class _Source:
    """A model of one chain, as the command opens it."""

    name = "one chain"
    mod, dtype, batch = module(), "float32", 1

    def check(self, _args) -> None:
        pass

    def model(self, _args):
        return self


def test_the_command(path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("relax_fusion.cli.source.open_source", lambda _: _Source())
    monkeypatch.setattr(tune_module, "bounds", lambda _: {})
    monkeypatch.setattr(tune_module, "described", lambda _: "float32")
    command = ["tune", "model", "--database", str(path), "--always-fuse"]
    command += ["--most", str(PLANS)]
    assert main([*command, "--seconds", "100"]) == 0
    found = capsys.readouterr()
    assert f"{PLANS} measurements added to {path}" in found.out
    assert "by price" in found.out and "measuring FuseRMSNormMatmul" in found.err
    assert main([*command, "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measurements"] == 0 and found["wrong"] == found["left"] == []
    (outcome,) = found["outcomes"]
    assert outcome["size"] == 32 and outcome["fastest_s"] <= outcome["priced_s"]
    assert outcome["fastest_s"] == min(times_in(path).values())
    if not gpu():
        assert main([*command, "--target", "h200", "-q"]) == 1
        assert "--rpc host:port" in capsys.readouterr().err
