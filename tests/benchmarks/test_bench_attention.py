"""The suite attention: what needs no GPU, and a whole run with a CPU in its place."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import recording
from benchmarks.gpu_timing import errors_of
from benchmarks.runner import Runner, main
from benchmarks.suites.attention import ours, report
from benchmarks.suites.attention.cases import CASES, Case
from benchmarks.suites.attention.module import Job, module_of
from benchmarks.suites.attention.peers import Problem
from benchmarks.suites.attention.suite import Attention, allowed_errors, within

from ..support.slow import sampled

TINY = {"heads": (4, 2), "lengths": (24, 24), "head_dim": 16, "batch": 2}


def entry(name: str = "S1", **changes) -> dict:
    case = CASES[name]
    made = {
        "case": name,
        "group": case.group,
        "bytes": case.bytes,
        "flops": case.flops,
        "floor_us": case.floor_us(4.3),
        "copy_tb_s": 4.3,
        "launch_us": 3.0,
        "us": {"ours": 8.0, "flash": 14.0, "cudnn": 12.0, "flex": 15.0},
        "errors": {"ours": [4e-4, 2e-4], "flash": [4e-4, 2e-4], "eager": [8e-4, 4e-4]},
        "allowed_errors": [8e-4, 4e-4],
        "plan": "groups 64x128x64 w12 s4",
        "wrong": [],
        "failed": {},
        "no_graph": {},
    }
    return {**made, **changes}


def suite(*argv: str) -> Attention:
    return Attention(Attention.arguments(argv))


def record(*entries: dict) -> dict:
    kind = suite().kind()
    facts = {**recording.facts(), "date": "2026-01-02", "gpu": "some GPU"}
    facts |= {"copy_tb_s": 4.3, "read_tb_s": 4.6}
    return {**facts, **kind, "cases": list(entries)}


@pytest.mark.parametrize(
    ("name", "us"),
    [
        ("S1", 0.68),
        ("S9", 0.17),
        ("bert-base-b32", 32.6),
        ("prefill-2048", 43.5),
        ("prefill-8192", 696.0),
        ("decode-b1-8k", 7.8),
        ("window-8192", 84.3),
        ("bias-2048", 87.0),
    ],
)
def test_floor_is_that_of_traffic_or_operations_on_visible_pairs(name, us) -> None:
    assert CASES[name].floor_us(4.3) == pytest.approx(us, rel=0.02)


def test_operations_on_visible_pairs_are_counted_exactly() -> None:
    for case in (
        Case("", "", (1, 1), (5, 7), 8),
        Case("", "", (1, 1), (5, 7), 8, causal=True),
        Case("", "", (1, 1), (900, 900), 8, causal=True, mask="window"),
    ):
        queries, keys = case.lengths
        seen = 0
        for i in range(queries):
            p = i + keys - queries
            first = max(0, p - 511) if case.mask == "window" else 0
            seen += (p + 1 - first) if case.causal else keys
        assert case.flops == pytest.approx(4 * seen * 8, rel=1e-12)


def test_traffic_counts_every_operand_once() -> None:
    decode = CASES["decode-b4-1k"]
    assert decode.kv_bytes == 2 * 2 * 4 * 8 * 1024 * 128
    assert decode.bytes == decode.kv_bytes + 2 * 2 * 4 * 32 * 128
    plain = Case("", "", (32, 8), (2048, 2048), 128)
    assert CASES["bias-2048"].bytes - plain.bytes == 2 * 32 * 2048 * 2048
    assert CASES["alibi-2048"].bytes - plain.bytes == 4 * 32


def test_errors_are_held_against_sdpa_else_flex_else_separate_operators() -> None:
    errors = {"eager": [9.0, 5.0], "flex": [3.0, 2.0], "flash": [1.0, 0.5], "cudnn": [0.9, 0.7]}
    assert allowed_errors(errors) == [2.0, 1.4]
    del errors["flash"], errors["cudnn"]
    assert allowed_errors(errors) == [6.0, 4.0]
    del errors["flex"]
    assert allowed_errors(errors) == [18.0, 10.0]
    assert within([2.0, 1.4], [2.0, 1.4]) and not within([float("nan"), 0], [1, 1])
    assert not within([0.0, 1.5], [2.0, 1.4])


def test_means_are_geometric_and_a_wrong_result_has_no_speed() -> None:
    slow = entry("S2", us={"ours": 24.0, "flash": 12.0, "cudnn": 13.0})
    found = report.verdicts(report.measured(record(entry(), slow)))
    what = "vs best SDPA, geometric mean of 2 of 9"
    assert found[0] == ("short", what, 1.3, pytest.approx((1.5 * 0.5) ** 0.5))
    assert found[1:] == [("S1", "vs FlexAttention", 1.0, 15 / 8)]
    found = report.verdicts(report.measured(record(entry(), {**slow, "wrong": ["ours"]})))
    assert found[0][3] == 0.0


def test_tables_hold_times_ratios_targets_and_problems() -> None:
    decode = entry("decode-b1-32k", us={"ours": 40.0, "cudnn": 50.0}, failed={"flash": "a | b"})
    wrong = entry("prefill-512", wrong=["ours"], errors={"ours": [0.5, 0.1], "eager": [0.1, 0.1]})
    lost = {"case": "d256", "group": "head_dim", "error": "OutOfMemoryError: 3 GB"}
    made = record(decode, entry(), wrong, lost)
    text = report.markdown(made)
    lines = text.splitlines()
    times = "| S1 | 0.7 | 8.0 | 14.0 | 12.0 | 15.0 | 1.50 | 1.75 | 1.50 | 1.88 | 0.08 |"
    assert any(line.startswith(times) for line in lines)  # important cases first, as in CASES
    assert text.index("| S1 |") < text.index("| decode-b1-32k |")
    assert "| decode-b1-32k | part of copy bandwidth | 0.85 | 0.844 | missed by 0.7 % |" in text
    assert "| short | 1.50 (1) | 1.75 (1) | 1.50 (1) | 1.88 (1) |" in text
    assert "| decode-b1-32k | flash | a / b |" in text
    assert "| prefill-512 | ours | error 5.0e-01/1.0e-01, allowed 8.0e-04/4.0e-04 |" in text
    assert "| d256 | all | OutOfMemoryError: 3 GB |" in text
    assert "| S1 | groups 64x128x64 w12 s4 |" in text
    assert suite().summary(made).splitlines()[0] == "3 of 5 targets reached"
    assert [suite().is_bad(e) for e in made["cases"]] == [False, False, True, True]
    assert report.line(entry()).startswith("S1: ours 8.0 flash 14.0 cudnn 12.0 flex 15.0 | ")


@pytest.mark.parametrize(
    ("mask", "causal", "layout", "dynamic"),
    sampled(
        [
            ("bias", False, "bsnh", True),
            ("", True, "bnsh", False),
            ("where", False, "bsnh", False),
            ("softcap", True, "bnsh", False),
            ("window", True, "bsnh", False),
            ("alibi", True, "bsnh", False),
        ],
        3,
    ),
)
def test_ours_computes_the_reference(mask, causal, layout, dynamic, monkeypatch) -> None:
    for module in ("module", "peers"):
        monkeypatch.setattr(f"benchmarks.suites.attention.{module}.WINDOW", 5)
        monkeypatch.setattr(f"benchmarks.suites.attention.{module}.SOFTCAP", 1.5)
    case = Case("tiny", "test", **{**TINY, "lengths": (16, 24)}, causal=causal, mask=mask)
    job = Job(case, "float32", layout, dynamic, "llvm")
    problem = Problem(case, "float32", layout, "cpu")
    compiled = ours.build(job)
    out = problem.heads_first(torch.from_dlpack(compiled.call(problem.operands)()))
    assert errors_of(out, problem.reference())[0] < 1e-5
    assert "cpu_attention " in compiled.plan()


def test_what_is_not_fused_is_not_timed() -> None:
    case = Case("tiny", "test", **TINY, mask="where")
    built = ours.Built(None, ours.decided(module_of([]), "llvm"))
    compiled = ours.Compiled(Job(case, "float32", "bsnh", False, "llvm"), built)
    with pytest.raises(ours.NotFusedError, match="not recognised"):
        compiled.call({})


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(CASES, "tiny", Case("tiny", "short", **TINY, causal=True))
    monkeypatch.setitem(CASES, "tiny-bias", Case("tiny-bias", "mask", **TINY, mask="bias"))


def tiny_run(tmp_path, *more: str) -> tuple[int, dict]:
    argv = ["--cases", "tiny", "tiny-bias", "--contenders", "ours", "flash", "--target", "llvm"]
    argv += ["--results", str(tmp_path), *more]
    status = Runner(suite(*argv)).run()
    (path,) = tmp_path.glob("*-bench_attention.json")
    return status, json.loads(path.read_text())


def test_a_whole_run(tmp_path, tiny, cpu_in_place_of_a_gpu, capsys) -> None:
    status, written = tiny_run(tmp_path)
    assert status == 0
    times = {e["case"]: set(e["us"]) for e in written["cases"]}
    assert times == {"tiny": {"ours", "flash"}, "tiny-bias": {"ours"}}
    assert all(e["plan"].startswith("cpu_attention ") for e in written["cases"])
    assert list(tmp_path.glob("*-bench_attention.md"))
    assert "tiny: ours" in capsys.readouterr().out


def test_a_wrong_result_of_ours_fails_the_run(
    tmp_path, tiny, cpu_in_place_of_a_gpu, monkeypatch
) -> None:
    right = ours.Compiled.call

    def wrong(self, operands):
        call = right(self, operands)
        return lambda: torch.from_dlpack(call()) * 1.01

    monkeypatch.setattr(ours.Compiled, "call", wrong)
    status, written = tiny_run(tmp_path, "--cases", "tiny")
    assert status == 1
    assert written["cases"][0]["wrong"] == ["ours"]


def test_runs_are_merged_case_by_case(tmp_path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    alone = entry(us={"ours": 9.0, "flash": 14.0})
    late = entry("S2", copy_tb_s=4.2)
    first.write_text(json.dumps({**record(alone, entry("S3")), "launch_us": 4.7}))
    slower = {**entry("S3"), "floor_us": 1.0}
    second.write_text(json.dumps({**record(entry(), late, slower), "launch_us": 4.8}))

    def merge(*files) -> int:
        return main(Attention, ["--results", str(tmp_path / "m"), "--merge", *map(str, files)])

    # S1 is from the run that has more of it, S3 from the later one
    for files, last in (((first, second), slower), ((second, first), entry("S3"))):
        assert merge(*files) == 0
        (path,) = (tmp_path / "m").glob("*-bench_attention.json")
        found = {e["case"]: e for e in json.loads(path.read_text())["cases"]}
        assert found == {"S1": entry(), "S2": late, "S3": last}
    text = path.with_suffix(".md").read_text()
    assert "2 runs, a case in one of them; copies at 4.30, 4.30 TB/s" in text
    assert "geometric mean of 3 of 9" in text
    second.write_text(json.dumps({**record(), "launch_us": 4.8, "layout": "bnsh"}))
    with pytest.raises(SystemExit, match="layout differs: bnsh, bsnh"):
        merge(first, second)
