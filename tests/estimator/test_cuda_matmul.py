"""Plans of the matmul kernel in CUDA C++: which are generated, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import Problem, candidates, violations
from relax_fusion.estimator.families.cuda_matmul.tiles import (
    accumulators,
    clusters_at_once,
    smem_bytes,
)
from relax_fusion.hardware import device
from relax_fusion.workload import NormMatmul, Projection, Rope

from ..support.cuda_plans import (
    ALONE,
    FAMILY,
    INTEGERS,
    OTHERS,
    ROPE,
    SMALL,
    TF32,
    TURNED,
    WIDE,
    WORKS,
    rotated,
)
from ..support.estimator_cases import GPU, norm_matmul, plans_of


@pytest.mark.parametrize("work", [*WORKS.values(), *OTHERS.values()], ids=[*WORKS, *OTHERS])
@pytest.mark.parametrize("name", ["h200", "h100", "h100_pcie"])
def test_plans_fit(work, name) -> None:
    dev = device(name)
    found = list(plans_of(FAMILY, work, dev))
    assert len(found) == len(set(found))
    assert 100 <= len(found) <= 220
    assert all(not list(violations(p, work, dev)) for p in found)
    # No further stage fits
    more = [replace(p, num_stages=p.num_stages + 1) for p in found if p.num_stages < 12]
    assert more and all(list(violations(p, work, dev)) for p in more)


def test_a_stage_has_as_many_bytes_of_k_whatever_the_dtype() -> None:
    halves = {replace(p, block_k=1) for p in plans_of(FAMILY, ALONE, GPU)}
    for work, depth in ((ALONE, 64), (INTEGERS, 128), (TF32, 32)):
        found = list(plans_of(FAMILY, work, GPU))
        assert {p.block_k for p in found} == {depth}
        assert {replace(p, block_k=1) for p in found} <= halves
    tall = {p.wide // p.groups_wide for p in plans_of(FAMILY, INTEGERS, GPU)}
    assert {8, 16, 24, 32, 48, 256} <= tall and not {40, 56, 72, 104} & tall


@pytest.mark.parametrize("work", OTHERS.values(), ids=OTHERS)
def test_tirs_tensor_cores_are_for_devices_without_this_kernel(work) -> None:
    assert {p.family for p in candidates(work, GPU)} == {"cuda"}
    assert {"mma", "wgmma"} <= {p.family for p in candidates(work, GPU, "tir")}
    assert "mma" in {p.family for p in candidates(work, device("a100"))}


def test_plans_of_every_kind() -> None:
    one, pair = (list(plans_of(FAMILY, work, GPU)) for work in WORKS.values())
    assert {p.block_m for p in one} >= set(range(8, 65, 8))
    assert {p.split_k for p in one} == {1, 2, 4, 8}
    for found in (one, pair):
        assert {p.swapped for p in found} == {0, 1}
        assert {(p.blocks, p.cluster_m) for p in found} == {(1, 1), (1, 2), (2, 1)}


@pytest.mark.parametrize(
    ("own", "weights", "of_a_thread", "smem"),
    [
        # 4 stages of 64 + 64 lines of 128 bytes, 4 KiB on their way out, and 8 barriers
        (SMALL, 1, 32, 4 * 128 * 128 + 4096 + 64),
        (SMALL, 2, 64, 4 * 192 * 128 + 4096 + 64),
        (WIDE, 1, 128, 4 * 384 * 128 + 2 * 4096 + 64),
        (TURNED, 1, 128, 4 * 384 * 128 + 2 * 4096 + 64),
    ],
)
def test_resources(own, weights, of_a_thread, smem) -> None:
    assert (accumulators(own, weights), smem_bytes(own, weights)) == (of_a_thread, smem)


ADDING = replace(ALONE, outputs=(Projection(4096, "nk", ("residual",)),))
SENTENCES = [
    (replace(SMALL, block_n=96), ALONE, "block_n is 96, must be a multiple of 64"),
    (replace(SMALL, block_m=60), ALONE, "block_m is 60, must be a multiple of 8"),
    (replace(TURNED, block_m=192), ALONE, "block_m is 192, must be a multiple of 128"),
    (replace(SMALL, block_m=264, num_stages=3), ALONE, "a warp group has 264 lines, at most 256"),
    (
        replace(SMALL, block_m=40, block_k=128),
        INTEGERS,
        "a warp group has 40 lines; of int8, must be 8, 24 or a multiple of 16",
    ),
    (replace(SMALL, block_k=64), INTEGERS, "block_k is 64, family 'cuda' has 128 for this"),
    (replace(SMALL, block_k=32), ALONE, "block_k is 32, family 'cuda' has 64 for this"),
    (replace(SMALL, num_warps=4), ALONE, "num_warps is 4, family 'cuda' has 8 for this"),
    (
        replace(SMALL, block_n=256, groups_n=4, num_warps=20),
        ALONE,
        "4 warp groups multiply, at most 3",
    ),
    (
        replace(WIDE, blocks=2),
        ALONE,
        "a multiprocessor holds 2 blocks, at most 2 of one warp group",
    ),
    (replace(WIDE, block_m=184), ALONE, "a thread has 184 accumulators, at most 176 fit"),
    (replace(SMALL, cluster_m=3), ALONE, "a cluster has 3 thread blocks, must be 1, 2, 4 or 8"),
    (
        replace(SMALL, cluster_m=2, split_k=2),
        ALONE,
        "k is split in 2 parts, blocks that split k share no copies",
    ),
    (replace(SMALL, split_k=8), norm_matmul(k=256), "k is split in 8 parts, it has 4 blocks"),
    (
        replace(SMALL, groups_k=3, num_warps=16),
        ALONE,
        "num_stages is 4, must be a multiple of 3 sets",
    ),
    (
        replace(SMALL, groups_k=3, num_warps=16, num_stages=3),
        ALONE,
        "num_stages is 3, must be at least 6",
    ),
    (
        replace(WIDE, num_stages=2, split_k=2),
        ALONE,
        "the sums of a tile are 131072 B, its stages have room for less",
    ),
    (
        replace(SMALL, block_m=8, cluster_n=2),
        ALONE,
        "4 lines of rows are copied at once, must be a multiple of 8 up to 256",
    ),
    (
        replace(SMALL, block_m=512, groups_m=2, num_warps=12, num_stages=2),
        ALONE,
        "512 lines of rows are copied at once, must be a multiple of 8 up to 256",
    ),
    (
        replace(WIDE, num_stages=5),
        ALONE,
        "needs 254032 B of shared memory, there are 232448 B for a block",
    ),
    (
        replace(SMALL, groups_n=2, block_n=128, num_warps=20, turns=2),
        ALONE,
        "4 warp groups multiply, at most 3",
    ),
    (
        replace(SMALL, num_warps=12, turns=2, split_k=2),
        ALONE,
        "1 warp groups take 2 turns; must be 1 and 2, and k not split",
    ),
    (replace(SMALL, num_warps=12, turns=2), ADDING, "warp groups that take turns add no residual"),
    (
        replace(WIDE, block_m=192, block_n=136, groups_m=3, swapped=1, num_stages=2),
        ADDING,
        "num_stages is 2, must be at least 3",
    ),
    (
        replace(TURNED, block_n=128),
        norm_matmul(layout="kn"),
        "weights lie as [k, n], which are the tall operand of blocks that share no copies",
    ),
    (
        replace(SMALL, num_stages=7, blocks=2),
        ALONE,
        "needs 118896 B of shared memory, there are 115712 B for a block",
    ),
]


@pytest.mark.parametrize(("wrong", "work", "sentence"), SENTENCES)
def test_each_violation_has_its_sentence(wrong, work, sentence) -> None:
    assert sentence in [*violations(wrong, work, GPU)]


ROTATED = [
    (rotated(ROPE), ""),
    (rotated(replace(ROPE, dtype="float32", by_pair=True, positions=7), 256, "bias"), ""),
    (rotated(replace(ROPE, pairing="neighbours", rotary_dim=96), 264), ""),
    (rotated(ROPE, layout="kn"), ""),
    (
        rotated(ROPE, 256, "bias", "relu"),
        "family 'cuda' rotates a matmul with a bias, and with no other step before it",
    ),
    (
        rotated(Rope(64, 256, "float16"), layout="kn"),
        "pairs of rotated features are 32 apart, of weights [k, n] it must be a multiple of 64",
    ),
    (
        rotated(Rope(24, 240, "float16"), 240),
        "pairs of rotated features are 12 apart, family 'cuda' needs a multiple of 8",
    ),
    (
        rotated(ROPE, 264),
        "n is 264, pairs of rotated features are 64 apart: must be a multiple of 128",
    ),
    (
        rotated(replace(ROPE, pairing="neighbours", rotary_dim=20)),
        "20 features of heads of 128, each 256, are rotated, family 'cuda' needs multiples of 8",
    ),
    (
        rotated(replace(ROPE, dtype="bfloat16")),
        "angles are bfloat16, family 'cuda' takes float32 and float16",
    ),
]


@pytest.mark.parametrize(("work", "sentence"), ROTATED)
def test_which_rotations_are_refused(work: NormMatmul, sentence: str) -> None:
    assert (FAMILY.refuses(Problem(work, GPU)) or "") == sentence


@pytest.mark.parametrize(
    ("work", "dev", "sentence"),
    [
        (ALONE, "a100", "family 'cuda' needs TMA and wgmma (sm_90), which the A100"),
        (norm_matmul(dtype="float32"), "h200", "dtype is float32, family 'cuda' multiplies it as"),
        (
            replace(ALONE, dtype="int32"),
            "h200",
            "dtype is int32, family 'cuda' takes float16, bfloat16, int8, uint8, float32",
        ),
        (
            replace(ALONE, out_dtype="bfloat16"),
            "h200",
            "results are bfloat16, family 'cuda' stores float16, float32 of products of float16",
        ),
        (
            replace(INTEGERS, out_dtype="int8"),
            "h200",
            "results are int8, family 'cuda' stores float32, float16, bfloat16, int32 of products",
        ),
        (
            replace(INTEGERS, outputs=(Projection(64, "kn"),)),
            "h200",
            "weights of int8 lie as [k, n], family 'cuda' multiplies them as [n, k]",
        ),
        (
            replace(INTEGERS, norm=norm_matmul().norm),
            "h200",
            "dtype is int8, of which family 'cuda' has matmuls without norms and gates",
        ),
        (
            replace(INTEGERS, outputs=(Projection(64, "nk", ("scale",)),)),
            "h200",
            "results are int32, of which family 'cuda' stores sums without steps",
        ),
        (
            replace(INTEGERS, outputs=(Projection(64, "nk", ("scale:1",)),), out_dtype="float32"),
            "h200",
            "an epilogue has a row for several rows, family 'cuda' has one for all",
        ),
        (
            replace(INTEGERS, outputs=(Projection(64, "nk", ("residual",)),), out_dtype="float16"),
            "h200",
            "a residual is float32, results are float16; must be of one dtype",
        ),
        (
            replace(INTEGERS, k=4104),
            "h200",
            "k is 4104, rows of a tensor map must be multiples of 16",
        ),
        (norm_matmul(k=100), "h200", "k is 100, rows of a tensor map must be multiples of 8"),
        (
            norm_matmul(n=100, layout="kn"),
            "h200",
            "n is 100 of weights [k, n], rows of a tensor map must be multiples of 8 elements",
        ),
        (
            replace(ALONE, outputs=(Projection(64, "nk", ("residual", "relu", "residual")),)),
            "h200",
            "an epilogue has several residuals, family 'cuda' adds one",
        ),
    ],
)
def test_each_refusal_has_its_sentence(work, dev, sentence) -> None:
    assert (FAMILY.refuses(Problem(work, device(dev))) or "").startswith(sentence)


def test_clusters_of_four_and_eight_leave_multiprocessors_empty() -> None:
    def at_once(**fields: int) -> int:
        return clusters_at_once(replace(SMALL, **fields), GPU.sm_count)

    assert [at_once(split_k=s) for s in (1, 2, 4, 8)] == [132, 66, 30, 15]
    assert [at_once(split_k=s, blocks=2) for s in (1, 2, 4, 8)] == [264, 132, 60, 30]
