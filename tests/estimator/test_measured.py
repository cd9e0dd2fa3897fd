"""Choosing by times that were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from relax_fusion import PipelineOptions, Report, make_target
from relax_fusion.errors import DatabaseError, PipelineError
from relax_fusion.estimator import AttentionSize, Choice, candidates, choose
from relax_fusion.estimator.database import (
    Database,
    Measured,
    Measurement,
    target_fields,
    versions_of,
    workload_key,
)
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware.target import device_of
from relax_fusion.pipeline import phase0_annotate, phase1_fuse
from relax_fusion.workload import DynamicDim, Workload
from relax_fusion.workload.json import to_json

from ..support.estimator_cases import AVX2, GPU, attention, norm_matmul

WORK = norm_matmul(DynamicDim("rows"), k=512, n=512, dtype="float32")


def known(work: Workload, times: Mapping) -> Measured:
    return Measured(repr(times), {workload_key(json.loads(to_json(work))): times})


def chosen(work: Workload, dev=AVX2, times: Mapping | None = None, **options) -> Choice:
    measured = None if times is None else known(work, times)
    found = choose(work, dev, measured=measured, always=True, **options)
    assert isinstance(found, Choice), str(found)
    return found


def another(work: Workload, dev, *plans: TilePlan, backend: str = "tir") -> TilePlan:
    """Return the last candidate that is none of these."""
    return [plan for plan in candidates(work, dev, backend) if plan not in plans][-1]


@pytest.mark.parametrize("dev", [AVX2, GPU], ids=["cpu", "gpu"])
def test_the_fastest_that_was_measured_is_taken(dev) -> None:
    priced = chosen(WORK, dev).plans.plan_for(16)
    other = another(WORK, dev, priced)
    for faster, slower in ((priced, other), (other, priced)):
        times = {16: {faster: 1e-4, slower: 2e-4}}
        found = chosen(WORK, dev, times)
        assert found.plans.plan_for(16) == faster
        told = [p for p in found.predictions if p.size == 16]
        assert [p.measured_s for p in told] == [1e-4]
        assert "(measured 100 us)" in told[0].fused_text
        assert all(p.measured_s is None for p in found.predictions if p.size != 16)


def test_a_size_inside_a_range_decides_for_it() -> None:
    priced = chosen(WORK).plans
    other = another(WORK, AVX2, *(plan for _, plan in priced.boxes))
    found = chosen(WORK, times={40: {other: 1e-4, priced.plan_for(40): 2e-4}}).plans
    assert found.plan_for(17) == found.plan_for(64) == other
    assert [found.plan_for(n) for n in (1, 16, 65, 5000)] == [
        priced.plan_for(n) for n in (1, 16, 65, 5000)
    ]


def test_all_sizes_of_a_range_count() -> None:
    first, second, third = list(candidates(WORK, AVX2))[-3:]
    times = {
        17: {first: 1e-4, second: 1.1e-4, third: 9e-4},
        64: {first: 9e-4, second: 2.1e-4, third: 2e-4},
    }
    assert chosen(WORK, times=times).plans.plan_for(64) == second


def test_plans_that_there_are_no_more_do_not_count() -> None:
    gone = TilePlan(7, 7, 7, family="cpu_tiles")
    assert chosen(WORK, times={16: {gone: 1e-9}}).plans == chosen(WORK).plans


def test_cells_of_an_attention() -> None:
    lengths = [DynamicDim(name) for name in ("batch", "q_len", "kv_len")]
    work = attention(*lengths)
    options = {"backend": "triton"}
    priced = chosen(work, GPU, **options).plans.plan_for(1, keys=100, batch=1)
    other = another(work, GPU, priced, backend="triton")
    times = {AttentionSize(1, 1, 100): {other: 1e-5, priced: 2e-5}}
    found = chosen(work, GPU, times, **options).plans
    assert found.plan_for(1, keys=100, batch=1) == other


def test_whether_fusing_pays_is_told_by_predictions() -> None:
    times = {size: dict.fromkeys(candidates(WORK, AVX2), 1.0) for size in (1, 16, 64)}
    slow = choose(WORK, AVX2, measured=known(WORK, times))
    assert isinstance(slow, Choice)
    assert [p.loses for p in slow.predictions] == [p.loses for p in choose(WORK, AVX2).predictions]


class _Projection(nn.Module):
    """A norm and a matmul."""

    def __init__(self) -> None:
        self.norm = nn.RMSNorm(256, -1, bias=False)
        self.linear = nn.Linear(256, 512, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.linear(self.norm(x))


def module() -> tvm.IRModule:
    spec = {"forward": {"x": nn.spec.Tensor([32, 256], "float32")}}
    return _Projection().export_tvm(spec)[0]


def report_of(**options) -> Report:
    """Return what the passes decide about a module of a norm and a matmul."""
    report = Report()
    chosen = PipelineOptions(make_target("llvm"), report=report, always_fuse=True, **options)
    with chosen.target:
        passes = [*phase0_annotate(chosen), *phase1_fuse(chosen)]
        tvm.transform.Sequential(passes)(module())
    return report


def test_the_pipeline_reads_a_database(tmp_path) -> None:
    target, path = make_target("llvm"), tmp_path / "times.jsonl"
    (before,) = report_of().fused
    other = another(before.workload, device_of(target), before.plans.plan_for(32))
    work = json.loads(to_json(before.workload))
    told = target_fields(str(target))
    first = Measurement("", told, work, 32, other.to_attr(), 1e-6, 0.0, dict(versions_of(other)))
    Database(path).add(first)
    report = report_of(database=path)
    assert report.fused[0].plans.plan_for(32) == other
    assert json.loads(report.to_json())["decisions"][0]["predictions"][0]["measured_s"] == 1e-6
    assert "(measured 1 us)" in report.text()
    slower = replace(first, plan=before.plans.plan_for(32).to_attr(), seconds=5e-7)
    Database(path).add(Measurement(**asdict(slower)))
    assert report_of(database=path).fused[0].plans == before.plans


def test_a_database_that_is_none(tmp_path) -> None:
    with pytest.raises(DatabaseError, match="none cannot be read"):
        relax.get_pipeline("relax_fusion", target="llvm", database=str(tmp_path / "none"))
    with pytest.raises(PipelineError, match="database is 3"):
        relax.get_pipeline("relax_fusion", target="llvm", database=3)
