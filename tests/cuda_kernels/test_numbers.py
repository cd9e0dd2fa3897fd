"""What the matmul kernel for Hopper computes, compiled for this processor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relax_fusion.estimator import violations
from relax_fusion.workload import GatedFFN, Norm, NormMatmul
from relax_fusion.workload.reference import evaluate

from ..support.emulated import How, LaunchError, emulated, needs_compiler
from ..support.interpreted import Interpreter
from ..support.operand_cases import tf32
from ..support.slow import sampled
from .cases import CASES, H200, HOWS, Case, K, N, integers, plan

pytestmark = needs_compiler


def test_the_cases_are_of_plans_that_the_family_allows() -> None:
    assert [name for name, case in CASES.items() if not case.is_allowed] == []


@pytest.mark.parametrize("case", sampled(CASES.values(), 5), ids=CASES)
def test_results_are_rounded_once(case: Case) -> None:
    """In whatever order threads run, and whenever copies arrive."""
    for how in HOWS:
        case.check(how)


@pytest.mark.parametrize("rows", [0, 1, 8, 16, 17, 97])
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "split", "int8_swapped"),
        *sampled(["swapped_parts", "sharing_weights", "tf32_swapped", "int8"]),
    ],
)
def test_any_number_of_rows(name: str, rows: int) -> None:
    replace(CASES[name], rows=rows).check(How(seed=rows))


@pytest.mark.parametrize(
    ("name", "k"),
    [
        *(("sharing_both", k) for k in (8, 64, 72, 128, 248)),
        *(("int8_sharing", k) for k in (16, 128, 144, 256, 496)),
        *(("tf32_parts", k) for k in (4, 32, 36, 64, 124)),
    ],
)
def test_any_number_of_steps(name: str, k: int) -> None:
    case = CASES[name]
    replace(case, work=replace(case.work, k=k)).check(How(late=True))


def test_nan_and_infinity_stay_in_their_rows() -> None:
    case = CASES["plain"]
    given = case.inputs()
    given["x"][5, 3], given["x"][7, K - 1] = np.nan, np.inf
    given["w0"][11], given["w0"][:, K - 1] = 0, 1
    got = emulated(case.work, case.plan, given, dev=case.dev)["out0"].astype("float64")
    assert np.isnan(got[5]).all() and (got[7] == np.inf).all()
    assert np.isfinite(np.delete(got, [5, 7], axis=0)).all() and got.shape == (case.rows, N)


@pytest.mark.parametrize("name", ["tf32_parts", "tf32_swapped", "tf32_gated"])
def test_copies_round_float32_to_tf32(name: str) -> None:
    """To nearest: what an instruction drops of the bits behind would be another number.

    None is in the middle of two: which of them a copy takes is not documented.
    """
    case = CASES[name]
    assert isinstance(case.work, NormMatmul | GatedFFN) and case.work.allow_tf32
    rng = np.random.default_rng(2)
    drawn = {n: rng.standard_normal(a.shape, "float32") for n, a in case.inputs().items()}
    drawn = {n: (a.view("uint32") | 1).view("float32") for n, a in drawn.items()}
    given = {n: tf32(a) if n[0] in "xw" else a for n, a in drawn.items()}
    got = emulated(case.work, case.plan, drawn, dev=case.dev)["out0"]
    exact, other = (evaluate(case.work.graph, some)["out0"] for some in (given, drawn))
    error = np.abs(got - exact).max()
    assert error < 2.0**-18 * np.abs(exact).max() and 100 * error < np.abs(got - other).max()


def test_float32_behind_a_norm() -> None:
    work = replace(CASES["tf32"].work, norm=Norm("rms", 1e-5))
    case = replace(CASES["tf32"], work=work)
    given = {n: np.asarray(a, "float32") for n, a in case.inputs().items()}
    got = emulated(work, case.plan, given, dev=case.dev, interpreter=Interpreter())["out0"]
    exact = evaluate(work.graph, given)["out0"]
    assert case.is_allowed and np.abs(got - exact).max() < 2.0**-9 * np.abs(exact).max()


def test_sums_of_integers_are_of_all_32_bits() -> None:
    case = replace(CASES["int8_split"], work=integers(k=1040, dtype="int8"))
    given = {n: np.full_like(a, -128) for n, a in case.inputs().items()}
    given["x"][3] = 127
    got = emulated(case.work, case.plan, given, dev=case.dev)["out0"]
    assert (np.delete(got, 3, axis=0) == 1040 * 128 * 128).all() and (
        got[3] == -1040 * 127 * 128
    ).all()


def test_one_stage_would_hang_and_is_refused() -> None:
    case = replace(CASES["plain"], plan=plan(16, 64, num_stages=1))
    assert [*violations(case.plan, case.work, H200)] == ["num_stages is 1, must be at least 2"]
    with pytest.raises(LaunchError, match=r"no thread can go on:(.|\n)*empty\[0\] of block 0"):
        case.run(How())
