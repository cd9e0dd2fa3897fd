"""Plans of attention for the Triton back end: which there are, what they cost, which are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.errors import Decline, TilePlanError
from relax_fusion.estimator import (
    AttentionSize,
    Choice,
    Problem,
    candidates,
    choose,
    predict,
    violations,
)
from relax_fusion.estimator.families.triton_attention.family import TritonAttention
from relax_fusion.estimator.families.triton_attention.tiles import AttentionPlan, key_parts
from relax_fusion.estimator.prediction import Formula, Prediction
from relax_fusion.estimator.registry import is_launched
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import device
from relax_fusion.workload import Attention, DynamicDim

from ..support.estimator_cases import attention

H200, A100, RTX3080 = device("h200"), device("a100"), device("rtx3080")
BATCH, QUERIES, KEYS = DynamicDim("batch"), DynamicDim("q_len"), DynamicDim("kv_len")
LLAMA = {"heads": (32, 8), "dims": (128, 128), "causal": "bottom_right"}


def plan(family: str, *block: int, **fields: int) -> TilePlan:
    return AttentionPlan(*block, family=family, **fields)


POINTER = plan("attention", 64, 64, 64, num_stages=3, num_warps=4)
FLASH = plan("flash", 128, 128, 64, num_stages=3, num_warps=12)
GROUPS = plan("groups", 16, 64, 64, num_warps=8, groups=8)
HALVES = plan("halves", 64, 128, 64, num_stages=2, num_warps=8, groups=2)


def chosen(work: Attention, dev=H200) -> Choice:
    found = choose(work, dev, backend="triton")
    assert isinstance(found, Choice)
    return found


@pytest.mark.parametrize("own", [POINTER, FLASH, GROUPS, HALVES], ids=lambda p: p.family)
def test_a_plan_of_each_family_fits(own: TilePlan) -> None:
    assert violations(own, attention(), H200) == ()


def test_scalar_kernels_have_what_triton_has_not() -> None:
    """Their tiles of one row would be offered to one query in the place of Triton's of 16."""
    decode = attention(1, 1, 8192, **{**LLAMA, "causal": "none"})
    assert choose(decode, H200) == chosen(decode)
    for work, backend in ((decode, "tir"), (attention(dims=(8, 8)), "triton")):
        assert not any(is_launched(p) for p in candidates(work, H200, backend))


SENTENCES = [
    (
        replace(POINTER, family="gemv"),
        {},
        "family is 'gemv', there is 'attention' and 'flash' and 'groups' and 'halves' and "
        "'fma_attention' for Attention on a gpu",
    ),
    (replace(POINTER, block_m=48), {}, "block_m is 48, triton needs a power of two >= 16"),
    (replace(POINTER, block_n=8), {}, "block_n is 8, triton needs a power of two >= 16"),
    (POINTER, {"dims": (80, 80)}, "block_k is 64, a tile holds all 80 of head_dim, padded to 128"),
    (
        replace(POINTER, block_n=256, num_stages=8),
        {},
        "needs 533504 B of shared memory, the H200 has 232448 B per block",
    ),
    (
        replace(POINTER, block_m=128, block_n=256),
        {},
        "a thread holds 320 scores and results, at most 208 fit its registers",
    ),
    (replace(FLASH, block_m=64), {}, "block_m is 64, family 'flash' has 128"),
    (replace(FLASH, num_warps=8), {}, "num_warps is 8, family 'flash' has 12"),
    (replace(FLASH, split_k=2), {}, "split_k is 2, family 'flash' has 1"),
    (
        replace(FLASH, block_k=64),
        {"dims": (60, 64)},
        "head_dim is 60, rows of a tensor map must be multiples of 8 elements",
    ),
    (FLASH, {"kv_len": 0}, "kv_len is 0, a tensor map needs 1 key"),
    (GROUPS, {"kv_len": 600}, "the tile holds 512 keys at once, there are keys up to 600"),
    (GROUPS, {"kv_len": KEYS}, "the tile holds 512 keys at once, there are keys without a bound"),
    (replace(GROUPS, num_warps=4), {}, "num_warps is 4, 8 groups have a warp each"),
    (replace(GROUPS, groups=2), {}, "groups is 2, family 'groups' has 4, 8 or 16"),
    (replace(GROUPS, split_k=2), {}, "split_k is 2, family 'groups' holds all keys at once"),
    (replace(POINTER, groups=2), {}, "groups is 2, family 'attention' has 1"),
    (HALVES, {"kv_len": 600}, "the tile holds 512 keys at once, there are keys up to 600"),
    (replace(HALVES, block_m=128), {}, "block_m is 128, family 'halves' has 64"),
    (
        HALVES,
        {"mask_dims": (True, True, True, True)},
        "block_n is 128, family 'halves' has up to 64 for this",
    ),
]


