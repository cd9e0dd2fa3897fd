"""Choosing: ranges, declines with numbers, and a user's own plans."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_fusion.errors import Decline, Reason, TilePlanError
from relax_fusion.estimator import (
    AttentionSize,
    Choice,
    candidates,
    choose,
    predict,
    predict_unfused,
    violations,
)
from relax_fusion.estimator.families.cpu_tiles import CpuPlan
from relax_fusion.estimator.ranges import served
from relax_fusion.estimator.registry import FAMILIES, is_launched
from relax_fusion.estimator.search import price
from relax_fusion.estimator.shape import rows_of
from relax_fusion.estimator.tile_plan import Box, PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.quantization import quantization
from relax_fusion.workload import DynamicDim, Norm, NormMatmul, Projection, Workload

from ..support.estimator_cases import (
    AVX2,
    AVX512,
    DEVICES,
    GPU,
    SMALL_GPU,
    WORKLOADS,
    attention,
    gated_ffn,
    norm_matmul,
)
from ..support.matmul_chains import TwoMatmuls


def chosen(work, dev, **options) -> Choice:
    found = choose(work, dev, **options)
    assert isinstance(found, Choice), str(found)
    return found


def test_of_packed_weights_kernels_of_tir_serve_few_rows():
    projection = Projection(6144, "nk", packed=quantization("q4f16_1").packed)
    work = replace(norm_matmul(), outputs=(projection,))
    entries = chosen(work, GPU).plans.entries
    families = {upper: plan.family for upper, plan in entries}
    assert families[1] == families[16] == "packed_rows" and families[64] == families[None] == "cuda"


@pytest.mark.parametrize("dev", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_a_choice_fits_and_a_decline_has_numbers(work, dev):
    found = choose(work, dev)
    if isinstance(found, Decline):
        assert found.reason is Reason.NOT_PROFITABLE
        assert found.fused_s is not None and found.unfused_s is not None
        assert found.fused_s * max(f.error for f in FAMILIES) >= found.unfused_s
        return
    assert not any(violations(plan, work, dev) for _, plan in found.plans.entries)
    assert not any(p.loses for p in found.predictions)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    k=st.integers(1, 5000),
    n=st.integers(1, 5000),
    layout=st.sampled_from(["nk", "kn"]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    rows=st.one_of(st.integers(1, 300), st.builds(DynamicDim, st.just("s"), st.integers(1, 4096))),
    dev=st.sampled_from([SMALL_GPU, GPU, AVX2, AVX512]),
)
def test_any_shape_gets_a_plan_that_fits_or_a_reason(k, n, layout, dtype, rows, dev):
    work = NormMatmul(rows, k, (Projection(n, layout),), Norm("rms", 1e-6), dtype, dtype)
    found = choose(work, dev)
    if isinstance(found, Decline):
        nothing = dev.kind == "gpu" and k == 1
        assert found.reason is (Reason.NO_PLAN if nothing else Reason.NOT_PROFITABLE)
    else:
        assert not any(violations(plan, work, dev) for _, plan in found.plans.entries)


UPPERS = [
    (None, [1, 16, 64, 256, None], [1, 16, 64, 256, 1024]),
    (4096, [1, 16, 64, 256, None], [1, 16, 64, 256, 1024]),
    (512, [1, 16, 64, 256, None], [1, 16, 64, 256, 512]),
    (256, [1, 16, 64, None], [1, 16, 64, 256]),
    (40, [1, 16, None], [1, 16, 40]),
    (16, [1, None], [1, 16]),
    (1, [None], [1]),
]


@pytest.mark.parametrize(("bound", "uppers", "sizes"), UPPERS)
def test_ranges_are_clipped_by_the_bound(bound, uppers, sizes):
    found = chosen(norm_matmul(rows=DynamicDim("b", bound)), AVX2)
    assert [p.upper for p in found.predictions] == uppers
    assert [p.size for p in found.predictions] == sizes


TRITON_UPPERS = [1, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
TRITON_RANGES = [
    (None, [*TRITON_UPPERS, None], [*TRITON_UPPERS, 4096]),
    (8192, [*TRITON_UPPERS, None], [*TRITON_UPPERS, 4096]),
    (2000, [*TRITON_UPPERS, None], [*TRITON_UPPERS, 2000]),
    (1024, [*TRITON_UPPERS[:-1], None], TRITON_UPPERS),
    (100, [1, 16, 32, 64, None], [1, 16, 32, 64, 100]),
    (1, [None], [1]),
]


@pytest.mark.parametrize(("bound", "uppers", "sizes"), TRITON_RANGES)
def test_triton_has_ranges_for_more_regimes(bound, uppers, sizes):
    work = norm_matmul(rows=DynamicDim("b", bound))
    found = chosen(work, GPU, backend="triton", always=True)
    assert [p.upper for p in found.predictions] == uppers
    assert [p.size for p in found.predictions] == sizes


def test_ranges_are_those_of_the_back_end_that_has_a_plan():
    work = norm_matmul(dtype="float32")  # which the Triton kernels do not take
    found = chosen(work, GPU, backend="triton", always=True)
    assert not any(is_launched(plan) for _, plan in found.plans.entries)
    assert [p.upper for p in found.predictions] == [1, 16, 64, 256, None]


@pytest.mark.parametrize(
    ("backend", "dtype", "first", "last"),
    [
        ("tir", "float32", 257, 1024),
        ("tir", "float16", 1025, 4096),
        ("triton", "float16", 1025, 4096),
    ],
)
def test_the_open_range_is_priced_at_its_middle_and_end(monkeypatch, backend, dtype, first, last):
    module = sys.modules[choose.__module__]
    sizes = set()

    def recorded(asked):
        sizes.update(*(some for _, some in asked))
        return price(asked)

    monkeypatch.setattr(module, "price", recorded)
    choose.__wrapped__(norm_matmul(dtype=dtype), GPU, always=True, backend=backend)
    middle, end = sorted(s for s in sizes if s >= first)
    assert first < middle < end == last
    assert {1, 2, 16, 17, 64, 65} <= sizes  # both ends of closed ranges


def test_every_range_has_a_plan_near_the_fastest():
    work = norm_matmul()
    found = chosen(work, AVX2)
    assert len(found.predictions) > 1
    for p in found.predictions:
        fastest = min(predict(work, c, AVX2, p.size).seconds for c in candidates(work, AVX2))
        plan = found.plans.plan_for(rows_of(work, p.size))
        assert predict(work, plan, AVX2, p.size) == p.fused
        assert p.fused.seconds <= 1.2 * fastest
        assert p.unfused == predict_unfused(work, AVX2, p.size)


def test_a_matmul_alone_is_taken_where_our_schedule_is_faster():
    for rows in (1, 16, 300, DynamicDim("s")):
        assert isinstance(choose(norm_matmul(rows=rows, norm=None), AVX2), Choice)


# One plan for three matmuls of different widths, each of which has a better one of its own
UNEVEN = NormMatmul(
    DynamicDim("rows"),
    8192,
    (Projection(8192, "nk"), Projection(1024, "kn"), Projection(1024, "nk")),
    Norm("rms", 1e-5),
    "float16",
    "float16",
)


def test_always_overrules_a_decline():
    assert isinstance(choose(UNEVEN, GPU, backend="triton"), Decline)
    assert isinstance(choose(UNEVEN, GPU, backend="triton", always=True), Choice)


@pytest.mark.parametrize("backend", ["tir", "triton"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("rows", [1, 16, 256, 4096])
def test_a_matmul_alone_is_never_declined(rows: int, dtype: str, backend: str) -> None:
    """What a pass leaves alone, the rule for generic matmuls makes by the same plans."""
    work = norm_matmul(rows=rows, dtype=dtype, norm=None)
    (prediction,) = chosen(work, GPU, backend=backend).predictions
    assert prediction.unfused == prediction.least


def test_neighbours_with_one_plan_are_merged():
    entries = chosen(norm_matmul(), AVX2).plans.entries
    assert all(a[1] != b[1] for a, b in pairwise(entries))
    # One row has little in common with many, and a tiny device has one plan for everything
    assert len(entries) > 1
    assert len(chosen(norm_matmul(k=4, n=4, rows=DynamicDim("b", 1)), AVX2).plans.entries) == 1


def test_one_row_accumulates_one_row():
    plan = chosen(norm_matmul(), AVX2).plans.plan_for(1)
    assert plan.reg_m == plan.block_m == 1
    assert chosen(norm_matmul(), AVX2).plans.plan_for(300).reg_m >= 2


def test_a_static_size_has_one_entry():
    found = chosen(norm_matmul(rows=20), AVX2)
    assert [p.size for p in found.predictions] == [20]
    assert len(found.plans.entries) == 1


def test_attention_is_chosen_by_query_positions():
    found = chosen(attention(DynamicDim("b", 8), DynamicDim("s", 64), DynamicDim("t", 2048)), AVX2)
    assert [p.size for p in found.predictions] == [
        AttentionSize(1, 1, 1024),
        AttentionSize(1, 16, 1024),
        AttentionSize(1, 64, 1024),
    ]
    static = chosen(attention(4, 32, 48), AVX2)
    assert [p.size for p in static.predictions] == [AttentionSize(4, 32, 48)]


def test_longer_queries_price_longer_keys():
    found = chosen(attention(1, 3000, DynamicDim("t", 4096)), AVX2)
    assert found.predictions[0].size == AttentionSize(1, 3000, 3000)


def test_decline_when_separate_kernels_are_faster():
    work = replace(UNEVEN, rows=256)
    found = choose(work, GPU, backend="triton")
    assert isinstance(found, Decline)
    assert found.reason is Reason.NOT_PROFITABLE
    assert found.detail.startswith("fused ") and found.detail.endswith(" us at 256 rows")
    assert found.unfused_s == predict_unfused(work, GPU, 256, backend="triton").seconds


def test_decline_names_the_range_in_which_fusing_loses_most():
    found = choose(UNEVEN, GPU, backend="triton")
    assert isinstance(found, Decline)
    assert found.fused_s is not None and found.unfused_s is not None
    assert found.fused_s > found.unfused_s
    assert "range" in found.detail


@pytest.mark.parametrize("work", [norm_matmul(), gated_ffn(), attention()])
def test_decline_when_nothing_fits(work):
    found = choose(work, replace(GPU, max_registers_per_thread=16), backend="tir")
    assert found == Decline(Reason.NO_PLAN, "no tile of any family fits the H200")


GOOD = CpuPlan(4, 64, 4096, reg_m=4, reg_n=2, lanes=8, family="cpu_tiles")
BAD = replace(GOOD, lanes=16, num_warps=4)


def test_a_user_s_plan_is_taken_and_priced():
    found = chosen(norm_matmul(), AVX2, plans=GOOD)
    assert found.plans == PlanTable.single(GOOD)
    for p in found.predictions:
        assert p.fused == predict(norm_matmul(), GOOD, AVX2, p.size)


def test_a_user_s_plan_is_taken_even_if_it_does_not_pay():
    plan = TilePlan(16, 16, 16, num_warps=8, lanes=8, family="fma_tiles")
    found = chosen(norm_matmul(rows=1), GPU, plans=plan)
    assert [p.loses for p in found.predictions] == [True]


def test_a_user_s_table_is_kept_as_it_is():
    table = PlanTable(((8, GOOD), (None, replace(GOOD, block_m=8))))
    found = chosen(norm_matmul(), AVX2, plans=table)
    assert found.plans is table
    assert found.predictions[0].fused == predict(norm_matmul(), GOOD, AVX2, 1)


def test_a_bad_plan_raises_every_sentence():
    with pytest.raises(TilePlanError) as err:
        choose(norm_matmul(), AVX2, plans=PlanTable(((8, GOOD), (None, BAD))))
    for part in (BAD.key, "lanes is 16, must be", "num_warps is 4, a CPU task has 0"):
        assert part in str(err.value)
    assert GOOD.key not in str(err.value)


def test_choosing_twice_gives_the_same():
    assert choose(gated_ffn(), SMALL_GPU) == choose(gated_ffn(), SMALL_GPU)


@pytest.mark.usefixtures("without_cuda_matmul")
def test_a_gain_within_the_model_s_error_is_named():
    work = TwoMatmuls(512, 512, 512, 256, ("kn", "kn"), (), (), "float16", "float16").chain
    found = choose(work, GPU, backend="triton")
    assert isinstance(found, Decline)
    assert found.fused_s is not None and found.unfused_s is not None
    assert found.fused_s < found.unfused_s
    assert found.detail.endswith("; a gain of 1.1 times is asked for, as predictions err by that")


@pytest.mark.parametrize(("n", "k"), [(8, 128), (16, 128), (64, 16), (24, 80)])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_narrow_matmuls_have_plans_for_any_number_of_rows(n: int, k: int, layout: str) -> None:
    projection = Projection(n, layout)
    work = NormMatmul(DynamicDim("rows"), k, (projection,), None, "float16", "float16")
    choice = choose(work, device("h200"), always=True)
    assert isinstance(choice, Choice) and choice.plans.plan_for(1 << 20) is not None


@pytest.mark.parametrize("family", ["", "panels", "unknown"])
@pytest.mark.parametrize("block_m", [1, 16])
def test_a_plan_without_warps_is_refused_on_a_gpu(family: str, block_m: int) -> None:
    plan = TilePlan(block_m=block_m, block_n=16, block_k=16, family=family)
    with pytest.raises(TilePlanError):
        choose(norm_matmul(), device("h200"), plans=plan)


@pytest.mark.parametrize("name", ["h200", "a100"])
@pytest.mark.parametrize("backend", ["tir", "triton", "auto"])
def test_static_sizes_of_0_have_plans(name: str, backend: str) -> None:
    for work in (norm_matmul(rows=0, k=7, dtype="float32"), attention(q_len=0, kv_len=0)):
        assert isinstance(choose(work, device(name), always=True, backend=backend), Choice)


@pytest.mark.parametrize(
    ("work", "size"), [(norm_matmul(n=2**35), "n is"), (attention(kv_len=2**40), "kv_len is")]
)
def test_sizes_beyond_plans_are_declined(work: Workload, size: str) -> None:
    for dev in (device("h200"), AVX2):
        declined = choose(work, dev, always=True)
        assert isinstance(declined, Decline) and size in declined.detail


def test_boxes_of_sizes_that_a_workload_does_not_have_are_refused() -> None:
    plan = chosen(norm_matmul(), AVX2).plans.entries[-1][1]
    table = PlanTable(((Box(rows=8, keys=16), plan), (None, plan)))
    said = "rows <= 8, keys <= 16 bounds keys, NormMatmul has rows"
    with pytest.raises(TilePlanError, match=said):
        choose(norm_matmul(), AVX2, plans=table)
    with pytest.raises(TilePlanError, match=said):
        served(norm_matmul(), table)
