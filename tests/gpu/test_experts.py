"""Matmuls by experts, and their routing, run on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relax_fusion.estimator import candidates
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.hardware.target import device_of
from relax_fusion.workload import DynamicDim, ExpertMatmul
from relax_fusion.workload.reference import evaluate

from ..support.expert_calls import WORKS
from ..support.gpu import gpu_target, needs_gpu
from ..support.triton_modules import build_triton, run_triton
from ..support.workloads import inputs
from ..transforms import test_routing as routing

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize(("experts", "dtype"), [(5, "float16"), (130, "bfloat16")])
def test_every_plan_computes_what_the_graph_says(name: str, experts: int, dtype: str) -> None:
    work = replace(WORKS[name], experts=experts, k=320, n=136, dtype=dtype, out_dtype=dtype)
    plans = [*dict.fromkeys(candidates(work, device_of(gpu_target()), "triton"))]
    assert {plan.family for plan in plans} >= {"expert_tiles"}
    tables = map(PlanTable.single, plans)
    executable = build_triton(work, *tables, outputs=1, target=gpu_target())
    for rows in (1, 7, 300):
        given = inputs(work, {"rows": rows})
        exact = evaluate(work.graph, given)["out0"]
        for number, plan in enumerate(plans):
            (got,) = run_triton(executable, list(given.values()), f"main{number}")
            error = np.abs(got.astype("float64") - exact).max() / np.abs(exact).max()
            assert error < (2e-3 if dtype == "float16" else 1.6e-2), (plan.text, rows, error)


def test_many_rows_of_few_experts() -> None:
    work = ExpertMatmul(DynamicDim("rows"), 3, 2, 128, 64, "nk", "float16", "float16")
    given = inputs(work, {"rows": 9000})
    exact = evaluate(work.graph, given)["out0"]
    plans = [p for p in candidates(work, device_of(gpu_target())) if p.family == "expert_tiles"]
    tables = [PlanTable.single(plan) for plan in plans]
    executable = build_triton(work, *tables, outputs=1, target=gpu_target())
    for number in range(len(plans)):
        (got,) = run_triton(executable, list(given.values()), f"main{number}")
        assert np.abs(got - exact).max() < 2e-3 * np.abs(exact).max()


def test_nan_passes_the_bounds_of_a_gate() -> None:
    work = WORKS["clipped"]
    given = inputs(work, {"rows": 3})
    given["x"][1] = np.nan
    plans = [*dict.fromkeys(candidates(work, device_of(gpu_target()), "triton"))]
    tables = map(PlanTable.single, plans)
    executable = build_triton(work, *tables, outputs=1, target=gpu_target())
    for number in range(len(plans)):
        (got,) = run_triton(executable, list(given.values()), f"main{number}")
        assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize(
    ("make", "experts"),
    [
        *product((routing.softmax_first, routing.softmax_behind), (routing.EXPERTS, 132, 300)),
        (routing.by_groups, routing.EXPERTS),
    ],
)
def test_routing_by_blocks(make: routing.Make, experts: int) -> None:
    mod = routing.module(make, tirx.Var("n", "int64"), experts)
    with gpu_target():
        built = tvm.compile(mod, gpu_target(), relax_pipeline=relax.get_pipeline("relax_fusion"))
    main = relax.VirtualMachine(built, tvm.cuda(0))["main"]
    x = np.random.default_rng(3).standard_normal((70, experts)).astype("float32")
    got = [each.numpy() for each in main(tvm.runtime.tensor(x, tvm.cuda(0)))]
    for mine, wanted in zip(got, routing.run(mod, x), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)
