"""Packed weights in the matmul kernel for Hopper, compiled for this processor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relax_fusion.estimator import Problem, violations
from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul
from relax_fusion.workload import Packed, Projection
from relax_fusion.workload.reference import evaluate

from ..support.emulated import How, emulated, needs_compiler
from ..support.slow import sampled
from .cases import H200, HOWS, Case, matmul
from .packed_cases import PACKED, Q4, Q8, bfloat16, packed, plan


def refusal(form: Packed, k: int = 256, **changes: object) -> str | None:
    work = packed(matmul(dtype=str(changes.pop("dtype", "float16"))), form, k)
    return CudaMatmul().refuses(Problem(replace(work, **changes), H200))


def wrong(case: Case, **fields: int) -> list[str]:
    return [*violations(replace(case.plan, **fields), case.work, H200)]


def test_the_cases_are_of_plans_that_the_family_allows() -> None:
    assert [name for name, case in PACKED.items() if not case.is_allowed] == []


@needs_compiler
@pytest.mark.parametrize("case", sampled(PACKED.values(), 6), ids=PACKED)
def test_results_are_rounded_once(case: Case) -> None:
    """In whatever order threads run, and whenever copies arrive."""
    for how in HOWS:
        case.check(how)


@needs_compiler
@pytest.mark.parametrize("rows", [0, 1, 17, 97])
def test_any_number_of_rows(rows: int) -> None:
    replace(PACKED["q4_split"], rows=rows).check(How(seed=rows))


@needs_compiler
@pytest.mark.parametrize("form", [Q4, bfloat16(Q4), Q8, bfloat16(Q8)])
def test_weights_are_rounded_once(form: Packed) -> None:
    """Every field, times scales of all bits: rows of one 1 give the weights themselves."""
    case = Case(packed(matmul(dtype=form.scale_dtype), form, 256), plan(64, 64), rows=256)
    given = case.inputs()
    given["x"][:] = np.eye(256)
    rng = np.random.default_rng(3)
    given["w0_scale"][:] = rng.uniform(0.001, 500, given["w0_scale"].shape)
    got = emulated(case.work, case.plan, given)["out0"]
    assert (got == evaluate(case.work.graph, given)["out0"].astype(got.dtype)).all()


@needs_compiler
def test_nan_and_infinity_in_scales_stay_in_their_features() -> None:
    case = PACKED["q4_groups_of_128"]
    given = case.inputs()
    given["x"][:] = 1
    given["w0"][:] = 0x88888888  # all ones
    given["w0_scale"][5, 1], given["w0_scale"][7] = np.nan, np.inf
    given["w0"][7] = 0x99999999
    got = emulated(case.work, case.plan, given)["out0"].astype("float64")
    assert np.isnan(got[:, 5]).all() and (got[:, 7] == np.inf).all()
    assert np.isfinite(np.delete(got, [5, 7], axis=1)).all()


def test_formats_that_are_declined_say_why() -> None:
    assert refusal(Q4) is None
    assert "neighbours along k" in refusal(replace(Q4, zero=None))
    assert "neighbours along k" in refusal(replace(Q4, turns=2))
    assert "neighbours along k" in refusal(replace(Q4, across=True))
    assert "3 bits" in refusal(replace(Q4, bits=3))
    assert "float8_e4m3fn" in refusal(Packed(8, 32, 0, number="float8_e4m3fn"))
    assert "scales float16" in refusal(Q4, dtype="bfloat16", out_dtype="bfloat16")
    assert "scales none" in refusal(Packed(8, 32, 0, scale_dtype=""))
    assert "16 elements share" in refusal(replace(Q4, group=16))
    assert "zero is 16" in refusal(replace(Q4, zero=16))
    assert "multiples of 16 bytes" in refusal(Packed(4, -1, 7), k=264)
    two = (Projection(64, "nk", packed=Q4), Projection(64, "nk", packed=Q8))
    assert "in 2 ways" in refusal(Q4, outputs=two)
    assert "neighbours along k" in refusal(Q4, outputs=(Projection(64, "kn", packed=Q4),))


def test_plans_that_are_declined_say_why() -> None:
    case = PACKED["q4"]
    assert wrong(case) == []
    assert "block_k is 96" in wrong(case, block_k=96)[0]
    assert "reads 8 scales of a line at once" in wrong(case, block_k=256)[0]
    assert "not rows" in wrong(case, swapped=1, block_m=64)[0]
    assert "at most 128 bytes" in wrong(PACKED["q8"], block_k=256)[0]
    odd = replace(case, work=packed(matmul(), Packed(4, 96, 7)))
    assert "groups of 96" in wrong(odd)[0]
    assert any("registers" in text for text in wrong(case, block_m=256, block_n=128))
