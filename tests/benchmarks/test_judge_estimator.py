"""Judging matmuls: what needs no GPU, and a run in which only the GPU is not real."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_timing as timing
from benchmarks import plans as modules
from benchmarks.building import Built
from benchmarks.judge import judgement, matmul, report
from benchmarks.judge.judgement import Group, spearman
from benchmarks.judge.matmul import JudgeMatmul
from benchmarks.recording import compact_json
from benchmarks.report import plan_words
from benchmarks.runner import main
from benchmarks.suites.matmul.cases import Chain
from benchmarks.suites.matmul.peers import Problem, Weights
from benchmarks.suites.matmul.subject import CASES, ChainAt
from relax_fusion.estimator import candidates, predict
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import device
from relax_fusion.workload import GatedFFN, NormMatmul

H200 = device("h200")
DATA = Path(__file__).parents[1] / "data"
QKV = Chain("qkv", "1b")
BUILT = SimpleNamespace(call=None)


def plans(chain: Chain, rows: int) -> list[TilePlan]:
    """Return the feasible plans, fastest by prediction first."""
    work = ChainAt(chain, rows, "float16").work()
    found = list(candidates(work, H200, "triton"))
    return sorted(found, key=lambda p: predict(work, p, H200, rows).seconds)


def group(rows: int = 16, chain: Chain = QKV, slower: float = 1.0) -> Group:
    """Return timings that are the predictions, the first plan's times `slower`."""
    subject, found = ChainAt(chain, rows, "float16"), plans(chain, rows)
    ms = [1e3 * predict(subject.work(), p, H200, rows).seconds for p in found]
    chosen = judgement.ask(subject, H200).plan
    ms[found.index(chosen)] *= slower
    return Group(subject, found, ms, feasible=len(found))


def test_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 99]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [9, 7, 5, 1]) == pytest.approx(-1)
    # by hand: ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3
    assert spearman([1, 5, 5, 7], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 2], [1, 2])) and math.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_workloads_are_those_of_the_passes() -> None:
    works = {c: ChainAt(Chain(c, "8b"), 16, "bfloat16").work() for c in CASES}
    assert isinstance(works["gate_up"], GatedFFN) and works["gate_up"].n == 14336
    down = works["down"]
    assert isinstance(down, NormMatmul) and down.norm is None and down.k == 14336
    assert [p.epilogue for p in down.outputs] == [("residual",)]
    assert works["qkv"].norm is not None and works["qkv"].n == 6144
    for case, work in works.items():
        assert work.flops(rows=16) == Chain(case, "8b").flops(16)


def test_a_model_that_is_right_has_no_regret() -> None:
    j = judgement.judge(group(), H200)
    assert j.regret == pytest.approx(0) and j.correlation == pytest.approx(1)
    assert j.choice_timed and 0 < j.choose_ms < 5000


def test_regret_is_what_the_choice_loses_to_the_best() -> None:
    g = group(slower=1.5)
    j = judgement.judge(g, H200)
    assert j.regret == pytest.approx(1.5 * j.predicted_ms[j.chosen] / g.ms[j.best] - 1)
    assert j.regret > 0.4 and g.plans[j.chosen] == plans(QKV, 16)[0]
    assert j.correlation < 1


def test_where_the_choice_was_not_timed_ties_count_against_it(monkeypatch) -> None:
    g = group()
    chosen = judgement.ask(g.subject, H200).plan
    kept = [i for i, p in enumerate(g.plans) if p != chosen]
    g.plans, g.ms = [g.plans[i] for i in kept], [g.ms[i] for i in kept]
    j = judgement.judge(g, H200)
    assert not j.choice_timed and j.predicted_ms[j.chosen] == min(j.predicted_ms)
    monkeypatch.setattr(judgement, "predict", lambda *_: SimpleNamespace(seconds=1.0))
    j = judgement.judge(g, H200)
    assert g.ms[j.chosen] == max(g.ms) and g.ms[j.best] == min(g.ms)


