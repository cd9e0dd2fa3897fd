"""Matmuls by experts in Triton: pairs for few rows, tiles for more, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import Choice, Problem, candidates, choose, violations
from relax_fusion.estimator.families.triton_experts import (
    PAIRS,
    TILES,
    ExpertPlan,
    TritonExperts,
    tiles_of,
)
from relax_fusion.hardware import device
from relax_fusion.quantization import MXFP4
from relax_fusion.workload import DynamicDim, ExpertMatmul, Gate, Packed

H200 = device("h200")
UP = ExpertMatmul(
    *(DynamicDim("rows"), 128, 8, 2048, 768, "nk", "bfloat16", "bfloat16"), gate=Gate()
)
MIXTRAL = replace(UP, experts=8, chosen=2, k=4096, n=14336)


@pytest.mark.parametrize("work", [UP, MIXTRAL, replace(MIXTRAL, layout="kn")])
def test_tiles_grow_with_the_rows_of_an_expert(work: ExpertMatmul) -> None:
    choice = choose(work, H200)
    assert isinstance(choice, Choice)
    plans = [choice.plans.plan_for(rows) for rows in (1, 64, 512, 4096)]
    assert [p.family for p in plans] == ["expert_pairs", *["expert_tiles"] * 3]
    heights = [p.block_m for p in plans]
    assert heights == sorted(heights) and heights[-1] == 128
    assert all(p.fused.seconds < p.unfused.seconds for p in choice.predictions)


@pytest.mark.parametrize(("k", "warps"), [(768, 8), (2048, 8), (4096, 4)])
def test_eight_warps_have_the_pair_of_a_token_where_they_hold_all_of_k(k: int, warps: int) -> None:
    choice = choose(replace(UP, k=k), H200)
    assert isinstance(choice, Choice) and choice.plans.plan_for(1).num_warps == warps


def test_more_tiles_than_experts_are_expected_of_many_rows() -> None:
    assert tiles_of(UP, 1, 16) == 8
    assert tiles_of(MIXTRAL, 1024, 16) == pytest.approx(2048 / 16 + 4, abs=1)
    assert tiles_of(MIXTRAL, 8, 128) == round(MIXTRAL.touched(8))


REFUSED = {
    "dtype is float32": replace(UP, dtype="float32", out_dtype="float32"),
    "fields": replace(UP, packed=Packed(3, 40, 3)),
    "2000 experts": replace(UP, experts=2000),
    "count to": replace(UP, n=1 << 20),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_kernels_are_not_for_is_left_to_others(why: str) -> None:
    work = REFUSED[why]
    assert why in str(TritonExperts().refuses(Problem(work, H200)))
    choice = choose(work, H200, always=True)
    assert isinstance(choice, Choice)
    assert choice.plans.plan_for(1).family == "experts"


def test_tensor_maps_are_not_for_all_weights() -> None:
    tile = ExpertPlan(*(128, 128, 64), num_stages=3, num_warps=8, family="expert_tiles")
    mapped = replace(tile, tensor_map=1)
    assert not list(violations(mapped, UP, H200))
    assert "no tensor maps" in "; ".join(violations(mapped, UP, device("a100")))
    assert "16 B" in "; ".join(violations(mapped, replace(UP, k=2044), H200))
    swapped = replace(UP, layout="kn", k=2080)
    assert "divides k" in "; ".join(violations(mapped, swapped, H200))
    assert not list(violations(tile, swapped, H200))


def test_tall_tiles_are_read_by_tensor_maps_where_that_can_be() -> None:
    def offered(work: ExpertMatmul, name: str) -> set[tuple[bool, int, int]]:
        plans = candidates(work, device(name), "triton")
        tiles = [p for p in plans if p.family == "expert_tiles"]
        return {(p.block_m >= 64, p.tensor_map, p.block_k) for p in tiles}

    low = {(False, mapped, k) for mapped in (0, 1) for k in (64, 128)}
    assert offered(UP, "h200") == {*low, (True, 1, 64)}
    apart = {(False, 0, 64), (False, 0, 128), (True, 0, 64)}
    assert offered(replace(UP, k=2044), "h200") == apart
    assert (False, 1, 128) not in offered(replace(UP, packed=Packed(4, 32, 7)), "h200")
    assert (True, 0, 32) in offered(UP, "rtx4090")


def test_threads_of_older_devices_hold_fewer_sums() -> None:
    tile = ExpertPlan(*(128, 128, 32), num_stages=3, num_warps=8, family="expert_tiles")
    assert not list(violations(tile, UP, H200))
    assert "at most 64 fit" in "; ".join(violations(tile, UP, device("a100")))
    assert isinstance(choose(UP, device("a100")), Choice)


def test_plans_that_do_not_fit_say_why() -> None:
    tile = ExpertPlan(128, 256, 64, num_stages=3, num_warps=8, family="expert_tiles")
    assert "shared memory" in "; ".join(violations(tile, UP, H200))
    pair = ExpertPlan(2, 3, 1024, num_warps=4, family="expert_pairs")
    text = "; ".join(violations(pair, UP, H200))
    assert "takes 1 pair" in text and "block_n is 3" in text
    summed = replace(UP, share="bfloat16")
    fits = replace(pair, block_m=1, block_n=4)
    assert "activates none" in "; ".join(violations(fits, summed, H200))
    assert not list(violations(fits, UP, H200))
    choice = choose(summed, H200)
    assert isinstance(choice, Choice) and choice.plans.plan_for(1).family == "expert_tiles"


def test_pairs_of_the_same_few_experts_are_sorted_sooner() -> None:
    """Weights that several pairs read one after the other do not stay in L2."""
    down = ExpertMatmul(
        *(8, 8, 2, 14336, 4096, "nk", "bfloat16", "bfloat16"), each=True, share="bfloat16"
    )
    many = replace(down, experts=128, chosen=8, k=768, n=2048)
    across = replace(down, rows=1, experts=32, chosen=4, k=2880, n=2880, layout="kn")
    for work, family in ((down, TILES), (replace(down, rows=1), PAIRS), (many, PAIRS)):
        choice = choose(work, H200)
        assert isinstance(choice, Choice) and choice.plans.plan_for(1).family == family
    choice = choose(across, H200)  # few programs go through four pairs each
    assert isinstance(choice, Choice) and choice.plans.plan_for(1).family == TILES


@pytest.mark.parametrize("form", [Packed(4, 32, 7), Packed(8, 32, 127), MXFP4])
def test_words_are_read_by_both_kernels(form: Packed) -> None:
    work = replace(UP, packed=form)
    plans = [*candidates(work, H200, "triton")]
    assert {p.family for p in plans} == {PAIRS, TILES} and not any(p.tensor_map for p in plans)
    choice, dense = choose(work, H200), choose(UP, H200)
    assert isinstance(choice, Choice) and isinstance(dense, Choice)
    for mine, other in zip(choice.predictions[:3], dense.predictions[:3], strict=True):
        assert mine.fused.seconds < other.fused.seconds
    tile = ExpertPlan(64, 128, 64, num_stages=3, num_warps=4, family=TILES)
    assert "fit its registers" in "; ".join(violations(tile, work, H200))
