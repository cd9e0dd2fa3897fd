"""What the matmul kernel for Hopper computes, compiled for this processor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul

from ..support.emulated import How, LaunchError, emulated, needs_compiler
from .cases import CASES, H200, HOWS, Case, K, N, plan

pytestmark = needs_compiler


def test_the_cases_are_of_plans_that_the_family_allows() -> None:
    assert [name for name, case in CASES.items() if not case.is_allowed] == []


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_rounded_once(case: Case) -> None:
    """In whatever order threads run, and whenever copies arrive."""
    for how in HOWS:
        case.check(how)


@pytest.mark.parametrize("rows", [0, 1, 8, 16, 17, 97])
@pytest.mark.parametrize("name", ["plain", "swapped_parts", "sharing_weights", "split"])
def test_any_number_of_rows(name: str, rows: int) -> None:
    replace(CASES[name], rows=rows).check(How(seed=rows))


@pytest.mark.parametrize("k", [8, 64, 72, 128, 248])
def test_any_number_of_steps(k: int) -> None:
    case = CASES["sharing_both"]
    replace(case, work=replace(case.work, k=k)).check(How(late=True))


def test_nan_and_infinity_stay_in_their_rows() -> None:
    case = CASES["plain"]
    given = case.inputs()
    given["x"][5, 3], given["x"][7, K - 1] = np.nan, np.inf
    given["w0"][11], given["w0"][:, K - 1] = 0, 1
    got = emulated(case.work, case.plan, given, dev=case.dev)["out0"].astype("float64")
    assert np.isnan(got[5]).all() and (got[7] == np.inf).all()
    assert np.isfinite(np.delete(got, [5, 7], axis=0)).all() and got.shape == (case.rows, N)


def test_one_stage_would_hang_and_is_refused() -> None:
    case = replace(CASES["plain"], plan=plan(16, 64, num_stages=1))
    assert [*CudaMatmul().violations(case.plan, case.work, H200)] == [
        "num_stages is 1, must be at least 2"
    ]
    with pytest.raises(LaunchError, match=r"no thread can go on:(.|\n)*empty\[0\] of block 0"):
        case.run(How())