def test_groups_are_stored_and_read(tmp_path) -> None:
    g = group()
    g.wrong, g.failed = [{"plan": "a", "why": "b"}], [{"plan": "c", "why": "d"}]
    path = tmp_path / "timings.json"
    path.write_text(compact_json({"groups": [g.to_json()]}))
    assert judgement.load(path, ChainAt.from_json) == [g]
    words = json.loads(path.read_text())["groups"][0]["plans"]
    assert list(words) == [plan_words(p) for p in g.plans]
    assert all(judgement.plan_of(text) == p for text, p in zip(words, g.plans, strict=True))
    with pytest.raises(ValueError, match="'tir 16x16' is no plan"):
        judgement.plan_of("tir 16x16")


def test_plans_that_are_candidates_no_more_are_no_choice_but_may_be_the_best() -> None:
    g = group()
    work = g.subject.work()
    old = TilePlan(16, 32, 64, num_stages=5, num_warps=4, family="pointer")
    assert old not in plans(QKV, 16)
    before = judgement.judge(g, H200)
    g.plans, g.ms = [*g.plans, old], [*g.ms, min(g.ms) / 2]
    assert predict(work, old, H200, 16).seconds > 0
    j = judgement.judge(g, H200)
    assert (before.superseded, j.superseded) == (0, 1)
    assert g.plans[j.best] == old and g.plans[j.chosen] != old
    assert j.regret == pytest.approx(1)
    assert j.correlation == before.correlation > j.correlation_of_all
    assert "with 1 timings of plans that are candidates no more" in report.summary([(g, j)])
    assert "candidates no more" not in report.summary([(group(), before)])


@pytest.mark.usefixtures("without_cuda_matmul")
def test_the_record_is_judged_without_a_gpu() -> None:
    path = DATA / "2026-11-21-judge_estimator.json"
    groups = judgement.load(path, ChainAt.from_json)
    assert {g.subject.chain.size for g in groups} == {"1b", "8b", "70b"}
    overall = report.overall(judgement.judge_all(groups, H200))
    assert overall["cases"] == len(groups) == 43
    assert 0 <= overall["mean_regret"] < 0.02 and overall["max_regret"] < 0.1
    assert overall["mean_correlation"] == overall["mean_correlation_of_all"] > 0.87


def test_a_sample_holds_the_choice_and_the_first_by_prediction() -> None:
    found = plans(QKV, 1)
    subject = ChainAt(QKV, 1, "float16")
    few, feasible = judgement.selected(subject, H200, 20)
    assert feasible == len(found) > 20 == len(few) == len(set(few))
    work = subject.work()
    limit = sorted(predict(work, p, H200, 1).seconds for p in found)[judgement.TOP - 1]
    assert sum(predict(work, p, H200, 1).seconds <= limit for p in few) >= judgement.TOP
    assert judgement.ask(subject, H200).plan in few
    assert few == judgement.selected(subject, H200, 20)[0]
    everything, _ = judgement.selected(subject, H200, 1000)
    assert set(found) <= set(everything)


