"""What a tile occupies, and every sentence that refuses one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import Footprint, footprint, violations
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import generic_cpu

from ..support.estimator_cases import AVX2, AVX512, GPU, attention, gated_ffn, norm_matmul

CPU_PLAN = TilePlan(8, 64, 4096, reg_m=4, reg_n=2, lanes=8, family="cpu_tiles")
GPU_PLAN = TilePlan(64, 64, 32, reg_m=4, reg_n=4, lanes=8, num_warps=8, family="fma_tiles")
ATT_PLAN = TilePlan(32, 64, 64, lanes=8, num_warps=4, family="fma_attention")

FOOTPRINTS = [
    (norm_matmul(), GPU_PLAN, GPU, Footprint(128 * 33 * 4, 16 + 8 + 32, 256)),
    (gated_ffn(), GPU_PLAN, GPU, Footprint(192 * 33 * 4, 32 + 12 + 32, 256)),
    (norm_matmul(), CPU_PLAN, AVX2, Footprint(0, 8 + 6, 1, 256, 4096 * (8 * 4 + 2 * 2))),
    (
        norm_matmul(layout="kn"),
        TilePlan(8, 64, 4096, reg_m=4, reg_n=16, lanes=8, family="cpu_tiles"),
        *(AVX2, Footprint(0, 8 + 6, 1, 256, 4096 * (8 * 4 + 16 * 2))),
    ),
    (
        attention(),
        ATT_PLAN,
        GPU,
        Footprint(2 * (32 + 64) * 64 + 4 * 32 * (65 + 4), 16 + 17 + 32, 128),
    ),
    (
        attention(),
        TilePlan(32, 64, 64, lanes=8, family="cpu_attention"),
        *(AVX2, Footprint(0, 4, 1, 32, 4 * (32 * (64 * 3 + 4) + 64 * 64))),
    ),
]


@pytest.mark.parametrize(("work", "plan", "dev", "expected"), FOOTPRINTS)
def test_footprint(work, plan, dev, expected):
    assert footprint(work, plan, dev) == expected
    assert violations(plan, work, dev) == ()


def gpu_plan(**change) -> TilePlan:
    return replace(GPU_PLAN, **change)


def cpu_plan(**change) -> TilePlan:
    return replace(CPU_PLAN, **change)


KN = norm_matmul(layout="kn")
SENTENCES = [
    (gpu_plan(num_stages=2), norm_matmul(), GPU, "num_stages is 2, backend 'tir' loads in 1 stage"),
    (gpu_plan(split_k=4), norm_matmul(), GPU, "split_k is 4, backend 'tir' reduces in 1 part"),
    (gpu_plan(block_k=64), norm_matmul(k=32), GPU, "block_k is 64, the reduction has 32 elements"),
    (
        replace(ATT_PLAN, block_k=32),
        *(attention(), GPU),
        "block_k is 32, attention holds all 64 of head_dim",
    ),
    (
        gpu_plan(block_k=128),
        *(norm_matmul(), GPU),
        "needs 66048 B of shared memory, backend 'tir' declares it statically and has 49152 B",
    ),
    (
        gpu_plan(reg_m=1, reg_n=2, num_warps=64),
        *(norm_matmul(), GPU),
        "needs 2048 threads, a block of the H200 has 1024",
    ),
    (
        gpu_plan(block_m=4, block_n=12, num_warps=1),
        *(norm_matmul(), GPU),
        "needs 3 threads, which is no multiple of a warp's 32",
    ),
    (
        gpu_plan(num_warps=4),
        *(norm_matmul(), GPU),
        "num_warps is 4, the tile needs 256 threads in warps of 32",
    ),
    (
        gpu_plan(reg_m=16, reg_n=16, block_m=128, block_n=128, block_k=16, num_warps=2),
        *(norm_matmul(), GPU),
        "needs 320 registers per thread, the H200 has 255",
    ),
    (
        gpu_plan(reg_m=8, reg_n=8, block_m=256, block_n=256, block_k=16, num_warps=32),
        *(norm_matmul(), GPU),
        "needs 114688 registers per block, a multiprocessor of the H200 has 65536",
    ),
    (
        gpu_plan(lanes=16),
        *(norm_matmul(), GPU),
        "lanes is 16, must be a power of two and at most 8, the float16 elements of a load of 16 B",
    ),
    (gpu_plan(block_k=20), norm_matmul(), GPU, "lanes is 8, does not divide block_k=20"),
    (gpu_plan(block_n=36, num_warps=9), KN, GPU, "lanes is 8, does not divide block_n=36"),
    (ATT_PLAN, attention(dims=(64, 60)), GPU, "lanes is 8, does not divide v_dim=60"),
    (cpu_plan(num_warps=1), norm_matmul(), AVX2, "num_warps is 1, a CPU task has 0"),
    (
        cpu_plan(lanes=16),
        *(norm_matmul(), AVX2),
        "lanes is 16, must be a power of two and at most 8, the float32 elements of a vector of "
        "32 B",
    ),
    (
        cpu_plan(),
        *(gated_ffn(), AVX2),
        "needs 22 vector registers, a core of the 8-core CPU has 16",
    ),
    (
        cpu_plan(reg_m=4, reg_n=8, lanes=16),
        *(norm_matmul(), AVX512),
        "needs 2048 B of accumulators, a stack buffer may have 1024 B",
    ),
    (
        TilePlan(256, 1024, 64, family="cpu_attention"),
        *(attention(), AVX2),
        "needs 1445888 B of cache, a core of the 8-core CPU has 524288 B of L2",
    ),
    (
        TilePlan(4, 20, 64, lanes=8, family="cpu_attention"),
        attention(),
        AVX2,
        "lanes is 8, does not divide block_n=20",
    ),
    (
        TilePlan(4, 16, 64, lanes=8, family="cpu_attention"),
        *(attention(dims=(64, 60)), AVX2),
        "lanes is 8, does not divide v_dim=60",
    ),
    (cpu_plan(block_k=3000), norm_matmul(), AVX2, "block_k is 3000, does not divide k=4096"),
    (cpu_plan(block_k=4), norm_matmul(), AVX2, "lanes is 8, does not divide block_k=4"),
    (cpu_plan(), KN, AVX2, "lanes is 8, does not divide reg_n=2"),
]


@pytest.mark.parametrize(("plan", "work", "dev", "sentence"), SENTENCES, ids=lambda v: str(v)[:40])
def test_each_violation_has_its_sentence(plan, work, dev, sentence):
    assert sentence in violations(plan, work, dev)


def test_all_violations_are_told_at_once():
    bad = TilePlan(64, 64, 8192, num_stages=2, split_k=2, num_warps=1, family="fma_tiles")
    assert len(violations(bad, norm_matmul(), GPU)) >= 5


def test_label_names_the_host():
    assert "the 3-core CPU" in violations(cpu_plan(), gated_ffn(), generic_cpu(3, 32))[0]
