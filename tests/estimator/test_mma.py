"""Plans for tensor cores on the TIR path: who has some, what they occupy, what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from relax_fusion.estimator import (
    Footprint,
    Problem,
    candidates,
    choose,
    footprint,
    predict,
    violations,
)
from relax_fusion.estimator.families.matmuls import columns_fit
from relax_fusion.estimator.families.tensor_cores.family import TensorCores
from relax_fusion.estimator.families.tensor_cores.tiles import (
    FAMILIES,
    GRIDS,
    SPLITS,
    SYSTEM_SMEM_BYTES,
)
from relax_fusion.estimator.gpu_cost import resident_blocks
from relax_fusion.estimator.shape import matmul_shape
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import NormMatmul, Projection, Rope

from ..support.contraction_cases import tensor_core_cases
from ..support.estimator_cases import (
    AVX2,
    GPU,
    ROWS,
    attention,
    gated_ffn,
    norm_matmul,
    split_plans,
)

DEVICES = [device_of(make_target(name)) for name in ("a100", "rtx3080", "rtx4090", "h200")]
PLAN = TilePlan(
    *(128, 256, 64), reg_m=64, reg_n=64, lanes=8, num_stages=3, num_warps=8, family="mma"
)


def plans(work, dev=GPU) -> list[TilePlan]:
    return [plan for plan in candidates(work, dev, "tir") if plan.family == "mma"]


def test_footprint_counts_stages_accumulators_and_two_sets_of_operands():
    smem = (128 + 256) * 64 * 2 * 3
    assert footprint(norm_matmul(), PLAN, GPU) == Footprint(smem, 128 + 2 * 32 + 40, 256)
    gated = replace(PLAN, block_n=128, reg_n=32)
    assert footprint(gated_ffn(), gated, GPU) == Footprint(smem, 128 + 2 * 32 + 40, 256)
    assert violations(PLAN, norm_matmul(), GPU) == violations(gated, gated_ffn(), GPU) == ()


SENTENCES = [
    (
        {},
        norm_matmul(dtype="float32"),
        "dtype is float32, family 'mma' multiplies it as tf32, which is not allowed",
    ),
    ({"reg_m": 8}, norm_matmul(), "reg_m is 8, family 'mma' takes multiples of 16"),
    ({"block_k": 16}, norm_matmul(), "block_k is 16, family 'mma' takes multiples of 32"),
    (
        {"num_stages": 1},
        norm_matmul(),
        "num_stages is 1, family 'mma' needs 2 to copy while it mul",
    ),
    ({"split_k": 16}, norm_matmul(), "split_k is 16, a cluster has 8 blocks"),
    ({"split_k": 4}, norm_matmul(k=128), "split_k is 4, k has 2 steps of 64"),
    ({"split_k": 3}, norm_matmul(), "split_k is 3, does not divide the 16 runs of columns of a"),
    ({"num_warps": 4}, norm_matmul(), "num_warps is 4, tiles of 64x64 make 8"),
    ({"lanes": 1}, norm_matmul(), "lanes is 1, family 'mma' copies 8, 4, 2 elements at once"),
    ({}, norm_matmul(k=4092), "lanes is 8, does not divide 4092, along which operands are copied"),
    ({}, norm_matmul(n=502, layout="kn"), "lanes is 8, does not divide 502, along which"),
    ({"num_stages": 5}, norm_matmul(), "needs 245760 B of shared memory, a block of the H200 has"),
    (
        {"reg_m": 128, "num_warps": 4},
        norm_matmul(),
        "needs 392 registers per thread, the H200 has 255",
    ),
    (
        {"block_m": 16, "reg_m": 16, "block_n": 512, "block_k": 32},
        norm_matmul(),
        "block_m is 16, its tile has 64 copies of 8 elements for 256 threads",
    ),
    ({"family": "other"}, norm_matmul(), "family is 'other', there is 'cuda' and 'gemv'"),
    ({"family": "wgmma"}, attention(), "family is 'wgmma', there is 'attention' and 'flash'"),
]


@pytest.mark.parametrize(("change", "work", "sentence"), SENTENCES, ids=lambda v: str(v)[:30])
def test_each_violation_has_its_sentence(change, work, sentence):
    found = violations(replace(PLAN, **change), work, GPU)
    assert any(text.startswith(sentence) for text in found), found


@pytest.mark.parametrize(
    ("target", "any_plans"),
    [
        ("a100", True),
        ("rtx3080", True),
        ("rtx4090", True),
        ({"kind": "cuda", "arch": "sm_75", "model": "rtx3080"}, False),
        ({"kind": "metal", "max_shared_memory_per_block": 32768}, False),
        ({"kind": "rocm", "max_shared_memory_per_block": 65536}, False),
    ],
    ids=str,
)
def test_devices_without_these_instructions_have_no_such_plans(target, any_plans):
    dev = device_of(make_target(target) if isinstance(target, str) else _target(target))
    assert bool(plans(norm_matmul(), dev)) == any_plans
    if not any_plans:
        assert any(
            "of float16 (CUDA, sm_80 or newer), which the" in v
            for v in violations(PLAN, norm_matmul(), dev)
        )


def _target(config):
    from tvm.target import Target

    return Target(config)


def test_clusters_are_asked_for_on_devices_that_have_them():
    work, a100 = norm_matmul(), device_of(make_target("a100"))
    assert {p.split_k for p in candidates(work, GPU, "tir") if p.family in FAMILIES} == set(SPLITS)
    assert {p.split_k for p in candidates(work, a100, "tir")} == {1}
    (found,) = violations(replace(PLAN, block_n=128, reg_n=32, split_k=2), work, a100)
    assert found == "split_k is 2, the A100 80GB SXM has no clusters to add up the parts"


def test_few_tiles_share_a_long_reduction():
    down = choose(norm_matmul(k=14336, n=4096), GPU, always=True, backend="tir").plans
    assert down.plan_for(64).split_k == down.plan_for(256).split_k == 2
    assert down.plan_for(4096).split_k == 1


def test_the_sums_of_a_cluster_need_room():
    plan = replace(PLAN, block_k=32, num_stages=2)
    assert footprint(norm_matmul(), plan, GPU).smem_bytes == (128 + 256) * 32 * 2 * 2
    assert footprint(norm_matmul(), replace(plan, split_k=2), GPU).smem_bytes == 128 * 256 * 4


def test_a_cpu_refuses_them():
    assert violations(PLAN, norm_matmul(), AVX2)


@pytest.mark.parametrize(
    ("k", "n", "layout", "lanes"),
    [
        (4096, 6144, "nk", {8}),
        (4096, 6141, "nk", {8}),  # only k lies side by side
        (4092, 6144, "nk", {4}),
        (4090, 6144, "nk", {2}),
        (4091, 6144, "nk", set()),  # no copy has 2 bytes
        (4096, 6142, "kn", {2}),
        (4096, 6141, "kn", set()),
    ],
)
def test_copies_are_the_widest_that_fit(k, n, layout, lanes):
    assert {p.lanes for p in plans(norm_matmul(k=k, n=n, layout=layout))} == lanes


def test_half_a_head_is_what_a_copy_may_not_cross():
    rope = Rope(20, 6140, "float16")
    work = norm_matmul(layout="kn")
    work = replace(work, outputs=(Projection(6140, "kn", (), rope),))
    assert {p.lanes for p in plans(work)} == {2}


def test_few_rows_have_none_and_tiles_are_not_much_taller_than_the_rows():
    assert not plans(norm_matmul(rows=16))
    assert max(p.block_m for p in plans(norm_matmul(rows=40))) <= 80
    assert max(p.block_m for p in plans(norm_matmul())) == 256


def test_a_short_reduction_has_short_steps():
    for k, depths in ((4096, {64, 32}), (64, {64, 32}), (48, {32}), (32, {32}), (24, set())):
        found = {plan.block_k for plan in plans(norm_matmul(k=k))}
        assert found <= depths and bool(found) == bool(depths)


def test_accumulators_of_a_pair_share_the_tile():
    for work, parts in ((norm_matmul(), 1), (gated_ffn(), 2)):
        sums = max(p.reg_m * p.reg_n * parts for p in plans(work))
        assert sums == 64 * 64  # 128 of a thread: with two sets of operands, more do not fit


def merits(plan, work, dev):
    """Return what makes a plan better than another one of the same block."""
    foot, columns = footprint(work, plan, dev), plan.reg_n * matmul_shape(work).parts
    products = plan.reg_m * columns / (plan.reg_m + columns)
    ahead = plan.block_k * (plan.num_stages - 1)
    residents = min(3, resident_blocks(foot, dev, SYSTEM_SMEM_BYTES))  # more are not looked for
    return products, residents, ahead, plan.block_k


@pytest.mark.parametrize("dev", DEVICES, ids=lambda dev: dev.name)
@pytest.mark.parametrize("work", [norm_matmul(), gated_ffn()], ids=["one", "pair"])
def test_whatever_tile_fits_there_is_one_as_good(work, dev):
    found = {}
    for plan in (p for p in plans(work, dev) if p.split_k == 1):
        found.setdefault((plan.block_m, plan.block_n), []).append(merits(plan, work, dev))
    for each in found.values():
        assert not any(
            all(a >= b for a, b in zip(*pair, strict=True)) for pair in permutations(each, 2)
        )
    draw, parts, fitting = Random(0), matmul_shape(work).parts, 0
    while fitting < 200:
        along_m, along_n = draw.choice(GRIDS)
        reg_m, reg_n = (16 * draw.randint(1, 8) for _ in range(2))
        plan = TilePlan(
            *(reg_m * along_m, reg_n * along_n, draw.choice((32, 64))),
            reg_m=reg_m,
            reg_n=reg_n,
            lanes=8,
            num_stages=draw.randint(2, 8),
            num_warps=along_m * along_n,
            family="mma",
        )
        large = max(plan.block_m, plan.block_n * parts) > 256
        if (
            large
            or violations(plan, work, dev)
            or not columns_fit(matmul_shape(work), plan.block_n)
        ):
            continue
        fitting += 1
        own = merits(plan, work, dev)
        better = found[plan.block_m, plan.block_n]
        assert any(all(a >= b for a, b in zip(o, own, strict=True)) for o in better), plan


def integers(layout="nk", **other):
    work = norm_matmul(layout=layout, dtype="int8", norm=None, **other)
    return replace(work, out_dtype="int32")


def tf32(**other):
    return replace(norm_matmul(dtype="float32", **other), allow_tf32=True)


@pytest.mark.parametrize(
    ("work", "block_k", "lanes"), [(integers(), 128, 16), (tf32(), 32, 4)], ids=["int8", "tf32"]
)
def test_other_elements_fill_the_same_bytes(work, block_k, lanes):
    plan = replace(PLAN, block_k=block_k, lanes=lanes, num_stages=4)
    assert plan in plans(work)
    assert footprint(work, plan, GPU) == footprint(norm_matmul(), replace(PLAN, num_stages=4), GPU)
    assert {p.lanes for p in plans(work)} == {lanes}


@pytest.mark.parametrize(
    ("work", "lanes"),
    [
        (integers(k=4088), {8}),
        (integers(k=4092), {4}),
        (integers(k=4090), set()),
        (integers("kn", n=6140), {4}),
        (tf32(k=4094), {2}),
        (tf32(k=4095), {1}),
    ],
    ids=lambda v: str(getattr(v, "k", v)),
)
def test_copies_of_other_elements_have_four_bytes_at_least(work, lanes):
    assert {p.lanes for p in plans(work)} == lanes


def test_tensor_cores_multiply_integers_for_any_rows_and_dot_products_for_one():
    for rows in (1, 16, 300):
        found = list(candidates(integers(rows=rows), GPU, "tir"))
        assert {"mma"} <= {p.family for p in found} <= {"mma", "wgmma", "dot_products"}
    older = device_of(_target({"kind": "cuda", "arch": "sm_75", "model": "rtx3080"}))
    assert not list(candidates(integers(), AVX2)) and not list(candidates(integers(), older, "tir"))
    scalar = TilePlan(8, 64, 64, reg_m=1, reg_n=4, lanes=4, num_warps=4, family="fma_tiles")
    assert any(
        "families 'mma' and 'wgmma', or dot" in v for v in violations(scalar, integers(), GPU)
    )


@pytest.mark.parametrize("work", [integers(), tf32()], ids=["int8", "tf32"])
def test_a_few_rows_fill_no_tile_but_take_the_lowest(work):
    plans = choose(work, GPU, always=True, backend="tir").plans
    assert plans.plan_for(8).family in ("mma", "wgmma") and plans.plan_for(8).block_m <= 64


def test_bytes_are_transposed_by_four_columns_of_a_lane():
    assert {16, 32, 48, 64} <= {p.reg_n for p in plans(integers())}
    assert {p.reg_n % 32 for p in plans(integers("kn"))} == {0}


def test_no_prediction_is_faster_than_the_tensor_cores():
    work: NormMatmul = norm_matmul(rows=ROWS)
    some = plans(work)[::7]
    assert some
    for plan in some:
        p = predict(work, plan, GPU, 4096)
        assert p.seconds > p.flops / (0.62 * GPU.tensor_float16_flops_per_s)


@pytest.mark.parametrize(
    "work",
    [norm_matmul(), gated_ffn(), integers("kn"), tf32()],
    ids=["one", "pair", "int8", "tf32"],
)
def test_prices_of_many_plans_are_those_of_each(work):
    sizes = (17, 300, 4096)
    some = [p for p in candidates(work, GPU, "tir") if p.family in FAMILIES][::9]
    prices = [TensorCores().price(plan, Problem(work, GPU)) for plan in some]
    found = prices[0].seconds(prices, sizes, None)
    each = [[predict(work, plan, GPU, size).seconds for plan in some] for size in sizes]
    assert found.tolist() == each


UNALIGNED_US = {
    # Of 128 x 192 or 128 x 256 x 64 and 384 rows of k = 768: columns, the next multiple of 8, dtype
    # of the result; us of the one and the other (`2026-11-28-unaligned_rows.json`)
    (50257, 50264, "float16"): (178.4, 80.9),
    (50257, 50264, "float32"): (236.2, 102.8),
    (30522, 30528, "float16"): (75.1, 50.4),
    (30522, 30528, "float32"): (94.0, 62.1),
}


@pytest.mark.parametrize("case", UNALIGNED_US)
def test_rows_that_are_no_multiples_of_16_bytes_are_stored_in_pieces(case) -> None:
    odd, even, dtype = case
    work = replace(norm_matmul(384, 768, odd), out_dtype=dtype)
    columns = 192 if odd == 50257 else 256
    plan = next(
        p
        for p in candidates(work, GPU, "tir")
        if (p.family, p.block_m, p.block_n) == ("wgmma", 128, columns)
    )
    aligned = replace(norm_matmul(384, 768, even), out_dtype=dtype)
    more = 1e6 * (predict(work, plan, GPU, 384).seconds - predict(aligned, plan, GPU, 384).seconds)
    assert 0.6 < more / (UNALIGNED_US[case][0] - UNALIGNED_US[case][1]) < 1.6


def test_the_cases_that_a_gpu_runs_have_plans_that_cut_the_reduction():
    """tests/gpu/test_split_k.py needs them; nothing else looks at them where no GPU is."""
    for case in tensor_core_cases():
        if case.name != "tensor_one_tile":
            found = split_plans(replace(case.work, k=1032 + case.work.k % 8), DEVICES[-1])
            assert found and all(p.split_k > 1 for p in found), case.name
