"""Which plans are embedded, for the library to measure."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from relax_fusion.estimator import Choice, choose
from relax_fusion.estimator.embedded import (
    MOST_EMBEDDED,
    Embedded,
    as_given,
    embedded,
    plans_of_attr,
)
from relax_fusion.estimator.measured import Measured, workload_key
from relax_fusion.estimator.shape import box_sizes
from relax_fusion.estimator.shortlist import shortlist
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.workload import DynamicDim, MatmulChain, Workload
from relax_fusion.workload.json import to_json

from ..support.estimator_cases import GPU, attention, gated_ffn, norm_matmul

ROWS = DynamicDim("rows")
CHAIN = MatmulChain(ROWS, 64, 256, 64, ("kn", "kn"), (), (), "float16", "float16")
WORKLOADS = {
    "static": norm_matmul(16, k=1024, n=1024),
    "rows": norm_matmul(ROWS, k=1024, n=1024),
    "gated": gated_ffn(),
    "chain": CHAIN,
    "attention": attention(DynamicDim("q"), kv_len=DynamicDim("kv")),
}


def table_of(
    work: Workload, backend: str = "triton", measured: Measured | None = None
) -> PlanTable:
    found = choose(work, GPU, always=True, backend=backend, measured=measured)
    assert isinstance(found, Choice)
    return found.plans


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_best_priced_of_each_range(name: str) -> None:
    work = WORKLOADS[name]
    table = table_of(work)
    found = embedded(work, GPU, "triton", table)
    contests = shortlist(work, GPU, "triton", MOST_EMBEDDED)
    assert [each.box for each in found] == [contest.box for contest in contests]
    assert [each.plans for each in found] == [contest.plans for contest in contests]
    for each, contest in zip(found, contests, strict=True):
        sizes = box_sizes(work, contest.sizes[-1])
        assert each.plans[0] == table.plan_for(**sizes), "the best by price"
        assert len(set(each.plans)) == len(each.plans) <= MOST_EMBEDDED
        assert {plan.backend for plan in each.plans} == {"triton"} and not each.why
    assert max(len(each.plans) for each in found) == 4


def test_where_kernels_are_tirs_nothing_is_measured() -> None:
    work = norm_matmul(ROWS, k=1024, n=1024, dtype="float64")
    found = embedded(work, GPU, "triton", table_of(work))
    assert {(len(each.plans), each.why) for each in found} == {(1, "a kernel of TIR")}


def test_what_was_measured_is_not_measured_again() -> None:
    work = WORKLOADS["rows"]
    contest = next(c for c in shortlist(work, GPU, "triton") if c.box.holds(rows=16))
    times = {16: {contest.plans[5]: 1e-6, contest.plans[0]: 2e-6}}
    measured = Measured("", {workload_key(json.loads(to_json(work))): times})
    found = embedded(work, GPU, "triton", table_of(work, measured=measured), measured)
    known = [each for each in found if len(each.plans) == 1]
    assert known == [Embedded(contest.box, (contest.plans[5],), "measured in the database")]


def test_a_users_plans_stand_alone() -> None:
    table = table_of(WORKLOADS["rows"])
    assert [(e.box, e.plans) for e in as_given(table)] == [(b, (p,)) for b, p in table.boxes]
    assert {each.why for each in as_given(table)} == {"given by the user"}


def test_attributes_are_read_as_they_were_written() -> None:
    for work in WORKLOADS.values():
        found = embedded(work, GPU, "triton", table_of(work))
        attr = json.loads(json.dumps([each.to_attr() for each in found]))
        assert plans_of_attr(attr) == [(each.box, each.plans) for each in found]


def test_a_tensor_without_elements_has_plans_too() -> None:
    work = replace(WORKLOADS["static"], rows=0)
    assert embedded(work, GPU, "triton", table_of(work))
