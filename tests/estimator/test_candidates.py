"""The search space: fits, small, without duplicates; and workloads that no kernel computes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from relax_fusion.errors import GraphError, Reason
from relax_fusion.estimator import candidates, choose, footprint, violations
from relax_fusion.estimator.prediction import next_power, power_dividing
from relax_fusion.estimator.registry import is_launched
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import device, generic_cpu
from relax_fusion.workload import Attention, HeadNorm, Heads, NormMatmul, Projection, Rope

from ..support.estimator_cases import AVX2, AVX512, DEVICES, GPU, WORKLOADS, gated_ffn, norm_matmul

CARDS = {name: device(name) for name in ("h100", "h100_pcie", "a100", "rtx4090")}


@pytest.mark.parametrize("dev", [*DEVICES.values(), *CARDS.values()], ids=[*DEVICES, *CARDS])
@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_candidates_fit_and_are_few_and_distinct(work, dev):
    for backend in ("tir", "triton") if dev.kind == "gpu" else ("tir",):
        found = list(candidates(work, dev, backend))
        assert 0 < len(found) <= 1000
        assert len(set(found)) == len(found)
        assert not any(violations(plan, work, dev) for plan in found)
        assert backend == "triton" or not any(is_launched(plan) for plan in found)


def test_static_rows_bound_the_tile():
    found = list(candidates(norm_matmul(rows=1), GPU, "tir"))
    assert {p.block_m for p in found if p.family == "dot_products"} == {1}
    exact = list(candidates(norm_matmul(rows=1, dtype="float32"), GPU, "tir"))
    assert {p.block_m for p in exact} == {1, 2}
    assert {p.block_m for p in found if p.family == "few_rows"} == {8}  # the rows of an instruction
    assert max(p.block_m for p in candidates(norm_matmul(rows=20), GPU, "tir")) == 32


def test_gpu_block_k_divides_k_where_any_does():
    for k in (4096, 1001, 80):
        assert all(k % p.block_k == 0 for p in tiles(k))
    assert {p.block_k for p in tiles(10007)} == {16, 32}


def tiles(k: int) -> list[TilePlan]:
    """Return the plans of scalar tiles; those of tensor cores fill what is left of k with zeros."""
    return [p for p in candidates(norm_matmul(k=k), GPU, "tir") if p.family == "fma_tiles"]


def test_gpu_rows_of_one_are_whole_warps_along_k():
    dots = [p for p in candidates(norm_matmul(), GPU, "tir") if p.block_m == 1]
    assert dots
    for p in dots:
        threads_along_k = p.num_warps * 32 // (p.block_n // p.reg_n)
        assert threads_along_k % 32 == 0
        assert p.block_k % (threads_along_k * p.lanes) == 0
    wrong = replace(dots[0], block_k=dots[0].block_k + 8)
    assert "no multiple of the" in violations(wrong, norm_matmul(), GPU)[0]


def test_gpu_columns_pad_little():
    work = norm_matmul(n=768 + 32)
    found = list(candidates(work, GPU, "tir"))
    assert found
    for p in found:
        padded = -(-800 // p.block_n) * p.block_n
        assert p.block_n <= 32 or padded <= 840


@pytest.mark.parametrize(("dev", "k", "lanes"), [(AVX512, 4096, 16), (AVX2, 4096, 8), (AVX2, 6, 2)])
def test_cpu_lanes_are_the_widest_that_divide_k(dev, k, lanes):
    found = candidates(norm_matmul(k=k), dev)
    assert {p.lanes for p in found if p.family == "cpu_tiles"} == {lanes}


def test_cpu_odd_k_is_scalar_but_for_panels():
    found = list(candidates(WORKLOADS["odd"], AVX2))
    assert {p.lanes for p in found if p.family == "cpu_tiles"} == {1}
    assert {p.lanes for p in found if p.family == "panels"} == {8}


def test_cpu_tiles_divide_n_and_make_a_task_for_every_core():
    found = list(candidates(gated_ffn(), AVX2))
    assert found
    assert all(14336 % p.block_n == 0 for p in found)
    assert all(14336 // p.block_n >= AVX2.sm_count for p in found)


def test_a_prime_number_of_columns_is_not_searched_for_divisors():
    assert list(candidates(norm_matmul(n=2**31 - 1), AVX512))  # in no time; by trial in minutes


def test_nothing_is_staged_on_a_device_without_shared_memory():
    bare = replace(GPU, smem_per_block_bytes=0)
    work = norm_matmul()
    found = list(candidates(work, bare, "tir"))
    assert found and all(footprint(work, plan, bare).smem_bytes == 0 for plan in found)
    assert not list(candidates(WORKLOADS["bert"], bare, "tir"))


@pytest.mark.parametrize(("value", "power"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power(value, power):
    assert next_power(value) == power


@pytest.mark.parametrize(
    ("value", "most", "power"), [(12, 8, 4), (64, 8, 8), (7, 8, 1), (64, 6, 4)]
)
def test_power_dividing(value, most, power):
    assert power_dividing(value, most) == power


MATMUL = NormMatmul(4, 8, (Projection(8, "nk"),), None, "float32", "float32")
HEADS = Attention(1, 2, 2, 4, 2, 8, 8, 1.0, "none", None, "float32", "float32")
ROPE = Rope(8, 16, "float32")
ROPES = [
    (replace(ROPE, head_dim=7), "head_dim is 7, must be even to have pairs"),
    (replace(ROPE, pairing="both"), "pairing is 'both', must be 'halves' or 'neighbours'"),
    (replace(ROPE, rotary_dim=3), "rotary_dim is 3, must be even and at most head_dim=8"),
    (replace(ROPE, rotary_dim=16), "rotary_dim is 16, must be even and at most head_dim=8"),
    (replace(ROPE, rotary_dim=6), "rotary_dim is 6, must divide head_dim=8"),
    (replace(ROPE, period=12), "period is 12, must be whole heads of 8 and divide n=48"),
    (replace(ROPE, period=32), "period is 32, must be whole heads of 8 and divide n=48"),
    (replace(ROPE, period=8), "16 of 8 features are rotated, must be whole heads of 8"),
]


NORM = HeadNorm(16, 1e-5)
NORMS = [
    (replace(NORM, width=12), "width of a norm is 12, must be whole heads of 8 and divide n=48"),
    (replace(NORM, width=32), "width of a norm is 32, must be whole heads of 8 and divide n=48"),
    (replace(NORM, eps=math.inf), "eps of a norm is inf, must be finite"),
]


def normed(norm: HeadNorm) -> NormMatmul:
    return replace(MATMUL, outputs=(Projection(48, "nk", (), ROPE, head_norm=norm),))


def turned(rope: Rope) -> NormMatmul:
    return replace(MATMUL, outputs=(Projection(48, "nk", (), rope),))


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (3, "3 is no workload"),
        (replace(MATMUL, rows=-1), "rows is -1, must be a DynamicDim or an integer from 0 on"),
        (replace(MATMUL, k=0), "k is 0, must be an integer from 1 on"),
        (replace(MATMUL, outputs=()), "n is 0, must be an integer from 1 on"),
        (replace(MATMUL, outputs=(Projection(0, "nk"), Projection(8, "nk"))), "n of a projection"),
        (replace(MATMUL, outputs=(Projection(8, "qq"),)), "layout is 'qq', must be 'nk' or 'kn'"),
        (
            replace(MATMUL, outputs=(Projection(8, "nk", ("tan",)),)),
            "step is 'tan', must be a number or",
        ),
        (
            replace(MATMUL, rows=12, outputs=(Projection(8, "nk", ("scale:5",)),)),
            "a step is 'scale:5', must have a number of rows that it divides",
        ),
        (replace(MATMUL, dtype="float99"), "dtype is 'float99', must be of float64, float32"),
        (replace(MATMUL, outputs=(Projection(9, "nk", (), Rope(4, 8, "float32")),)), "whole heads"),
        *((turned(rope), sentence) for rope, sentence in ROPES),
        *((normed(norm), sentence) for norm, sentence in NORMS),
        (replace(HEADS, q_heads=5), "kv_heads is 2, does not divide q_heads=5"),
        (replace(HEADS, kv_heads=0), "kv_heads is 0, must be an integer from 1 on"),
        (replace(HEADS, shared=HEADS.head_dim), "shared is .*, must be below head_dim"),
        (replace(HEADS, window=0), "window is 0, must be an integer from 1 on"),
        (replace(HEADS, q_in=(8, 0)), "q_in is .8, 0., must be Heads"),
        (replace(HEADS, q_in=Heads(6, 3)), "q_in: head 6 is read, there are 6"),
        (replace(HEADS, k_in=Heads(6, 0, 6)), "k_in: head 6 is read, there are 6"),
        (replace(HEADS, v_in=Heads(6, 0, 0)), "v_in: step is 0, must be an integer from 1 on"),
        (replace(HEADS, v_in=Heads(6, -1)), "v_in: start is -1, must be an integer from 0 on"),
        (replace(HEADS, v_in=Heads(6), kv_layout="bnsh"), "v is bnsh, heads among others must be"),
    ],
)
def test_workloads_that_no_kernel_computes(work: object, sentence: str) -> None:
    with pytest.raises(GraphError, match=sentence):
        choose(work, generic_cpu(2))


@pytest.mark.parametrize("dev", CARDS.values(), ids=CARDS)
def test_no_kernel_of_a_gpu_normalises_heads(dev):
    answer = choose(normed(NORM), dev, always=True)
    assert answer.reason is Reason.NO_PLAN
    assert "have no norm of heads behind a projection" in answer.detail


def test_heads_are_normalised_where_that_saves_a_kernel():
    work = normed(NORM)
    (priced,) = choose(work, AVX2).predictions
    assert [(a.matmul, a.normalised) for a in work.apart(rows=4)] == [
        (replace(MATMUL, outputs=(Projection(48, "nk"),)), 0),
        (None, 4 * 48),
    ]
    assert priced.fused.seconds < priced.unfused.seconds
