"""Kernels of CPUs: plans that pack weights into panels, and prices of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import AttentionSize, Choice, candidates, choose, predict, violations
from relax_fusion.estimator.families.cpu_dots import DOTS
from relax_fusion.estimator.families.cpu_tiles import PANELS as FAMILY
from relax_fusion.estimator.families.cpu_tiles import CpuPlan
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import Capabilities, generic_cpu
from relax_fusion.hardware.instructions import PAIR_DOT
from relax_fusion.workload import Attention

from ..support.estimator_cases import AVX2, AVX512, GPU, attention, gated_ffn, norm_matmul

FLOAT = norm_matmul(dtype="float32")


def panels(work, dev):
    return [plan for plan in candidates(work, dev) if plan.family == FAMILY]


@pytest.mark.parametrize(("dev", "most"), [(AVX512, 28), (AVX2, 12)])
def test_tiles_fill_the_registers_and_no_more(dev, most):
    found = panels(FLOAT, dev)
    accumulators = [plan.reg_m * plan.reg_n // plan.lanes for plan in found]
    assert max(accumulators) >= most
    for plan, sums in zip(found, accumulators, strict=True):
        assert sums + plan.reg_n // plan.lanes < dev.vector_registers


def test_a_pair_takes_half_the_rows():
    tallest = {
        work: max(plan.reg_m for plan in panels(work, AVX512) if plan.reg_n == 32)
        for work in (norm_matmul(n=14336), gated_ffn())
    }
    alone, pair = tallest.values()
    assert alone >= 2 * pair


def test_few_panels_on_many_cores_are_shared():
    narrow, many = norm_matmul(n=768), generic_cpu(64, 64)
    plan = choose(narrow, many, always=True).plans.plan_for(2000)
    assert isinstance(plan, CpuPlan) and plan.split_m > 1
    assert 768 // plan.reg_n * plan.split_m >= 64
    alone = replace(plan, split_m=1)
    assert predict(narrow, alone, many, 2000).seconds > predict(narrow, plan, many, 2000).seconds


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_many_rows_take_panels_and_one_row_does_not(layout):
    choice = choose(norm_matmul(dtype="float32", layout=layout), AVX512)
    assert isinstance(choice, Choice)
    assert choice.plans.plan_for(1).family == "cpu_tiles"
    assert choice.plans.plan_for(1000).family == FAMILY


def test_packing_is_paid_once_for_all_rows():
    plan = panels(FLOAT, AVX512)[-1]
    few, many = (predict(FLOAT, plan, AVX512, rows).seconds for rows in (plan.reg_m, 480))
    assert many < few * 480 / plan.reg_m


WITH_DOTS = replace(AVX512, capabilities=Capabilities(matrix_instructions=(PAIR_DOT,)))
PAIRS = norm_matmul(dtype="bfloat16")


def test_many_rows_of_bfloat16_take_pairs_where_there_is_an_instruction():
    chosen = {dev: choose(PAIRS, dev).plans for dev in (AVX512, WITH_DOTS)}
    assert [plans.plan_for(1000).family for plans in chosen.values()] == [FAMILY, DOTS]
    assert chosen[WITH_DOTS].plan_for(1).family == "cpu_tiles"
    apart, together = (predict(PAIRS, p.plan_for(1000), d, 1000) for d, p in chosen.items())
    assert 1.5 < apart.seconds / together.seconds < 2


def test_other_dtypes_and_odd_sums_have_no_pairs():
    for work in (FLOAT, norm_matmul(dtype="float16"), replace(PAIRS, k=4095)):
        assert not any(plan.family == DOTS for plan in candidates(work, WITH_DOTS))
    depths = {p.block_k for p in candidates(replace(PAIRS, k=774), WITH_DOTS) if p.family == DOTS}
    assert depths == {86}, "129 divides 774, too, and is odd"


GOOD = TilePlan(6, 32, 4096, reg_m=6, reg_n=32, lanes=16, family=FAMILY)
WRONG = [
    (GOOD, FLOAT, GPU, "family is 'panels', there is 'cuda' and 'gemv' and"),
    (replace(GOOD, block_m=12), FLOAT, AVX512, "block_m is 12, family 'panels' has reg_m of them"),
    (replace(GOOD, block_k=300), FLOAT, AVX512, "block_k is 300, does not divide k=4096"),
    (replace(GOOD, block_n=24, reg_n=24), FLOAT, AVX512, "lanes is 16, does not divide reg_n=24"),
    (replace(GOOD, split_k=2), FLOAT, AVX512, "split_k and num_stages are 1"),
    (replace(GOOD, family=DOTS), PAIRS, AVX512, "2-core CPU has no instruction for 2 x bfloat"),
    (replace(GOOD, family=DOTS), FLOAT, WITH_DOTS, "family 'dots' multiplies int8, uint8, bf"),
    (
        replace(GOOD, family=DOTS),
        *(
            PAIRS,
            replace(WITH_DOTS, vector_bytes=32),
            "2-core CPU has no instruction for 2 x bfloat16",
        ),
    ),
    (
        replace(GOOD, block_k=1, family=DOTS),
        PAIRS,
        WITH_DOTS,
        "block_k is 1, family 'dots' has words of 2",
    ),
    (replace(GOOD, block_m=15, reg_m=15), FLOAT, AVX512, "needs 33 vector registers"),
    (
        replace(CpuPlan.of(GOOD), family="cpu_tiles", split_m=2),
        *(FLOAT, AVX512, "split_m is 2, family 'cpu_tiles' has 1"),
    ),
    (replace(GOOD, family="zzz"), FLOAT, AVX512, "family is 'zzz', there is 'cuda' and 'gemv'"),
    (
        GOOD,
        attention(),
        AVX512,
        "family is 'panels', there is 'cpu_attention' for Attention on a cpu",
    ),
]


def test_a_good_plan_has_no_violations():
    assert violations(GOOD, FLOAT, AVX512) == ()


@pytest.mark.parametrize(("plan", "work", "dev", "sentence"), WRONG)
def test_violations(plan, work, dev, sentence):
    assert any(sentence in said for said in violations(plan, work, dev))


ONE_CORE = replace(
    AVX512,
    sm_count=1,
    clock_hz=2.6e9,
    l2_bytes=1 << 19,
    l2_bytes_per_s=32 * 2.6e9,
    fma_float32_flops_per_s=64 * 2.6e9,
)
LLAMA = attention(1, 1, 1024, (32, 8), (128, 128), causal="bottom_right")

MEASURED_US = [
    # One core of a Zen 4 at 2.6 GHz, float32
    (LLAMA, TilePlan(4, 64, 128, reg_m=4, reg_n=64, lanes=16, family="cpu_attention"), 335),
    (LLAMA, TilePlan(1, 256, 128, reg_m=1, reg_n=64, lanes=16, family="cpu_attention"), 732),
    (LLAMA, TilePlan(4, 128, 128, reg_m=1, reg_n=16, lanes=16, family="cpu_attention"), 1119),
    (
        attention(1, 512, 512, (12, 12), (64, 64)),
        TilePlan(64, 64, 64, 4, 32, 16, family="cpu_attention"),
        10428,
    ),
    (
        attention(1, 512, 512, (12, 12), (64, 64)),
        TilePlan(32, 32, 64, 4, 32, 16, family="cpu_attention"),
        12254,
    ),
]


def float32(work: Attention) -> Attention:
    return replace(work, dtype="float32", out_dtype="float32")


def size(work: Attention) -> AttentionSize:
    return AttentionSize(work.batch, work.q_len, work.kv_len)


def chosen_alone(work: Attention) -> TilePlan:
    choice = choose(work, ONE_CORE, always=True)
    assert isinstance(choice, Choice)
    return choice.plans.entries[0][1]


@pytest.mark.parametrize(("work", "plan", "measured_us"), MEASURED_US)
def test_measured_times_are_predicted(work: Attention, plan: TilePlan, measured_us: int) -> None:
    seconds = predict(float32(work), plan, ONE_CORE, size(work)).seconds
    assert 0.75 < seconds / (measured_us * 1e-6) < 1.25


def test_heads_that_share_keys_share_a_tile_when_decoding() -> None:
    assert chosen_alone(float32(LLAMA)).block_m == 4
    assert chosen_alone(float32(replace(LLAMA, kv_heads=32))).block_m == 1


def test_a_window_costs_what_it_lets_see() -> None:
    work = float32(LLAMA)
    plan = chosen_alone(work)
    whole = predict(work, plan, ONE_CORE, size(work)).seconds
    narrow = replace(work, window=256)
    assert predict(narrow, plan, ONE_CORE, size(work)).seconds < 0.5 * whole