@pytest.mark.parametrize("case", CASES)
def test_functions_take_the_tensors_of_a_problem(case) -> None:
    chain = Chain(case, "1b")
    work = ChainAt(chain, 3, "bfloat16").work(symbolic=True)
    plan = next(candidates(work, H200, "triton"))
    mod, names = modules.module_of(work, {plan: [16, None, 16]})
    problem = Problem(Weights(chain, "bfloat16", "cpu"), 3)
    taken = []
    fake = SimpleNamespace(device=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvm.runtime.from_dlpack", lambda t: taken.append(t) or fake)
        built = Built(None, None, {"None": {names[0]: None}})
        tensors = matmul.operands(problem)
        built.call(names[0], tensors)
    params = mod[names[0]].params
    assert [len(p.ty.shape.values) for p in params] == [t.dim() for t in taken]
    for param, tensor in zip(params, taken, strict=True):
        fixed = zip(param.ty.shape.values, tensor.shape, strict=True)
        assert all(int(d.value) == size for d, size in fixed if hasattr(d, "value"))


def test_a_plan_that_does_not_compile_is_found_among_others() -> None:
    work = ChainAt(QKV, 1024, "float16").work(symbolic=True)
    small = sorted(plans(QKV, 1024), key=lambda p: (p.block_m * p.block_n, p.num_stages))
    good = [p for p in small if p.family == "pointer"][:2]
    wide = replace(good[0], num_stages=14)  # more shared memory than there is
    ranges = {p: [None] for p in (good[0], wide, good[1])}
    compiled, failed = modules.compile_plans(work, ranges, "h200")
    assert set(compiled) == set(good)
    assert list(failed) == [wide] and "shared memory" in failed[wide]


class OnCpu:
    """A call and a sampler of `gpu_timing`, without a GPU: the i-th plan takes i + 1 ms."""

    def __init__(self, call=None) -> None:
        self.launch = call

    def checked_result(self) -> torch.Tensor:
        return self.launch()

    def sample_ms(self, launches) -> dict:
        return {name: [i + 1.0] * 3 for i, name in enumerate(launches)}


@pytest.fixture
def run(monkeypatch, tmp_path):
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    fake = SimpleNamespace(DEVICE="cpu", Call=OnCpu, Sampler=OnCpu, ceilings=lambda _: {})
    for name, value in vars(fake).items():
        monkeypatch.setattr(timing, name, value)
    monkeypatch.setattr(
        modules,
        "compile_plans",
        lambda work, ranges, target: (dict.fromkeys(ranges, (BUILT, "")), {}),
    )
    monkeypatch.setattr(matmul, "operands", lambda problem: problem)
    monkeypatch.setattr(BUILT, "call", lambda name, problem: problem.eager)

    def call(*more: str) -> tuple[int, dict]:
        argv = ["--sizes", "1b", "--cases", "out", "--rows", "1", "3", "--results", str(tmp_path)]
        status = main(JudgeMatmul, [*argv, *more])
        (path,) = tmp_path.glob("*-judge_matmul.json")
        return status, json.loads(path.read_text())

    return call


def test_a_whole_run(run, tmp_path, capsys) -> None:
    status, written = run("--most", "15")
    assert status == 0
    assert [g["rows"] for g in written["cases"]] == [1, 3]
    assert all(15 <= len(g["plans"]) <= 16 for g in written["cases"])
    assert written["cases"][0]["feasible"] == len(plans(Chain("out", "1b"), 1))
    printed = capsys.readouterr().out
    assert "1b out 3: 15 plans" in printed and "top-1 regret: mean" in printed
    assert "| 1b out 3 | float16 | 15 |" in next(tmp_path.glob("*.md")).read_text()


def test_wrong_and_failing_plans_have_no_time_and_fail_the_run(run, monkeypatch) -> None:
    turns = iter(range(10**6))

    def call_of(name, problem):
        turn = next(turns)
        if turn == 0:
            raise RuntimeError("refused\nlaunch")
        return (lambda: problem.eager() * 1.1) if turn == 1 else problem.eager

    monkeypatch.setattr(BUILT, "call", call_of)
    status, written = run("--most", "12", "--rows", "1")
    (stored,) = written["cases"]
    assert status == 1
    assert stored["failed"][0]["why"] == "RuntimeError: refused launch"
    assert stored["wrong"][0]["why"].startswith("error ")
    assert len(stored["plans"]) == 10


def judged_again(path, results, *more: str) -> int:
    return main(JudgeMatmul, ["--from", str(path), "--results", str(results), *more])


def test_stored_timings_are_judged_again_and_keep_their_facts(run, tmp_path, capsys) -> None:
    run("--most", "30")
    (path,) = tmp_path.glob("*-judge_matmul.json")
    then = json.loads(path.read_text())
    old = {**then, "date": "2001-02-03", "gpu": "a GPU of then"}
    old["overall"] = {**then["overall"], "mean_regret": 0.77}
    path.write_text(compact_json(old))
    again = tmp_path / "again"
    for _ in range(2):
        assert judged_again(path, again, "--note", "Fitted to these timings.") == 0
        path = again / "2001-02-03-judge_matmul.json"
        now = json.loads(path.read_text())
        facts = [k for k in old if k not in ("overall", "cases")]
        assert {k: now[k] for k in facts} == {k: old[k] for k in facts}
        assert now["cases"] == then["cases"]
        assert now["overall_when_timed"] == old["overall"]
        assert now["overall"]["mean_regret"] == then["overall"]["mean_regret"]
    text = path.with_suffix(".md").read_text()
    assert "Fitted to these timings." in text and "regret mean 77.0%" in text
    assert "top-1 regret: mean" in capsys.readouterr().out
    judged_again(path, again)
    assert json.loads(path.read_text())["note"] == "Fitted to these timings."