@pytest.mark.parametrize(("own", "changes", "sentence"), SENTENCES)
def test_what_a_plan_may_not(own: TilePlan, changes: dict, sentence: str) -> None:
    assert sentence in violations(own, attention(**changes), H200)


@pytest.mark.parametrize("own", [FLASH, GROUPS, HALVES], ids=lambda p: p.family)
def test_hopper_kernels_need_hopper(own: TilePlan) -> None:
    sentence = f"family {own.family!r} needs TMA and wgmma (sm_90), which the A100 80GB SXM lacks"
    assert sentence in violations(own, attention(), A100)
    assert {p.family for p in candidates(attention(), A100, "triton")} == {"attention"}


@pytest.mark.parametrize(
    ("changes", "dev", "reason"),
    [
        ({"dtype": "float32"}, H200, "dtype is float32, the Triton kernels take float16 and"),
        ({"dims": (320, 64)}, H200, "head_dim is 320, the Triton kernels take 16 to 256"),
        ({"dims": (64, 12)}, H200, "v_dim is 12, the Triton kernels take 16 to 256"),
    ],
)
def test_what_no_kernel_computes_gets_plans_for_tir(changes: dict, dev, reason: str) -> None:
    work = attention(**changes)
    assert (TritonAttention().refuses(Problem(work, dev)) or "").startswith(reason)
    assert not any(is_launched(p) for p in candidates(work, dev, "triton"))


def test_a_users_own_plan_is_checked() -> None:
    with pytest.raises(TilePlanError, match="block_m is 64, family 'flash' has 128"):
        choose(attention(), H200, plans=replace(FLASH, block_m=64))


