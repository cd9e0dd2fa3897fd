"""`benchmarks.suites.chains`: what needs no GPU."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks import building
from benchmarks.runner import main
from benchmarks.suites.chains import cases, cpu, suite
from benchmarks.suites.chains.cases import NAMED, Case, exported, mlp
from relax_fusion.workload import Chain

from ..support.slow import sampled

SMALL = {
    "G1": Case(lambda: cases.Products((2, 32, 8), (2, 8, 24)), ((2, 5, 32),), torch.float32),
    "bottleneck": Case(
        lambda: cases.Residual(nn.Identity(), *mlp(24, 8, 24, activation=nn.GELU)),
        ((5, 24),),
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", sampled([n for n in NAMED if n[0] in "GSLb"], 5))
def test_chains_are_one_workload(name: str) -> None:
    job = suite.Job("fused", name, "h200")
    found = building.decided(exported(name)[1], "h200", backend="triton", **job.options())
    (work,) = [d.workload for d in found.decisions if d.fused]
    assert isinstance(work, Chain)


@pytest.mark.parametrize(
    "name",
    sampled(
        [
            "tokens of Mixer-S/16, 8 images",
            "tokens of Mixer-B/32, 16 images",
            "three layers of 64, 65536 rows",
            "norms between 256, 4096 rows",
            "memory of 64 in 512, 4096 rows",
        ],
        3,
    ),
)
@pytest.mark.usefixtures("without_cuda_matmul")  # what was measured apart is older
def test_blocks_that_win_are_one_kernel(name: str) -> None:
    """All of them, not a part; what was measured is in 2026-11-23-bench_chains.json."""
    found = building.decided(exported(name)[1], "h200", backend="triton")
    assert [d.pattern for d in found.decisions if d.fused] == ["FuseChains"]


def test_random_chains_are_the_same_each_time() -> None:
    found, others = (cases.sampled(30, seed) for seed in (1, 2))
    shapes = [cases.case_of(name).shapes for name in found]
    assert shapes == [cases.case_of(name).shapes for name in found]
    assert len({*shapes}) > 20
    assert shapes != [cases.case_of(name).shapes for name in others]


@pytest.fixture(params=SMALL)
def small(request, monkeypatch):
    """A small case, exported before a CPU stands in for a GPU."""
    monkeypatch.setattr(cases, "NAMED", SMALL)
    monkeypatch.setattr(suite.Chains, "cases", (request.param,))
    exported.cache_clear()
    exported(request.param)
    yield
    exported.cache_clear()


@pytest.mark.slow
def test_all_contenders_compute_the_same(small, cpu_in_place_of_a_gpu, tmp_path) -> None:
    ways = ["--contenders", "torch", "apart", "fused", "chosen"]
    assert main(suite.Chains, ["--target", "llvm", "--results", str(tmp_path), *ways]) == 0
    (path,) = tmp_path.glob("*-bench_chains.json")
    (entry,) = json.loads(path.read_text())["cases"]
    assert set(entry["us"]) == {"torch", "apart", "fused", "chosen"}
    assert max(entry["errors"].values()) < 1e-6


def test_gains_are_means_by_kind() -> None:
    one = {"case": "G1", "us": {"torch": 4.0, "compile": 8.0, "apart": 3.0, "chosen": 2.0}}
    two = {**one, "case": "G2", "us": {**one["us"], "chosen": 8.0}}
    said = suite.gains([one, two])
    assert "G1 to G12: chosen against better of torch 1.00, worst 0.50 (G2), 2 chains" in said
    assert "G1 to G12: chosen against apart 0.75, worst 0.38 (G2), 2 chains" in said


def test_chains_on_this_cpu(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(cpu, "CASES", SMALL)
    monkeypatch.setattr(cpu.CpuChains, "cases", tuple(SMALL))
    monkeypatch.setattr(cpu, "pin_threads", lambda: None)
    monkeypatch.setattr(cpu, "peak_gflops", lambda cores: 1.0)
    assert main(cpu.CpuChains, ["--rounds", "1", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-bench_cpu_chains.json")
    for entry in json.loads(path.read_text())["cases"]:
        assert set(entry["us"]) == set(cpu.WAYS)
        assert 0 < max(entry["errors"].values()) < 1e-6
        assert entry["flops"] > 0
