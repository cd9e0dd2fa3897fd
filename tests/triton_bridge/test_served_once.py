"""Plans that serve several ranges of rows are compiled and written once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tvm import tirx
from tvm.sym import Analyzer

from relax_fusion.compute import build_prim_func
from relax_fusion.estimator import Choice, choose
from relax_fusion.hardware import device
from relax_fusion.matching.expressions import substitute
from relax_fusion.triton_bridge.emit import fused_of
from relax_fusion.workload import DynamicDim, NormMatmul, Projection

ROWS = (1, 2, 7, 8, 9, 16, 17, 64, 65, 200, 256, 1000, 1024, 1025, 1100, 2048, 2049, 5000, 70000)


@pytest.mark.parametrize("bound", [None, 4096])
def test_conditions_send_each_size_to_its_plan(bound: int | None) -> None:
    dim = DynamicDim("n", bound)
    work = NormMatmul(dim, 4096, (Projection(4096, "nk"),), None, "float16", "float16")
    choice = choose(work, device("h200"), always=True, backend="triton")
    assert isinstance(choice, Choice)
    boxes = choice.plans.boxes
    plans = [plan for _, plan in boxes]
    assert len(set(plans)) < len(plans) and all(a != b for a, b in pairwise(plans))
    fused = fused_of(build_prim_func(work, choice.plans))
    assert fused is not None
    served = fused.served()
    assert sorted(p.key for _, _, p in served) == sorted(p.key for p in set(plans))
    (size,) = fused.dims.values()
    for rows in ROWS[: None if bound is None else -2]:
        at = {size: tirx.const(rows, "int64")}
        _, bounds, plan = next(
            each for each in served if each[0] is True or _holds(substitute(each[0], at))
        )
        assert plan == choice.plans.plan_for(rows)
        assert all(rows <= upper for upper in bounds.values())


def _holds(condition: tirx.Expr) -> bool:
    return bool(Analyzer().simplify(condition))