def test_parts_of_keys_fill_the_device_and_no_more() -> None:
    work = attention(BATCH, 1, KEYS, **LLAMA)
    cut = plan("attention", 16, 64, 128, num_stages=4, num_warps=4, split_k=64)
    parts = [key_parts(cut, work, H200, AttentionSize(b, 1, 8192)) for b in (1, 8, 64)]
    assert parts == [2 * 132 // 8, 132 // 64, 1]
    assert key_parts(cut, work, H200, AttentionSize(1, 1, 128)) == 2  # blocks of keys
    assert key_parts(replace(cut, split_k=4), work, H200, AttentionSize(1, 1, 8192)) == 4
    assert key_parts(replace(cut, split_k=1), work, H200, AttentionSize(1, 1, 8192)) == 1


CHOICES = [
    # MCFuser's shapes, and those of models: what is short, long, and one query over a cache
    (attention(heads=(8, 8)), {"halves"}),
    (attention(heads=(16, 16)), {"halves"}),
    (attention(1, 256, 256), {"halves"}),
    (attention(1, 256, 256, (16, 16), (80, 80)), {"groups"}),
    (attention(1, 512, 256, (1, 1)), {"groups"}),
    (attention(1, 1024, 512, (1, 1)), {"groups"}),
    (attention(32), {"flash"}),
    (attention(1, 2048, 2048, **LLAMA), {"flash"}),
    (attention(1, 8192, 8192, **LLAMA), {"flash"}),
    (attention(1, 1, 4096, **LLAMA), {"attention"}),
    (attention(8, 1, 4096, **LLAMA), {"attention"}),
    (attention(BATCH, QUERIES, KEYS, **LLAMA), {"attention", "flash"}),
    (attention(BATCH, QUERIES, QUERIES, **LLAMA), {"attention", "flash"}),
]


@pytest.mark.parametrize(("work", "families"), CHOICES)
def test_the_family_that_is_chosen(work: Attention, families: set[str]) -> None:
    plans = [p for _, p in chosen(work).plans.entries]
    assert {p.family for p in plans} == families
    assert violations(plans[-1], work, H200) == ()


def test_halves_are_for_what_they_were_measured_with() -> None:
    short = attention(heads=(8, 8))
    every = (True, True, True, True)
    for change in ({"mask_dims": every}, {"causal": "top_left"}, {"kv_len": 500}, {"kv_heads": 4}):
        families = {p.family for p in candidates(replace(short, **change), H200, "triton")}
        assert "halves" not in families and "groups" in families


def test_few_queries_cut_the_keys_and_many_do_not() -> None:
    table = chosen(attention(BATCH, QUERIES, KEYS, **LLAMA)).plans
    assert table.plan_for(1).split_k > 1 and table.plan_for(1).block_m == 16
    assert table.plan_for(4096).family == "flash"


def test_every_device_from_ampere_on_has_a_plan() -> None:
    for dev in (A100, RTX3080):
        table = chosen(attention(BATCH, QUERIES, KEYS, **LLAMA), dev).plans
        assert {p.family for _, p in table.entries} == {"attention"}


def pointer_us(work: Attention, *block: int, **fields: int) -> float:
    own = plan("attention", *block, **{"num_stages": 3, "num_warps": 4, **fields})
    return (
        1e6 * predict(work, own, H200, AttentionSize(work.batch, work.q_len, work.kv_len)).seconds
    )


def test_programs_that_find_no_room_run_after_the_others() -> None:
    vit = attention(1, 257, 257, (16, 16), (80, 80))
    few, many = pointer_us(vit, 16, 128, 128, num_stages=2), pointer_us(vit, 16, 128, 128)
    assert many > 1.05 * few  # 141 kB: one program a multiprocessor.  Measured: 18.3 and 23.5 us


def test_parts_leave_room_for_those_that_merge_them() -> None:
    four = attention(4, 1, 4096, **LLAMA)
    room, none = (pointer_us(four, 32, 64, 128, num_stages=stages, split_k=32) for stages in (3, 4))
    assert none > room


def test_two_stages_wait_for_memory_at_every_block() -> None:
    base = attention(1, 1024, 1024)
    two, four = (pointer_us(base, 64, 32, 64, num_stages=stages) for stages in (2, 4))
    assert two > 1.3 * four


def test_bounds_of_parts_that_change_nothing_are_no_candidates() -> None:
    def bounds(work: Attention) -> set[int]:
        return {p.split_k for p in candidates(work, H200, "triton") if p.family == "attention"}

    assert bounds(attention(32, 512, 512)) == {1}
    assert bounds(attention(BATCH, 1, KEYS, **LLAMA)) == {1, 32}  # 8 heads: 33 parts at most
    assert bounds(attention(BATCH, 1, KEYS, heads=(8, 1), dims=(128, 128))) == {1, 32, 128}


def test_more_work_costs_more() -> None:
    size = AttentionSize(1, 2048, 2048)
    base = attention(1, 2048, 2048, **LLAMA)
    own = plan("flash", 128, 128, 128, num_stages=2, num_warps=12)
    plain = predict(base, own, H200, size)
    every = (True, True, True, True)
    for change in ({"softcap": 20.0}, {"alibi": "float32"}, {"mask_dims": every}):
        assert predict(replace(base, **change), own, H200, size).seconds > plain.seconds
    assert predict(replace(base, window=64), own, H200, size).seconds < plain.seconds
    assert predict(replace(base, causal="none"), own, H200, size).seconds > plain.seconds


def test_a_large_batch_of_unknown_size_keeps_its_speed() -> None:
    table = chosen(attention(BATCH, 1, KEYS, **LLAMA)).plans
    for batch, keys in ((1, 4096), (4, 8192), (64, 4096)):
        work, size = attention(batch, 1, keys, **LLAMA), AttentionSize(batch, 1, keys)
        own = chosen(work).plans.plan_for(1)
        best, found = (predict(work, p, H200, size).seconds for p in (own, table.plan_for(1)))
        assert found < 1.05 * best


def test_a_choice_prices_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of some 60 plans at two corners of some 50 boxes, where all sizes are dynamic."""
    counted: list[AttentionSize] = []
    price = Formula.at

    def counting(self: Formula, size: AttentionSize) -> Prediction:
        counted.append(size)
        return price(self, size)

    monkeypatch.setattr(Formula, "at", counting)
    work = attention(BATCH, QUERIES, KEYS, heads=(31, 31))
    assert not isinstance(choose(work, H200, backend="triton"), Decline)
    assert len(counted) < 4500
