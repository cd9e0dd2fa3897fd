"""Every family of Triton's matmul kernels in the interpreter, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from relax_fusion.estimator import Problem
from relax_fusion.estimator.families.triton_matmul.family import TritonMatmul
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.workload import DynamicDim, Norm, NormMatmul, Projection, Rope
from relax_fusion.workload.reference import numpy_dtype

from ...support.contraction_cases import EACH, ROWS, Case, cases, plain, turned
from ...support.interpreted import Interpreter
from ...support.launches import H200, interpreted, launch_cases, parameters
from ...support.slow import quick_if, sampled

POINTER = TilePlan(16, 32, 64, num_stages=2, num_warps=4, family="pointer")
PLANS = {
    "gemv": TilePlan(1, 16, 32, num_warps=4, family="gemv"),
    "pointer": POINTER,
    "split": replace(POINTER, split_k=2),
    "norm in front": replace(POINTER, block_m=64),
    "wide": replace(POINTER, block_n=128, split_k=3),
}
HALF = {"dtype": "float16", "out_dtype": "float16"}


def in_half() -> dict[str, Case]:
    """Return the cases in float16: the interpreter has no product of bfloat16."""
    found = {c.name: replace(c, work=replace(c.work, **HALF)) for c in cases()}
    many = NormMatmul(70, 40, (plain(40, "residual"),), None, **HALF)
    rope = Rope(12, 24, "float32")
    odd = replace(many, rows=3, outputs=(turned(rope, 36, "bias"),))
    more = {"many_rows": many, "rope_of_odd_heads": odd}
    return {**found, **{name: Case(name, work) for name, work in more.items()}}


CASES = in_half()
TAKEN = [
    (plan, name)
    for name, case in CASES.items()
    for plan in PLANS
    if TritonMatmul().refuses(Problem(case.work, H200)) is None
]


def computed(interpreter: Interpreter, case: Case, plan: TilePlan) -> list[np.ndarray]:
    """Return the results of a case by the launches of a plan."""
    made = interpreted(interpreter, case.work, plan, case.inputs())
    return [made[o.name].astype(numpy_dtype(o.dtype)) for o in case.work.graph.outputs]


def is_quick(case: tuple[str, str]) -> bool:
    """Take one in seven, but of rotations by the rows of "kn" only by kernels that are faster."""
    slow = case[0] == "gemv" and case[1].startswith("rope") and case[1].endswith("kn")
    groups = case in (("pointer", "rows_in_groups"), ("gemv", "for_each_sequence"))
    return groups or (TAKEN.index(case) % 7 == 0 and not slow)


@pytest.mark.parametrize(("plan", "name"), quick_if(is_quick, TAKEN))
def test_launches_match_the_reference(interpreter: Interpreter, plan: str, name: str) -> None:
    case = CASES[name]
    case.check(case.inputs(), computed(interpreter, case, PLANS[plan]), stored=True)


@pytest.mark.parametrize("plan", ["pointer", "gemv"])
def test_scales_of_any_number_of_sequences(interpreter: Interpreter, plan: str) -> None:
    outputs = (plain(40, "bias:3", "scale:3", "residual"),)
    case = Case("sequences", NormMatmul(ROWS, 40, outputs, EACH, **HALF), 9)
    case.check(case.inputs(), computed(interpreter, case, PLANS[plan]), stored=True)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_dot_products_of_bfloat16(interpreter: Interpreter, norm: str) -> None:
    outputs = (turned(Rope(16, 32, "float32"), 48),)
    brain = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
    work = NormMatmul(3, 40, outputs, Norm(norm, 1e-5, beta=norm == "layer"), **brain)
    case = Case("brain", work)
    arrays = case.inputs()
    got, exact = computed(interpreter, case, PLANS["gemv"])[0], case.reference(arrays, "float64")[0]
    # The interpreter truncates to bfloat16
    assert np.abs(got.astype("float64") - exact).max() <= 2.0**-6 * np.abs(exact).max()


TURNED = Rope(16, 32, "float32", DynamicDim("s"))
KEYS = Projection(32, "nk", ("bias",), TURNED)
TOGETHER: dict[str, tuple[Sequence[Projection], int]] = {
    "queries-keys-values": (
        [Projection(48, "nk", ("bias",), replace(TURNED, features=48)), KEYS, plain(16)],
        1,
    ),
    "keys-values": ([plain(24, "bias"), plain(40, "silu", "residual")], 1),
    "kn": ([plain(24, layout="kn"), plain(16, "bias", layout="kn"), plain(8, layout="kn")], 1),
    "four": ([plain(8 * n) for n in (3, 1, 2, 2)], 2),
    "two-layouts": ([plain(24), plain(24, layout="kn")], 2),
    "no-heads": ([KEYS, plain(24)], 2),
    "activated": ([KEYS, plain(32, "relu")], 2),
}
"""Projections of one input, and how many launches compute them."""


NORMS = None, Norm("rms", 1e-5, unit_offset=True)


@pytest.mark.parametrize(
    ("norm", "name"), sampled([(norm, name) for norm in NORMS for name in TOGETHER], 2)
)
def test_projections_share_a_launch(interpreter: Interpreter, name: str, norm: Norm | None) -> None:
    projections, launches = TOGETHER[name]
    work = NormMatmul(DynamicDim("rows"), 40, tuple(projections), norm, **HALF)
    case = Case(name, work, 5)
    for plan in ("pointer", "gemv"):
        steps = launch_cases(work, PLANS[plan], parameters(work))[0][1]
        names = [step.function.__name__ for step in steps]
        assert names.count(names[0]) == launches and set(names[1:]) <= {names[0], "split_reduce"}
        case.check(case.inputs(), computed(interpreter, case, PLANS[plan]), stored=True)


@pytest.mark.parametrize("name", ["four", "keys-values"])
@pytest.mark.parametrize("block_k", [64, 32])
def test_a_row_that_is_read_at_once_is_stored_as_well(
    interpreter: Interpreter, name: str, block_k: int
) -> None:
    projections, launches = TOGETHER[name]
    norm = replace(NORMS[1], returns_norm=True)
    case = Case(name, NormMatmul(3, 40, tuple(projections), norm, **HALF))
    plan = replace(PLANS["gemv"], block_k=block_k)
    steps = launch_cases(case.work, plan, parameters(case.work))[0][1]
    assert len(steps) == launches + (block_k < 40), "a norm in front, or none"
    case.check(case.inputs(), computed(interpreter, case, plan), stored=True)


def test_a_rotation_does_not_mix_features_that_stay(interpreter: Interpreter) -> None:
    outputs = (turned(Rope(16, 16, "float32"), 32, "bias"),)
    case = Case("apart", NormMatmul(1, 40, outputs, None, **HALF))
    given = case.inputs()
    given["bias0_0"][20] = np.inf
    made = interpreted(interpreter, case.work, PLANS["gemv"], given)["out0"]
    assert np.isinf(made[0, 20]) and np.isfinite(np.delete(made[0], 20)).all()
