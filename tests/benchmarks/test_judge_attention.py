"""Judging attention: what needs no GPU, and a run in which only the GPU is not real."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import plans as modules
from benchmarks.building import decided
from benchmarks.judge import judgement, report
from benchmarks.judge.attention import JudgeAttention
from benchmarks.runner import main
from benchmarks.suites.attention.cases import CASES, MASKS, Case
from benchmarks.suites.attention.module import Job, module_of
from benchmarks.suites.attention.peers import Problem
from benchmarks.suites.attention.subject import CaseIn
from relax_fusion.estimator import candidates
from relax_fusion.hardware import device
from relax_fusion.workload import Attention

H200 = device("h200")
DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    "name", ["S6", "decode-b4-1k", "prefill-2048", *(f"{mask}-2048" for mask in MASKS)]
)
def test_workloads_are_those_of_the_pass(name) -> None:
    case = CASES[name]
    made = module_of([Job(case, "float16", "bsnh", False, "h200")])
    (decision,) = [d for d in decided(made, "h200").decisions if d.workload is not None]
    found, expected = decision.workload, CaseIn(case, "float16").work()
    assert found.scale == pytest.approx(expected.scale)  # a constant in float32, written out
    if case.lengths[0] == case.lengths[1] and case.causal:
        assert found.causal in ("top_left", "bottom_right")  # the same
        found = replace(found, causal="bottom_right")
    assert replace(found, scale=expected.scale) == expected


@pytest.mark.parametrize("mask", ["", "bias", "where", "alibi"])
def test_functions_take_the_operands_of_a_problem(mask) -> None:
    case = Case("tiny", "short", (4, 2), (16, 16), 64, mask=mask)
    work = CaseIn(case, "bfloat16").work()
    plan = next(candidates(work, H200, "triton"))
    mod, names = modules.module_of(work, {plan: [None]})
    tensors = Problem(case, "bfloat16", "bsnh", "cpu").operands.values()
    types = [p.ty for p in mod[names[0]].params]
    assert [[int(d) for d in ty.shape] for ty in types] == [list(t.shape) for t in tensors]
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
    assert [str(ty.dtype) for ty in types] == dtypes


@pytest.fixture
def run(monkeypatch, tmp_path, cpu_in_place_of_a_gpu):
    monkeypatch.setitem(CASES, "tiny", Case("tiny", "short", (4, 2), (16, 16), 64, causal=True))
    made = iter(range(10**6))

    def call_of(name, tensors):
        right = Problem(CASES["tiny"], "float16", "bsnh", "cpu").rounded().transpose(1, 2)
        factor = 1.5 if next(made) == 1 else 1.0
        return lambda: right * factor

    monkeypatch.setattr(
        modules,
        "compile_plans",
        lambda work, plans, target: (dict.fromkeys(plans, (SimpleNamespace(call=call_of), "")), {}),
    )

    def call(*more: str) -> tuple[int, dict]:
        argv = ["--cases", "tiny", "--most", "12", "--results", str(tmp_path), *more]
        status = main(JudgeAttention, argv)
        (path,) = tmp_path.glob("*-judge_attention.json")
        return status, json.loads(path.read_text())

    return call


def test_a_whole_run_and_judging_it_again(run, tmp_path, capsys) -> None:
    status, written = run()
    (group,) = written["cases"]
    assert status == 1 and group["case"] == "tiny"  # one plan is wrong
    assert len(group["wrong"]) == 1 and len(group["plans"]) == 11
    assert isinstance(judgement.from_json(group, CaseIn.from_json).subject.work(), Attention)
    (path,) = tmp_path.glob("*-judge_attention.json")
    argv = ["--from", str(path), "--results", str(tmp_path / "again")]
    assert main(JudgeAttention, argv) == 0
    assert "tiny: 11 plans, best" in capsys.readouterr().out
    _, again = run("--resume", str(path))
    assert again["cases"] == written["cases"]


def test_the_record_is_judged_without_a_gpu() -> None:
    groups = judgement.load(DATA / "2026-11-21-judge_attention.json", CaseIn.from_json)
    # Every fourth: to judge all takes seconds
    found = report.overall(judgement.judge_all(groups[::4], H200))
    assert found["cases"] == 12 and found["choice_not_timed"] == 0
    assert found["mean_regret"] < 0.015 and found["max_regret"] < 0.1
    assert found["mean_correlation"] > 0.92 and found["mean_error_near_best"] < 0.09
    assert found["mean_table_regret"] < 0.15
