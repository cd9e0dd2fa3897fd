"""Plans and prices of chains of matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.errors import Decline, Reason, TilePlanError
from relax_fusion.estimator import candidates, choose, footprint, predict, violations
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.workload import MatmulChain

from ..support.estimator_cases import AVX2, AVX512, GPU, ROWS, SSE

LORA = MatmulChain(512, 4096, 16, 4096, ("nk", "nk"), (), (2.0,), "float32", "float32")
WORKS = {
    "lora": LORA,
    "dynamic": replace(LORA, rows=ROWS, layouts=("kn", "kn"), r=64),
    "one_row": replace(LORA, rows=1),
    "odd": replace(LORA, k=99, r=5, n=53),
    "tiny": replace(LORA, rows=1, k=1, r=1, n=1),
    "batched": replace(LORA, rows=512, k=64, r=256, n=64, batch=8),
    "wide": replace(LORA, k=768, r=3072, n=768, dtype="float16"),
}


@pytest.mark.parametrize("name", WORKS)
def test_every_candidate_fits_and_has_a_price(name: str) -> None:
    work = WORKS[name]
    for dev in (AVX512, AVX2, SSE):
        plans = list(candidates(work, dev))
        assert plans and len(set(plans)) == len(plans) < 400
        for plan in plans:
            assert violations(plan, work, dev) == ()
            assert footprint(work, plan, dev).registers_per_thread <= dev.vector_registers
            assert predict(work, plan, dev, 33).seconds > 0


@pytest.mark.parametrize(
    ("backend", "dtype", "words"),
    [
        ("tir", "float16", f"no kernel of backend 'tir' for the {GPU.label} takes a MatmulChain"),
        ("triton", "float32", "products are of float32, generated kernels have float16"),
    ],
)
def test_what_has_no_plan_on_a_gpu(backend: str, dtype: str, words: str) -> None:
    work = replace(LORA, dtype=dtype, out_dtype=dtype)
    assert list(candidates(work, GPU, backend)) == []
    decline = choose(work, GPU, backend=backend)
    assert isinstance(decline, Decline) and decline.reason is Reason.NO_PLAN
    assert words in decline.detail


def test_a_matmul_that_has_no_tile_of_ours_is_priced_as_one_of_tvm() -> None:
    """A single row times a row of weights, as the second half of a chain of rank 1."""
    work = replace(LORA, rows=1, r=1, layouts=("nk", "kn"), outer=(), dtype="float16")
    assert list(candidates(work.matmuls[1], GPU, "tir")) == []
    choice = choose(work, GPU, always=True, backend="triton")
    assert not isinstance(choice, Decline)
    (prediction,) = choice.predictions
    assert prediction.unfused.seconds > 2 * GPU.launch_s


def test_a_narrow_intermediate_is_worth_a_kernel() -> None:
    choice = choose(LORA, AVX512)
    assert not isinstance(choice, Decline)
    (prediction,) = choice.predictions
    assert prediction.fused.dram_bytes < prediction.unfused.dram_bytes
    assert choice.plans.entries[0][1].family == "chain_panels"


def test_a_wide_intermediate_is_declined_with_both_times() -> None:
    decline = choose(replace(LORA, k=768, r=3072, n=768), AVX512)
    assert isinstance(decline, Decline) and decline.reason is Reason.NOT_PROFITABLE
    assert decline.fused_s > decline.unfused_s > 0


def test_the_gain_shrinks_as_the_intermediate_grows() -> None:
    gains = []
    for r in (16, 128, 1024):
        choice = choose(replace(LORA, r=r), AVX512, always=True)
        gains.append(choice.predictions[0].unfused.seconds / choice.predictions[0].fused.seconds)
    assert gains == sorted(gains, reverse=True)


def test_a_batch_is_priced_as_one_launch_of_each() -> None:
    single = replace(LORA, rows=512, k=64, r=256, n=64, batch=1)
    times = [
        choose(replace(single, batch=b), AVX512, always=True).predictions[0].unfused.seconds
        for b in (1, 8)
    ]
    assert 7 * times[0] < times[1] + 14 * AVX512.launch_s < 8 * times[0] + 14 * AVX512.launch_s


WRONG = [
    ({"family": "wgmma"}, "family is 'wgmma'"),
    ({"block_k": 100}, "block_k is 100, does not divide k=4096"),
    ({"block_n": 64}, "block_n is 64"),
    ({"lanes": 32}, "lanes is 32"),
    ({"num_warps": 4}, "a CPU task has 0"),
    ({"block_m": 8192}, "B of cache for rows of the intermediate"),
    ({"split_k": 2}, "split_k"),
    ({"reg_m": 16, "block_m": 16, "reg_n": 64, "block_n": 64}, "vector registers"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_a_plan_that_does_not_fit(change: dict[str, object], words: str) -> None:
    good = TilePlan(16, 32, 256, reg_m=8, reg_n=32, lanes=16, family="chain_panels")
    assert violations(good, LORA, AVX512) == ()
    with pytest.raises(TilePlanError, match=words):
        choose(LORA, AVX512, plans=replace(good, **change))


def test_weights_of_a_batch_are_packed() -> None:
    plan = TilePlan(2, 8, 16, reg_m=2, reg_n=8, lanes=8, family="chain_in_a_row")
    assert "a batch of matrices" in violations(plan, WORKS["batched"], AVX512)[0]
