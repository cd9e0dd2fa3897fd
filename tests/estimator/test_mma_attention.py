"""Plans of attention on tensor cores: which there are, what they occupy, and which is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import candidates, choose, footprint, predict, violations
from relax_fusion.estimator.families import mma_attention
from relax_fusion.estimator.families.tensor_cores import tiles as mma
from relax_fusion.estimator.shape import AttentionSize
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import NO_CAPABILITIES
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import Attention

H200 = device_of(make_target("h200"))
LLAMA = Attention(
    batch=1,
    q_len=2048,
    kv_len=2048,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    v_dim=128,
    scale=128**-0.5,
    causal="bottom_right",
    bias_dims=None,
    dtype="float16",
    out_dtype="float16",
)
PLAN = TilePlan(
    128, 64, 128, reg_m=32, reg_n=64, lanes=8, num_stages=2, num_warps=4, family=mma.FAMILY
)
EVERY = (True, True, True, True)


def chosen(work: Attention) -> TilePlan:
    """Return the plan of a workload of static sizes."""
    ((_, plan),) = choose(work, H200, always=True).plans.entries
    assert plan.family == mma.FAMILY
    return plan


def test_what_tensor_cores_do_not_take_keeps_its_kernel() -> None:
    others = [
        (replace(LLAMA, dtype="float32", out_dtype="float32"), H200),
        (replace(LLAMA, head_dim=33), H200),
        (LLAMA, replace(H200, capabilities=NO_CAPABILITIES)),
    ]
    for work, dev in others:
        assert {plan.family for plan in candidates(work, dev)} == {""}


@pytest.mark.parametrize(
    ("work", "changes", "sentence"),
    [
        ({"dtype": "float32"}, {}, "dtype is float32, family 'mma' takes float16 and bfloat16"),
        ({"v_dim": 33}, {}, "v_dim is 33, family 'mma' takes even widths up to 256"),
        ({}, {"block_m": 24, "reg_m": 24}, "block_m is 24, family 'mma' takes multiples of 16"),
        ({}, {"reg_n": 16}, "reg_n is 16, a warp of family 'mma' takes all 64 keys of a block"),
        ({}, {"num_stages": 1}, "num_stages is 1, family 'mma' needs 2"),
        ({}, {"num_warps": 1}, "num_warps is 1, 128 rows of 32 make 4"),
        ({}, {"lanes": 1}, "lanes is 1, family 'mma' copies 2 elements at least"),
        ({"v_dim": 36}, {}, "lanes is 8, does not divide v_dim=36"),
        (
            {},
            {"family": "wgmma"},
            "family is 'wgmma', backend 'tir' has 'mma' and '' for Attention on a gpu",
        ),
        (
            {},
            {"num_stages": 7},
            "needs 262144 B of shared memory, a block of the H200 has 232448 B",
        ),
        ({"bias_dims": EVERY}, {}, "needs 268 registers per thread, the H200 has 255"),
    ],
)
def test_violations(work: dict, changes: dict, sentence: str) -> None:
    assert violations(PLAN, LLAMA, H200) == ()
    assert sentence in violations(replace(PLAN, **changes), replace(LLAMA, **work), H200)


def test_footprint() -> None:
    foot = footprint(LLAMA, PLAN, H200)
    assert foot.smem_bytes == (128 + 2 * 2 * 64) * 128 * 2
    assert foot.threads == 4 * 32
    # Results, scores, and a slice of the queries, which do not all fit
    assert foot.registers_per_thread == 128 + 64 + 8 + mma_attention.OVERHEAD_REGISTERS
    narrow = replace(LLAMA, head_dim=24, v_dim=40)
    assert footprint(narrow, PLAN, H200).smem_bytes == (128 * 32 + 2 * 64 * (32 + 48)) * 2
    assert not mma_attention.holds_queries(PLAN, LLAMA)
    assert mma_attention.holds_queries(replace(PLAN, reg_m=16), LLAMA)


@pytest.mark.parametrize(("widths", "lanes"), [((128, 64), 8), ((64, 20), 4), ((30, 64), 2)])
def test_copies_are_as_wide_as_the_widths_allow(widths: tuple[int, int], lanes: int) -> None:
    work = replace(LLAMA, head_dim=widths[0], v_dim=widths[1])
    assert mma_attention.copy_lanes(work) == lanes
    assert {plan.lanes for plan in candidates(work, H200)} == {lanes}


def test_choice_by_queries() -> None:
    long = chosen(LLAMA)
    assert (long.block_m, long.reg_m, long.split_k) == (128, 32, 1)
    assert chosen(replace(LLAMA, q_len=256, kv_len=256)).block_m < 128  # fills the device
    decode = replace(LLAMA, q_len=1, kv_len=8192, causal="none")
    assert chosen(decode).block_m == 16 and chosen(decode).split_k >= 8
    # Where there are enough sequences, nothing is gained by parts
    assert chosen(replace(decode, batch=64)).split_k < chosen(decode).split_k


def test_prices() -> None:
    def seconds(work: Attention, plan: TilePlan = PLAN) -> float:
        return predict(work, plan, H200, AttentionSize(1, 1, 1)).seconds

    assert seconds(replace(LLAMA, causal="none")) > 1.5 * seconds(LLAMA)
    assert seconds(replace(LLAMA, window=256)) < 0.7 * seconds(LLAMA)
    assert seconds(replace(LLAMA, softcap=50.0)) > 1.5 * seconds(LLAMA)
    # 113 us were measured
    assert seconds(LLAMA) == pytest.approx(113e-6, rel=0.1)
