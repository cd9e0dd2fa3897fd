"""Plans and prices of chains of two matmuls on CPUs, and what has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.errors import Decline, Reason, TilePlanError
from relax_fusion.estimator import candidates, choose, footprint, predict, violations
from relax_fusion.estimator.families.cpu_generated.family import CpuChainPlan
from relax_fusion.estimator.tile_plan import TilePlan

from ..support.estimator_cases import AVX2, AVX512, GPU, ROWS, SSE
from ..support.matmul_chains import TwoMatmuls

LORA = TwoMatmuls(512, 4096, 16, 4096, ("nk", "nk"), (), (2.0,), "float32", "float32")
FEW = replace(LORA, rows=4).chain
WORKS = {
    "lora": LORA,
    "dynamic": replace(LORA, rows=ROWS, layouts=("kn", "kn"), r=64),
    "few_rows": replace(LORA, rows=4),
    "odd": replace(LORA, k=99, r=5, n=53),
    "tiny": replace(LORA, rows=4, k=2, r=2, n=2),
    "batched": replace(LORA, rows=512, k=64, r=256, n=64, batch=8),
    "wide": replace(LORA, k=768, r=3072, n=768, dtype="float16"),
}


@pytest.mark.parametrize("name", WORKS)
def test_every_candidate_fits_and_has_a_price(name: str) -> None:
    work = WORKS[name].chain
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
        ("tir", "float16", f"no kernel of backend 'tir' for the {GPU.label} takes a Chain"),
        ("triton", "float32", "products are of float32, generated kernels have float16"),
    ],
)
def test_what_has_no_plan_on_a_gpu(backend: str, dtype: str, words: str) -> None:
    work = replace(LORA, dtype=dtype, out_dtype=dtype).chain
    assert list(candidates(work, GPU, backend)) == []
    decline = choose(work, GPU, backend=backend)
    assert isinstance(decline, Decline) and decline.reason is Reason.NO_PLAN
    assert words in decline.detail


def test_a_narrow_intermediate_is_worth_a_kernel() -> None:
    choice = choose(LORA.chain, AVX512)
    assert not isinstance(choice, Decline)
    (plan,) = [plan for _, plan in choice.plans.entries]
    assert isinstance(plan, CpuChainPlan) and plan.loops == "rows"


def test_few_rows_have_a_loop_for_each_product() -> None:
    choice = choose(WORKS["dynamic"].chain, AVX512, always=True)
    assert not isinstance(choice, Decline)
    (upper, first), *_, (_, last) = choice.plans.entries
    assert upper is not None and first.family == "cpu_products" and last.family == "cpu_generated"


def test_a_wide_intermediate_is_declined_with_both_times() -> None:
    decline = choose(replace(LORA, k=768, r=3072, n=768).chain, AVX512)
    assert isinstance(decline, Decline) and decline.reason is Reason.NOT_PROFITABLE
    assert decline.fused_s > decline.unfused_s > 0


def test_the_gain_shrinks_as_the_intermediate_grows() -> None:
    gains = []
    for r in (16, 128, 1024):
        choice = choose(replace(LORA, r=r).chain, AVX512, always=True)
        gains.append(choice.predictions[0].unfused.seconds / choice.predictions[0].fused.seconds)
    assert gains == sorted(gains, reverse=True)


def test_a_batch_is_priced_as_one_launch_of_each() -> None:
    single = replace(LORA, rows=512, k=64, r=256, n=64, batch=1)
    times = [
        choose(replace(single, batch=b).chain, AVX512, always=True).predictions[0].unfused.seconds
        for b in (1, 8)
    ]
    assert 7 * times[0] < times[1] + 14 * AVX512.launch_s < 8 * times[0] + 14 * AVX512.launch_s


GOOD = TilePlan(4, 8, 4096, reg_m=4, reg_n=4, lanes=16, family="cpu_products")
WRONG = [
    ({"family": "wgmma"}, "family is 'wgmma'"),
    ({"block_m": 8}, "block_m is 8, family 'cpu_products' has reg_m of them"),
    ({"lanes": 32}, "lanes is 32, does not divide 16"),
    ({"num_warps": 4}, "a CPU task has 0"),
    ({"split_k": 2}, "split_k"),
    ({"reg_m": 8, "block_m": 8}, "vector registers"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_a_plan_that_does_not_fit(change: dict[str, object], words: str) -> None:
    assert violations(GOOD, FEW, AVX512) == ()
    with pytest.raises(TilePlanError, match=words):
        choose(FEW, AVX512, plans=replace(GOOD, **change))


def test_columns_that_are_read_in_vectors_are_cut_evenly() -> None:
    work = replace(LORA, rows=4, layouts=("kn", "kn")).chain
    plan = replace(GOOD, block_n=48, reg_n=16)
    assert "block_n is 48, cuts 4096 columns into no whole vectors" in violations(
        plan, work, AVX512
    )


def test_a_batch_has_no_loops_for_each_product() -> None:
    assert "must be one product" in violations(GOOD, WORKS["batched"].chain, AVX512)[0]
