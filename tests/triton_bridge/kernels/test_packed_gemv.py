"""Dot products of a few rows and weights of few bits: numbers, and what is compiled."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_fusion.estimator import Problem, candidates
from relax_fusion.estimator.families.triton_matmul.packed import PackedGemv
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.quantization import MXFP4
from relax_fusion.workload import DynamicDim, GatedFFN, Norm, NormMatmul, Packed, Rope
from relax_fusion.workload.reference import evaluate

from ...cuda_kernels.packed_cases import INT8, Q4, Q8, packed
from ...support.contraction_cases import RMS, plain, turned
from ...support.interpreted import Interpreter
from ...support.launches import H200, interpreted, launch_cases, parameters
from ...support.slow import sampled
from ...support.workloads import inputs
from .compiled import SIGNS, compiled, stack_bytes

HALF = ("float16", "float16")
ROWS = DynamicDim("rows")
QKV = (plain(24, "bias"), plain(8), plain(16))
GATED = GatedFFN(ROWS, 96, 40, "nk", True, True, "silu", RMS, *HALF)
WORKS = {
    "epilogue": packed(NormMatmul(ROWS, 96, (plain(24, "bias", "gelu", "residual"),), None, *HALF)),
    "three": packed(NormMatmul(ROWS, 96, QKV, replace(RMS, unit_offset=True), *HALF), k=96),
    "layer": packed(NormMatmul(ROWS, 72, QKV[:1], Norm("layer", 1e-5, beta=True), *HALF), k=72),
    "rope": packed(
        NormMatmul(ROWS, 96, (turned(Rope(16, 32, "float32"), 48, "bias"),), RMS, *HALF), k=96
    ),
    "normed": packed(NormMatmul(ROWS, 96, QKV, replace(RMS, returns_norm=True), *HALF), k=96),
    "gate first": packed(GATED),
    "up first": packed(replace(GATED, gate_first=False, norm=None)),
    "apart": packed(replace(GATED, merged=False, bias=True)),
    "mxfp4": packed(NormMatmul(ROWS, 96, QKV, RMS, *HALF), MXFP4, 96),
    "bytes": packed(NormMatmul(ROWS, 96, QKV, RMS, *HALF), Q8, 96),
    "int8": packed(NormMatmul(ROWS, 96, QKV, RMS, *HALF), INT8, 104),
    "int8 in groups": packed(NormMatmul(ROWS, 96, QKV, None, *HALF), replace(INT8, group=24), 96),
    "groups of 12": packed(
        NormMatmul(ROWS, 96, QKV, RMS, *HALF), Packed(4, 12, 8, word="uint8"), 96
    ),
}
PLANS = [
    TilePlan(m, 16, k, num_warps=2, family="packed_gemv") for m in (1, 2, 4) for k in (64, 256)
]


@pytest.mark.parametrize(("plan", "name"), sampled([*product(PLANS, WORKS)], 3))
def test_launches_match_float64(interpreter: Interpreter, plan: TilePlan, name: str) -> None:
    work = WORKS[name]
    if name == "normed":
        plan = replace(plan, block_k=256)
    given = inputs(work, {"rows": 3})
    exact, got = evaluate(work.graph, given), interpreted(interpreter, work, plan, given)
    for out in work.graph.outputs:
        error = np.abs(got[out.name] - exact[out.name]).max()
        assert error <= 1e-3 * np.abs(exact[out.name]).max()


def test_rows_beyond_the_last_are_not_read(interpreter: Interpreter) -> None:
    given = inputs(WORKS["three"], {"rows": 5})
    alone = interpreted(interpreter, WORKS["three"], PLANS[4], given)["out1"]
    one = {**given, "x": given["x"][4:]}
    again = interpreted(interpreter, WORKS["three"], PLANS[0], one)["out1"]
    np.testing.assert_allclose(alone[4:], again, rtol=2e-3, atol=1e-3)


def test_one_launch_has_the_norm_and_three_weights() -> None:
    for name, launches in (("three", 1), ("gate first", 1), ("epilogue", 1)):
        steps = launch_cases(WORKS[name], PLANS[0], parameters(WORKS[name]))[0][1]
        assert [s.function.__name__ for s in steps] == ["gemv"] * launches


WIDE = packed(NormMatmul(ROWS, 4096, (plain(6144),), RMS, *HALF), k=4096)
BIG: dict[str, Any] = {
    "q4": WIDE,
    "gated": packed(replace(GATED, n=14336), k=4096),
    "q8": packed(WIDE, Q8, 4096),
    "int8": packed(WIDE, INT8, 4096),
    "mxfp4": packed(WIDE, MXFP4, 4096),
}


@pytest.mark.parametrize("name", BIG)
def test_words_are_unpacked_where_they_are_loaded(name: str, tmp_path: Path) -> None:
    columns = 4 if name == "gated" else 8
    made = compiled(BIG[name], TilePlan(1, columns, 4096, num_warps=4, family="packed_gemv"))
    text = made.ptx.decode()
    assert stack_bytes(made.image, tmp_path) == 0 and made.scratch_bytes == 0
    # Once for sums, and once for results: neither words nor rows nor scales change lanes
    assert text.count("bar.sync") <= 4 and "stmatrix" not in text
    assert "cvt.rn.f32.u" not in text and "cvt.rn.f32.s" not in text
    assert re.search(SIGNS["wide loads"], text) and "griddepcontrol.wait" in text


def test_plans_stay_in_registers(tmp_path: Path) -> None:
    for work in (WIDE, BIG["gated"]):
        plans = [p for p in candidates(work, H200) if p.family == "packed_gemv"]
        heaviest = max(plans, key=lambda p: p.block_m * p.block_n * p.block_k / p.num_warps)
        assert {p.block_m for p in plans} == {1, 2}
        assert stack_bytes(compiled(work, heaviest).image, tmp_path) == 0


REFUSED = {
    "along columns": replace(Q4, axis=-2),
    "zeros apart": replace(Q4, zero=None),
    "three bits": Packed(3, 40, 3),
    "float8": Packed(8, -1, 0, word="float8_e4m3fn", number="float8_e4m3fn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused(name: str) -> None:
    work = packed(NormMatmul(ROWS, 160, QKV, None, *HALF), REFUSED[name], 160)
    said = PackedGemv().refuses(Problem(work, H200))
    assert said and "takes bytes, or words of 2, 4 or 8 fields" in said


def test_what_a_lane_does_not_have() -> None:
    plan = TilePlan(4, 16, 4096, num_warps=4, family="packed_gemv")
    problem = Problem(WIDE, H200)
    (said,) = PackedGemv().violations(plan, problem)
    assert said.startswith("a thread holds ")
    (said,) = PackedGemv().violations(replace(plan, block_m=1, block_n=2, split_k=2), problem)
    assert said == "split_k is 2, family 'packed_gemv' reduces in 1 part"
    assert "block_k is 4, a lane has 8 at a time" in [
        *PackedGemv().violations(replace(plan, block_k=4, num_warps=1), problem)
    ]
