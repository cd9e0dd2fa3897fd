"""Matmuls of quantised weights on tensor cores: numbers without a GPU, and what is loaded how."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import tirx

from relax_fusion import make_target
from relax_fusion.dlight_rules import GenericMatmulRule
from relax_fusion.estimator.families.few_rows import tiles as few_rows
from relax_fusion.estimator.registry import table_of
from relax_fusion.estimator.tile_plan import PLAN_ATTR, TilePlan

from ..support.generic_cases import Quantised, check
from .generic_on_cpu import run_generic

H200 = make_target("h200")

FEW = Quantised(n=23, k=96, rows=1)

FEW_ROWS = {
    "one row": FEW,
    "many steps": replace(FEW, rows=2, k=4640, n=16),
    "eight bits": replace(FEW, bits=8),
    "three bits": replace(FEW, k=120, bits=3, group=40),
    "words of neighbouring columns": replace(FEW, layout="kn"),
    "zeros of groups": replace(FEW, zeros=True),
    "bfloat16": replace(FEW, dtype="bfloat16"),
    "a batch": replace(FEW, batch=2, n=16),
    "a batch of many rows": replace(FEW, batch=2, n=16, rows=33),
    "an epilogue": replace(FEW, epilogue=True),
}


def scheduled(case: Quantised) -> tirx.PrimFunc:
    return GenericMatmulRule().apply(case.func(), H200, False).mod["main"]


def plans(kernel: tirx.PrimFunc) -> list[TilePlan]:
    return [plan for _, plan in table_of(kernel.attrs[PLAN_ATTR]).entries]


def check_numbers(case: Quantised, family: str) -> None:
    kernel = scheduled(case)
    assert [plan.family for plan in plans(kernel)] == [family]
    assert kernel.script().count('thread="blockIdx.x"') == 1
    arrays, got = run_generic(kernel, case.func())
    check(got, case.steps, arrays)


@pytest.mark.parametrize("name", FEW_ROWS)
def test_numbers_of_few_rows(name: str) -> None:
    check_numbers(FEW_ROWS[name], few_rows.FAMILY)


@pytest.mark.parametrize("rows", [3, 16])
def test_numbers_of_wide_blocks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "COLUMNS", (32,))
    case = replace(FEW, n=40, rows=rows, k=128)
    assert plans(scheduled(case))[0].block_n == 32
    check_numbers(case, few_rows.FAMILY)
