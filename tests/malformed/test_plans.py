"""Plans and workloads, malformed: each is one line of a typed error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relax_fusion import PlanTable, TilePlan, TilePlanError
from relax_fusion.errors import LoweringError
from relax_fusion.estimator.registry import plan_of, table_of
from relax_fusion.validation import shown
from relax_fusion.workload.json import from_json, to_json

from ..support.estimator_cases import norm_matmul
from ..support.malformed import HUGE, LONG, Rude, assert_one_line

PLAN = TilePlan(4, 64, 64, family="cpu_tiles")
WRONG_COUNTS = (0, -1, 1.0, 1.5, float("nan"), "4", None, True, HUGE, LONG, [4], Rude())


@pytest.mark.parametrize(
    "changes",
    [
        *({"block_m": v} for v in WRONG_COUNTS),
        *({"num_warps": v} for v in (-1, 1.5, "4", HUGE)),
        *({"num_stages": v} for v in (0, "x", 1.5)),
        *({"backend": v} for v in ("cuda", 3)),
        *({"family": v} for v in (3, ["mma"])),
        *({"reg_m": 3}, {"surprise": 1}),
    ],
    ids=shown,
)
def test_plans_as_attributes(changes: dict[str, Any]) -> None:
    with pytest.raises(TilePlanError) as caught:
        plan_of({**PLAN.to_attr(), **changes})
    assert_one_line(caught.value)


@pytest.mark.parametrize(
    "attr",
    [
        *(3, None, "plan", [3], [[]], [{}], ["x"], [{"upper": -1}], []),
        *([{**PLAN.to_attr(), "upper": v}] for v in (0, 4, "x", None, True, 1.5, HUGE, LONG)),
        [PLAN.to_attr()],
        [{**PLAN.to_attr(), "upper": upper} for upper in (8, 4, -1)],
    ],
    ids=shown,
)
def test_tables_as_attributes(attr: object) -> None:
    if attr == [{**PLAN.to_attr(), "upper": None}]:
        return  # the open range, as it is called in Python
    with pytest.raises(TilePlanError) as caught:
        table_of(attr)
    assert_one_line(caught.value)


def test_a_table_of_rows_that_come_once() -> None:
    table = PlanTable.single(TilePlan(8, 8, 8, family="words"))
    assert table_of(row for row in table.to_attr()) == table


@pytest.mark.parametrize("entries", [3, None, (), ((None, 3),), ((4, PLAN),), [(None, PLAN)]])
def test_tables(entries: object) -> None:
    with pytest.raises(TilePlanError) as caught:
        PlanTable(entries)
    assert_one_line(caught.value)


WORKLOAD = json.loads(to_json(norm_matmul()))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "3", "null", "[]", "{}", '{"type": 3}', '{"type": []}', "[" * 99999),
        *(json.dumps(WORKLOAD | c) for c in ({"k": "x"}, {"k": 1.5}, {"outputs": 3})),
        *(json.dumps(WORKLOAD | c) for c in ({"rows": [1]}, {"norm": 3}, {"type": "Nothing"})),
        json.dumps({k: v for k, v in WORKLOAD.items() if k != "k"}),
    ],
    ids=shown,
)
def test_workloads_as_json(text: str) -> None:
    with pytest.raises(LoweringError) as caught:
        from_json(text)
    assert_one_line(caught.value)
