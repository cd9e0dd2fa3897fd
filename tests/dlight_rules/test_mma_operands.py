"""Tensor-core kernels of integers, and of float32 as tf32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.dlight_rules.tensor_cores import layout
from relax_fusion.hardware.target import make_target

from ..support.contraction_cases import Case, plain
from ..support.operand_cases import (
    INTEGERS,
    TF32,
    IntegerCase,
    integer_cases,
    multiplied,
    tf32_cases,
)
from ..support.slow import sampled
from .test_mma import Work, computed, plans, small_plans, source_and_host


@pytest.mark.parametrize("case", sampled(integer_cases(), 2), ids=lambda case: case.name)
def test_integers_are_multiplied_exactly(case: IntegerCase) -> None:
    case.check(case.inputs(), computed(case, small_plans(case.work)[-1]))


def test_wide_tiles_of_warp_groups_are_multiplied_in_parts() -> None:
    case = IntegerCase("wide", replace(INTEGERS, rows=64, k=128, outputs=(plain(256),)))
    plan = next(p for p in plans(case.work, "wgmma") if p.block_n == 256)
    case.check(case.inputs(), computed(case, plan))


@pytest.mark.parametrize("case", sampled(tf32_cases(), 2), ids=lambda case: case.name)
def test_float32_is_multiplied_as_tf32(case: Case) -> None:
    case.check(multiplied(case.inputs()), computed(case, small_plans(case.work)[-1]))


@pytest.mark.parametrize("k", [136, 130, 97])
def test_warp_groups_multiply_what_threads_have_rounded(k: int) -> None:
    case = Case("groups", replace(TF32, k=k, outputs=(plain(64),)))
    plan = plans(case.work, "wgmma")[-1]
    for stages in (3, plan.num_stages):
        got = computed(case, replace(plan, num_stages=stages))
        case.check(multiplied(case.inputs()), got)


@pytest.mark.parametrize(("pieces", "distance"), [(4, 1), (8, 1), (12, 1), (24, 1)])
@pytest.mark.parametrize("first", [0, 2])
def test_words_of_four_lines_lie_in_different_banks(pieces: int, distance: int, first: int) -> None:
    places = [
        layout.spread(line * distance, piece, pieces, distance)
        for line in range(4)
        for piece in (first, first + 1)
    ]
    assert len({place % 8 for place in places}) == 8


@pytest.mark.parametrize(("pieces", "distance"), [(2, 4), (4, 4), (6, 4), (4, 1), (12, 1)])
def test_no_two_pieces_share_a_place(pieces: int, distance: int) -> None:
    places = [layout.spread(i, p, pieces, distance) for i in range(16) for p in range(pieces)]
    assert sorted(places) == list(range(16 * pieces))


@pytest.mark.parametrize(
    ("work", "family", "expected"),
    [
        (INTEGERS, "mma", ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "*(int4*)(out0_ptr")),
        (
            replace(INTEGERS, outputs=(plain(80, layout="kn"),)),
            "mma",
            ("ld.shared.b32", "prmt.b32", "s32.s8.s8.s32"),
        ),
        (
            replace(INTEGERS, k=512, outputs=(plain(256),)),
            "wgmma",
            ("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8",),
        ),
        (TF32, "mma", ("cvt.rna.tf32.f32", "m16n8k8.row.col.f32.tf32.tf32.f32", "*(float4*)(out0")),
    ],
    ids=["int8", "int8_kn", "int8_wgmma", "tf32"],
)
def test_code(work: Work, family: str, expected: tuple[str, ...]) -> None:
    plan = next(p for p in plans(work, family) if family == "mma" or p.block_n == 256)
    source, _ = source_and_host(work, plan, make_target("h200"))
    for text in expected:
        assert text in source
