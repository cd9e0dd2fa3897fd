"""Matmuls by experts: which experts are read, and which plans there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.errors import GraphError
from relax_fusion.estimator import Choice, choose, violations
from relax_fusion.hardware import device
from relax_fusion.tuning.inputs import draw
from relax_fusion.workload import DynamicDim, ExpertMatmul, Gate
from relax_fusion.workload.json import from_json, to_json

GATED = ExpertMatmul(1, 128, 8, 2048, 768, "nk", "float16", "float16", gate=Gate())


def test_of_the_weights_those_count_that_rows_go_to() -> None:
    weight = 2 * 768 * 2048 * 2
    assert GATED.bytes(rows=1)["w0"] == 8 * weight
    many = replace(GATED, rows=64).bytes(rows=64)["w0"]
    assert many == pytest.approx((1 - (1 - 8 / 128) ** 64) * 128 * weight, rel=1e-6)
    assert GATED.flops(rows=1) == 2 * 8 * 2 * 768 * 2048


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_it_is_priced_below_what_gathers(name: str) -> None:
    work = replace(GATED, rows=DynamicDim("rows"))
    choice = choose(work, device(name))
    assert isinstance(choice, Choice)
    assert all(p.fused.seconds < p.unfused.seconds for p in choice.predictions)


def test_rows_of_a_prompt_share_tiles_of_weights() -> None:
    for experts, chosen in ((128, 8), (8, 2)):
        rows = DynamicDim("rows")
        work = replace(GATED, rows=rows, experts=experts, chosen=chosen, dtype="float32")
        choice = choose(replace(work, out_dtype="float32"), device("cpu"))
        assert isinstance(choice, Choice)
        few, many = (choice.plans.plan_for(rows).block_m for rows in (1, 1024))
        assert few == 1 < many


def test_a_plan_of_other_numbers_is_refused() -> None:
    dev = device("cpu")
    found = choose(GATED, dev)
    assert isinstance(found, Choice)
    plan = found.plans.plan_for(1)
    wrong = replace(plan, block_m=2, block_k=1024, lanes=3)
    text = "; ".join(violations(wrong, GATED, dev))
    assert "takes 1 row on a GPU" in "; ".join(
        violations(replace(wrong, num_warps=1), GATED, device("h200"))
    )
    assert "must be k=2048" in text and "lanes is 3" in text


def test_what_no_kernel_computes_is_refused() -> None:
    for wrong in ({"activation": "silu"}, {"residual": True}, {"experts": 0}):
        with pytest.raises(GraphError):
            choose(replace(GATED, **wrong), device("h200"))
    assert from_json(to_json(GATED)) == GATED


def test_kernels_are_measured_with_experts_that_there_are() -> None:
    (ids,) = (o for o in GATED.graph.inputs if o.name == "ids")
    drawn = draw(GATED, ids, {})
    assert drawn.shape == (1, 8) and len(set(drawn[0])) == 8
    assert drawn.min() >= 0 and drawn.max() < 128
