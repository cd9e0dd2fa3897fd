"""What plans of the matmul kernel in CUDA C++ cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import footprint, predict, violations
from relax_fusion.estimator.families.cuda_matmul import cost
from relax_fusion.estimator.families.cuda_matmul.tiles import accumulators, smem_bytes, together
from relax_fusion.estimator.families.matmuls import NEXT_LAUNCH_S, NORM_S
from relax_fusion.estimator.gpu_cost import LEAST_S
from relax_fusion.workload import Projection

from ..support.cuda_plans import ALONE, FAMILY, INTEGERS, ROPE, SMALL, TF32, WIDE, plan, rotated
from ..support.estimator_cases import GPU, norm_matmul, plans_of


@pytest.mark.parametrize("rows", [777, 4096])
def test_a_faster_product_of_fewer_bytes_is_priced_lower(rows: int) -> None:
    """Of as many bytes of k a step copies as much, and multiplies at the rate of its dtype."""
    own = replace(WIDE, block_m=160)
    half, bytes_, words = (
        predict(work, replace(own, block_k=depth), GPU, rows).seconds
        for work, depth in ((ALONE, 64), (INTEGERS, 128), (TF32, 32))
    )
    assert 0.5 * half < bytes_ < 0.8 * half and 1.5 * half < words < 2.5 * half


def test_results_of_four_bytes_take_longer() -> None:
    wide = replace(ALONE, out_dtype="float32")
    half, word = (predict(w, WIDE, GPU, 4096).seconds for w in (ALONE, wide))
    assert half < word < 1.3 * half


def test_a_rotation_takes_longer_and_asks_for_both_features_of_a_pair() -> None:
    turned, same = rotated(ROPE), replace(ALONE, outputs=(Projection(256, "nk"),))
    pairs, features = plan(64, 64), plan(64, 128, groups_n=2, num_warps=12)
    assert accumulators(pairs, 2) == 2 * accumulators(features, 1)  # one warp group less
    assert footprint(turned, pairs, GPU).smem_bytes == smem_bytes(pairs, 2) + 4096
    for rows in (16, 4096):
        more, less = (
            predict(work, p, GPU, rows) for p, work in ((pairs, turned), (features, same))
        )
        assert more.flops == less.flops
        assert more.dram_bytes == less.dram_bytes + 2 * rows * 128 * 2  # of cosines and sines
        assert more.seconds > less.seconds
    found = list(plans_of(FAMILY, turned, GPU))
    assert found and not [v for p in found for v in violations(p, turned, GPU)]


def test_what_a_norm_and_another_projection_add() -> None:
    rows, own = 64, SMALL
    with_norm, without = norm_matmul(), ALONE
    more = predict(with_norm, own, GPU, rows).seconds
    less = predict(without, own, GPU, rows).seconds
    # The bytes of 64 rows take less than the least that a kernel takes
    assert more - less == pytest.approx(NORM_S + LEAST_S)
    unlike = replace(without, outputs=(Projection(6144, "nk"), Projection(6144, "nk", ("bias",))))
    both = predict(unlike, own, GPU, rows)
    once = GPU.launch_s + cost.RATES.start_s
    assert both.seconds == pytest.approx(2 * less - once + NEXT_LAUNCH_S, abs=1e-8)
    assert both.waves == 2 * predict(without, own, GPU, rows).waves


def test_projections_that_are_alike_share_a_launch() -> None:
    one = replace(ALONE, outputs=(Projection(768, "nk", ("bias",)),))
    three = replace(one, outputs=one.outputs * 3)
    assert together(three) == [[0, 1, 2]]
    assert together(replace(three, outputs=(*one.outputs, Projection(768, "nk")))) == [[0], [1]]
    alone, all_of = (predict(work, SMALL, GPU, 64).seconds for work in (one, three))
    assert alone < all_of < 1.5 * alone


def test_warp_groups_that_take_turns_hide_what_they_store() -> None:
    turns = replace(WIDE, groups_n=1, block_n=128, block_m=160, turns=2)
    shared = replace(turns, groups_n=2, turns=1)
    rows = 64 * 160
    assert predict(ALONE, turns, GPU, rows).seconds < (predict(ALONE, shared, GPU, rows).seconds)


@pytest.mark.parametrize("k", [64, 65536])
@pytest.mark.parametrize("n", [64, 262144])
@pytest.mark.parametrize("rows", [1, 65536])
def test_far_from_all_that_was_timed(k, n, rows) -> None:
    work = norm_matmul(k=k, n=n, norm=None)
    found = [
        predict(work, p, GPU, rows)
        for p in plans_of(FAMILY, work, GPU)
        if not list(violations(p, work, GPU))
    ]
    least = min(found, key=lambda each: each.seconds)
    floor = max(
        least.dram_bytes / GPU.dram_bytes_per_s, least.flops / GPU.tensor_float16_flops_per_s
    )
    carry = rows * n * cost.RATES.out_s / GPU.sm_count  # of short k, as long as what memory takes
    # What multiplies for seconds is slowed by power: 1.49 times the floor was measured for 11 ms
    assert floor < least.seconds < 1.5 * (floor + carry) + 25e-6


def test_the_bound_is_the_longest_time() -> None:
    wide = norm_matmul(n=65536, norm=None)
    assert predict(norm_matmul(n=256, k=256, norm=None), SMALL, GPU, 1).bound == "launch"
    assert predict(wide, replace(SMALL, num_stages=12), GPU, 1).bound == "dram"
    assert predict(wide, WIDE, GPU, 8192).bound == "compute"
    assert predict(wide, replace(SMALL, num_stages=1), GPU, 64).bound == "latency"
