"""Prices of attention on a CPU: shared keys, windows, and times that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import AttentionSize, Choice, choose, predict
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.workload import Attention

from ..support.estimator_cases import AVX512, attention

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


def chosen(work: Attention) -> TilePlan:
    choice = choose(work, ONE_CORE, always=True)
    assert isinstance(choice, Choice)
    return choice.plans.entries[0][1]


@pytest.mark.parametrize(("work", "plan", "measured_us"), MEASURED_US)
def test_measured_times_are_predicted(work: Attention, plan: TilePlan, measured_us: int) -> None:
    seconds = predict(float32(work), plan, ONE_CORE, size(work)).seconds
    assert 0.75 < seconds / (measured_us * 1e-6) < 1.25


def test_heads_that_share_keys_share_a_tile_when_decoding() -> None:
    assert chosen(float32(LLAMA)).block_m == 4
    assert chosen(float32(replace(LLAMA, kv_heads=32))).block_m == 1


def test_a_window_costs_what_it_lets_see() -> None:
    work = float32(LLAMA)
    plan = chosen(work)
    whole = predict(work, plan, ONE_CORE, size(work)).seconds
    narrow = replace(work, window=256)
    assert predict(narrow, plan, ONE_CORE, size(work)).seconds < 0.5 * whole
