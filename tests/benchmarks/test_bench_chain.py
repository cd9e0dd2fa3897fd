"""`benchmarks.suites.chain`: what needs no GPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.runner import main
from benchmarks.suites import chain as bench
from relax_fusion import FuseMatmulChain, FuseOptions, make_target
from relax_fusion.workload import MatmulChain


def test_modules_are_what_the_cases_say() -> None:
    for case in bench.CHAINS:
        decisions = []
        options = FuseOptions(make_target("h200"), always_fuse=True, decisions=decisions)
        FuseMatmulChain(options)(case.module())
        assert [d.workload for d in decisions] == [case.work], case.name


@pytest.mark.parametrize(
    "work",
    [
        MatmulChain(5, 32, 8, 24, ("kn", "kn"), (), (), "float32", "float32", 2),
        MatmulChain(
            *(5, 32, 8, 24, ("nk", "nk")),
            *(("bias", "gelu"), ("bias", "residual"), "float32", "float32"),
        ),
    ],
    ids=["batch", "bottleneck"],
)
def test_all_contenders_compute_the_same(
    cpu_in_place_of_a_gpu, monkeypatch, tmp_path, work: MatmulChain
) -> None:
    monkeypatch.setattr(bench, "CHAINS", [bench.Case("G1", work)])
    monkeypatch.setattr(bench.MatmulChains, "fits", lambda self, case, **_: True)
    assert main(bench.MatmulChains, ["--target", "llvm", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-bench_chain.json")
    (entry,) = json.loads(path.read_text())["cases"]
    assert set(entry["us"]) == {"torch", "two", "fused"}
    assert max(entry["errors"].values()) < 1e-6
