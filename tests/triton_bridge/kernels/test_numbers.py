"""Every kernel family in the interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.workload import DynamicDim, Norm, NormMatmul, Projection, Rope
from relax_fusion.workload.reference import evaluate

from ...support.interpreted import Interpreter, Launch
from ...support.launches import interpreted, launch_cases, parameters
from ...support.workloads import shape_of
from .cases import EPILOGUES, EPS, ODD_HEADS, ROTATIONS, Case, normalise
from .launches import gemv, matmul_pointer

POINTER = TilePlan(16, 16, 64, num_stages=2, num_warps=4, family="pointer")
GEMV = TilePlan(1, 4, 16, num_warps=4, family="gemv")


def label(case: Case) -> str:
    default = Case()
    changed = {k: v for k, v in vars(case).items() if v != getattr(default, k)}
    return "-".join(f"{k}={v}" for k, v in changed.items()) or "plain"


def check(interpreter: Interpreter, case: Case, launches: list[Launch]) -> dict[str, np.ndarray]:
    tensors, dtypes = case.tensors()
    result = interpreter(tensors, dtypes, launches)
    case.check(result, tensors)
    return result


@pytest.mark.parametrize("case", EPILOGUES, ids=label)
def test_gemv(interpreter: Interpreter, case: Case) -> None:
    check(interpreter, replace(case, rows=1), gemv(replace(case, rows=1)))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_gemv_norms(interpreter: Interpreter, norm: str, layout: str) -> None:
    case = Case(rows=2, norm=norm, beta=norm == "layer", layout=layout, gated=True)
    check(interpreter, case, gemv(case))


@pytest.mark.parametrize("case", EPILOGUES, ids=label)
@pytest.mark.parametrize("split", [1, 2])
def test_matmul_pointer(interpreter: Interpreter, case: Case, split: int) -> None:
    check(interpreter, case, matmul_pointer(case, split, swap=True))


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_rms_norm_rides_along(interpreter: Interpreter, split: int, gated: bool) -> None:
    steps = () if gated else ("silu",)
    case = Case(rows=5, norm="rms", gated=gated, activation="silu", steps=steps, bias=True)
    check(interpreter, case, matmul_pointer(case, split, swap=True))


def test_many_row_tiles(interpreter: Interpreter) -> None:
    case = Case(rows=70, n=40, steps=("residual",))
    check(interpreter, case, matmul_pointer(case, 1, swap=False))


GEMV_ROTATIONS = [
    replace(case, norm=("none", "rms")[i % 2]) for i, case in enumerate([*ROTATIONS, *ODD_HEADS])
]


@pytest.mark.parametrize("case", GEMV_ROTATIONS, ids=label)
def test_gemv_rotates(interpreter: Interpreter, case: Case) -> None:
    check(interpreter, case, gemv(case))


@pytest.mark.parametrize("case", [*ROTATIONS, *ODD_HEADS], ids=label)
@pytest.mark.parametrize(("split", "swap"), [(1, True), (1, False), (3, True)])
def test_matmul_pointer_rotates(
    interpreter: Interpreter, case: Case, split: int, swap: bool
) -> None:
    check(interpreter, case, matmul_pointer(case, split, swap))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_gemv_rotates_bfloat16(interpreter: Interpreter, norm: str) -> None:
    case = Case(rows=3, n=48, head_dim=16, rotated=32, norm=norm, dtype="bfloat16")
    check(interpreter, case, gemv(case))


TURNED = Rope(16, 32, "float32", DynamicDim("s"))
KEYS = Projection(32, "nk", ("bias",), TURNED)
TOGETHER = {
    "queries-keys-values": (
        [Projection(48, "nk", ("bias",), replace(TURNED, features=48)), KEYS, Projection(16, "nk")],
        1,
    ),
    "keys-values": (
        [Projection(24, "nk", ("bias",)), Projection(40, "nk", ("silu", "residual"))],
        1,
    ),
    "kn": ([Projection(24, "kn"), Projection(16, "kn", ("bias",)), Projection(8, "kn")], 1),
    "four": ([Projection(8 * n, "nk") for n in (3, 1, 2, 2)], 2),
    "two-layouts": ([Projection(24, "nk"), Projection(24, "kn")], 2),
    "no-heads": ([KEYS, Projection(24, "nk")], 2),
    "activated": ([KEYS, Projection(32, "nk", ("relu",))], 2),
}
"""Projections of one input, and how many launches compute them."""


@pytest.mark.parametrize("norm", [None, Norm("rms", EPS, unit_offset=True)], ids=["plain", "norm"])
@pytest.mark.parametrize("name", TOGETHER)
def test_projections_share_a_launch(interpreter: Interpreter, name: str, norm: Norm | None) -> None:
    projections, launches = TOGETHER[name]
    dim = DynamicDim("rows")
    work = NormMatmul(dim, 40, tuple(projections), norm, "float16", "float16")
    rng = np.random.default_rng(3)
    sizes = dict.fromkeys(work.graph.dims, 5)
    inputs = {
        o.name: rng.standard_normal(shape_of(o, sizes)).astype(o.dtype) for o in work.graph.inputs
    }
    want = evaluate(work.graph, inputs)
    for plan in (POINTER, replace(POINTER, split_k=2), GEMV):
        steps = launch_cases(work, plan, parameters(work))[0][1]
        names = [step.function.__name__ for step in steps]
        assert names.count(names[0]) == launches and set(names[1:]) <= {names[0], "split_reduce"}
        got = interpreted(interpreter, work, plan, inputs)
        for out in work.graph.outputs:
            np.testing.assert_allclose(got[out.name], want[out.name], rtol=4e-3, atol=2e-2)


def test_a_rotation_does_not_mix_features_that_stay(interpreter: Interpreter) -> None:
    case = Case(rows=1, n=32, head_dim=16, rotated=16, bias=True)
    tensors, dtypes = case.tensors()
    tensors["bias"][20] = np.inf
    result = interpreter(tensors, dtypes, gemv(case))["out"]
    assert np.isinf(result[0, 20]) and np.isfinite(np.delete(result[0], 20)).all()


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_row_norm(interpreter: Interpreter, norm: str, dtype: str) -> None:
    case = Case(rows=5, k=43, n=43, norm=norm, dtype=dtype)
    tensors, dtypes = case.tensors()
    beta = norm == "layer"
    launch = Launch(
        "row_norm",
        (3,),
        {
            **{f"{name}_ptr": name for name in ("x", "residual", "gamma", "beta", "y")},
            "sum_ptr": "out",
            "M": case.rows,
            "eps": EPS,
        },
        {
            "WIDTH": 43,
            "BLOCK": 64,
            "ROWS": 2,
            "NORM": norm,
            "HAS_RESIDUAL": True,
            "HAS_BETA": beta,
            "STORE_SUM": True,
            "PDL": False,
            "EARLY": False,
        },
    )
    result = interpreter(tensors, dtypes, [launch])
    step = 2.0**-11 if dtype == "float16" else 2.0**-7  # the interpreter truncates to bfloat16
    total = tensors["x"] + tensors["residual"]
    assert np.all(np.abs(result["out"] - total) <= step * np.abs(total))
    want = normalise(result["out"], norm, tensors["gamma"], tensors["beta"] if beta else None)
    assert np.all(np.abs(result["y"] - want) <= step * (np.abs(want) + 1e-2))
