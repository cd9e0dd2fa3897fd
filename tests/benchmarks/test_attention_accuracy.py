"""Accuracy of attention with a CPU in place of the GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.runner import main
from benchmarks.suites.attention import accuracy, ours
from benchmarks.suites.attention.cases import Case
from benchmarks.suites.attention.peers import Problem
from benchmarks.suites.attention.suite import Attention

LENGTHS = (9, 12)


@pytest.fixture
def small(monkeypatch):
    """One small shape for each mask."""

    def shapes(mask, dtype):
        yield Case(f"{mask or 'plain'}-d16", "", (4, 2), LENGTHS, 16, mask=mask)

    monkeypatch.setattr(accuracy, "shapes", shapes)
    monkeypatch.setattr(accuracy, "DTYPES", ("float16",))


def run(tmp_path) -> tuple[int, dict]:
    args = ["--accuracy", "--target", "llvm", "--results", str(tmp_path)]
    status = main(Attention, args)
    (path,) = tmp_path.glob("*-bench_attention-accuracy.json")
    return status, json.loads(path.read_text())


def test_ours_passes(small, cpu_in_place_of_a_gpu, tmp_path, capsys) -> None:
    status, written = run(tmp_path)
    assert [e for e in written["cases"] if not e["passed"]] == [] and status == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith("PASS as drawn, plain-d16, float16, cpu_attention ")
    assert printed[-1] == "8 of 8 passed"


@pytest.mark.parametrize(
    ("spoilt", "count"),
    [(lambda out: out * 1.01, 8), (torch.nan_to_num, 3)],  # a NaN is missed in three of them
)
def test_what_is_off_fails(
    small, cpu_in_place_of_a_gpu, tmp_path, monkeypatch, spoilt, count
) -> None:
    right = ours.Compiled.call

    def wrong(self, operands):
        call = right(self, operands)
        return lambda: spoilt(torch.from_dlpack(call()))

    monkeypatch.setattr(ours.Compiled, "call", wrong)
    status, written = run(tmp_path)
    failed = [e for e in written["cases"] if not e["passed"]]
    assert status == 1 and len(failed) == count
    assert all(e["same"] == (count == 8) for e in failed)


@pytest.mark.parametrize("mask", accuracy.EDITS)
def test_edits_make_what_they_say(mask) -> None:
    for name, edit in accuracy.EDITS[mask].items():
        problem = Problem(Case("", "", (4, 2), LENGTHS, 16, mask=mask), "float16", "bsnh", "cpu")
        edit(problem.operands)
        exact = problem.reference()
        nan = exact.isnan().any(-1)
        expected = {"NaN in a query": 1, "infinity in a query": 1}
        if name == "infinity in a key":  # of some queries the product with it is +infinity
            assert 0 < nan.sum() < nan[:, :2].numel() and not nan[:, :2].any()
        else:
            assert nan.sum() == expected.get(name, 0)
        zeros = {"queries without a key": [0, 7], "bias of -infinity": [2]}.get(name, [])
        assert (exact == 0).all(-1)[0, 0].nonzero().flatten().tolist() == zeros
