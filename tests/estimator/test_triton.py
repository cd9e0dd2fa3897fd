"""Plans of the Triton back end: which are generated, refused and chosen, and what they cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_fusion.device import device
from relax_fusion.errors import TilePlanError
from relax_fusion.estimator import Choice, candidates, choose, predict, predict_unfused, violations
from relax_fusion.estimator.triton import norm_inside, split_epilogue, unsupported
from relax_fusion.tile_plan import PlanTable, TilePlan
from relax_fusion.workload import DynamicDim, Norm, Projection, Rope

from .cases import AVX2, GPU, RMS, SMALL_GPU, gated_ffn, norm_matmul

TIMED = Path(__file__).parents[2] / "benchmarks/results/2026-11-21-triton_plans.json"
WORKS = {"qkv": norm_matmul(), "gate_up": gated_ffn()}


def plan(family: str, *block: int, **fields: int) -> TilePlan:
    numbers = {"num_warps": 4, "num_stages": 4, **fields}
    return TilePlan(*block, backend="triton", family=family, **numbers)


TMA = plan("tma", 128, 128, 64, num_warps=8)
POINTER = plan("pointer", 16, 64, 64)
GEMV = plan("gemv", 1, 2, 2048, num_stages=1)
ROPE = Rope(128, 5120, "float32", DynamicDim("s"))
ROTATED = replace(norm_matmul(), outputs=(Projection(6144, "nk", (), ROPE),))


def test_the_first_choice_loses_little_to_the_best_that_was_timed() -> None:
    losses, errors = [], []
    for group in json.loads(TIMED.read_text(encoding="utf-8"))["groups"]:
        timed = [q.pop("ms") for q in group["plans"]]
        plans = [TilePlan(**q, backend="triton") for q in group["plans"]]
        work = WORKS[group["case"]]
        prices = [1e3 * predict(work, p, GPU, group["rows"]).seconds for p in plans]
        best = min(timed)
        losses.append(timed[prices.index(min(prices))] / best - 1)
        near = [(p, t) for p, t in zip(prices, timed, strict=True) if t < 1.3 * best]
        errors.append(sum(abs(math.log(p / t)) for p, t in near) / len(near))
    assert len(losses) == 60
    assert sum(losses) / 60 < 0.015 and max(losses) < 0.16
    assert sum(errors) / 60 < 0.07


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090", "rtx3080"])
def test_candidates_fit(work, name) -> None:
    dev = device(name)
    found = list(candidates(work, dev, "triton"))
    assert len(found) == len(set(found)) > 20
    assert {p.backend for p in found} == {"triton"}
    assert {p.family for p in found} == {"gemv", "pointer", *(["tma"] if name == "h200" else [])}
    assert all(violations(p, work, dev) == () for p in found)


def test_where_triton_has_no_kernel_tir_has() -> None:
    odd = replace(norm_matmul(), outputs=(Projection(64, "nk", ("residual", "bias")),))
    for work in (norm_matmul(dtype="float32"), odd):
        assert {p.backend for p in candidates(work, GPU, "triton")} == {"tir"}
        assert unsupported(work, GPU) is not None


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), ("none", "none")),
        (("bias",), ("none", "none")),
        (("residual",), ("none", "after")),
        (("bias", "silu"), ("silu", "none")),
        (("bias", "gelu", "residual"), ("gelu", "after")),
        (("residual", "relu"), ("relu", "before")),
        (("silu", "bias"), None),
        (("silu", "relu"), None),
        (("residual", "bias"), None),
        (("residual", "residual"), None),
        (("residual", "silu", "residual"), None),
    ],
)
def test_epilogues(steps, expected) -> None:
    assert split_epilogue(steps) == expected


def test_where_the_norm_goes() -> None:
    layer = replace(norm_matmul(), norm=Norm("layer", 1e-5))
    after_add = replace(norm_matmul(), norm=replace(RMS, residual=True))
    assert norm_inside(norm_matmul(), GEMV) and norm_inside(layer, GEMV)
    assert norm_inside(norm_matmul(), POINTER) and not norm_inside(layer, POINTER)
    assert not norm_inside(norm_matmul(), replace(POINTER, block_k=128))
    assert not norm_inside(norm_matmul(), TMA)
    assert not norm_inside(after_add, GEMV)
    assert not norm_inside(norm_matmul(norm=None), GEMV)


@pytest.mark.parametrize(
    ("wrong", "work", "dev", "sentence"),
    [
        (TMA, norm_matmul(), AVX2, "backend is 'triton', a CPU has 'tir' only"),
        (TMA, norm_matmul(dtype="float64"), GPU, "dtype is float64, the Triton kernels take"),
        (replace(TMA, family=""), norm_matmul(), GPU, "family is '', backend 'triton' has gemv, p"),
        (
            replace(TMA, block_m=96),
            norm_matmul(),
            GPU,
            "block_m is 96, triton needs a power of two",
        ),
        (replace(TMA, block_n=8), norm_matmul(), GPU, "block_n is 8, tensor cores need 16"),
        (
            replace(TMA, num_stages=9),
            norm_matmul(),
            GPU,
            "needs 327680 B of shared memory, the H200",
        ),
        (TMA, gated_ffn(), SMALL_GPU, "needs 229376 B of shared memory, the RTX 3080 has 101376 B"),
        (
            replace(TMA, block_n=256, num_warps=4),
            norm_matmul(),
            GPU,
            "a thread has 256 accumulators",
        ),
        (
            TMA,
            norm_matmul(),
            device("a100"),
            "family 'tma' needs sm_90, the A100 80GB SXM is sm_80",
        ),
        (
            replace(TMA, split_k=2),
            norm_matmul(),
            GPU,
            "split_k is 2, family 'tma' reduces in 1 part",
        ),
        (replace(TMA, block_m=32), norm_matmul(), GPU, "block_m is 32, family 'tma' needs 64"),
        (TMA, norm_matmul(k=100), GPU, "k is 100, rows of a tensor map must be multiples of 8"),
        (TMA, norm_matmul(n=100, layout="kn"), GPU, "n is 100, rows of a tensor map must be mult"),
        (replace(GEMV, block_m=2), norm_matmul(), GPU, "block_m is 2, family 'gemv' takes 1 row"),
        (replace(GEMV, block_n=16), norm_matmul(), GPU, "a thread holds 256 weights"),
        (replace(GEMV, split_k=2), norm_matmul(), GPU, "split_k is 2, family 'gemv' reduces in 1"),
        (replace(GEMV, block_n=1), ROTATED, GPU, "block_n is 1, rotated features come 2 at a time"),
        (replace(TMA, block_n=64), ROTATED, GPU, "block_n is 64, rotated features come 128 at a"),
        (replace(POINTER, split_k=65), norm_matmul(), GPU, "split_k is 65, k has 64 blocks"),
    ],
)
def test_each_violation_has_its_sentence(wrong, work, dev, sentence) -> None:
    assert any(s.startswith(sentence) for s in violations(wrong, work, dev))


def test_heads_are_rotated_by_tiles_of_whole_heads() -> None:
    found = list(candidates(ROTATED, GPU, "triton"))
    assert {p.family for p in found} == {"gemv", "pointer", "tma"}
    assert {p.block_n for p in found if p.family == "tma"} == {128, 256}
    plain = replace(ROTATED, outputs=(replace(ROTATED.outputs[0], rope=None),))
    for plan in found[::7]:  # rotating is free, but for the pass over memory that it saves
        assert predict(ROTATED, plan, GPU, 64) == predict(plain, plan, GPU, 64)
    assert predict_unfused(ROTATED, GPU, 64).seconds > predict_unfused(plain, GPU, 64).seconds


def test_only_a_bias_comes_before_a_rotation() -> None:
    biased = replace(ROTATED.outputs[0], epilogue=("bias",))
    assert unsupported(replace(ROTATED, outputs=(biased,)), GPU) is None
    residual = replace(ROTATED.outputs[0], epilogue=("residual",))
    assert "rotate a matmul" in unsupported(replace(ROTATED, outputs=(residual,)), GPU)


def test_wide_tiles_leave_no_registers_for_an_epilogue() -> None:
    wide = replace(TMA, block_n=256)
    heavy = replace(norm_matmul(), outputs=(Projection(4096, "nk", ("residual",)),))
    assert violations(wide, norm_matmul(), GPU) == ()
    assert violations(wide, heavy, GPU) != ()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(WORKS)),
    pick=st.integers(0, 10**6),
    rows=st.integers(1, 5000),
    more=st.integers(0, 5000),
)
def test_more_rows_never_take_less_time(name, pick, rows, more) -> None:
    work = WORKS[name]
    found = list(candidates(work, GPU, "triton"))
    chosen = found[pick % len(found)]
    few, many = (predict(work, chosen, GPU, n) for n in (rows, rows + more))
    assert many.seconds >= few.seconds * (1 - 1e-9)
    assert few.seconds > few.dram_bytes / GPU.dram_bytes_per_s


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_few_rows_stream_weights_and_many_fill_tensor_cores(work) -> None:
    found = choose(work, GPU, backend="triton")
    assert isinstance(found, Choice)
    families = {rows: found.plans.plan_for(rows).family for rows in (1, 16, 1024)}
    assert families == {1: "gemv", 16: "pointer", 1024: "tma"}
    assert found.plans.plan_for(1024).block_m == 128
    assert all(p.fused.seconds < p.unfused.seconds for p in found.predictions[1:])


def test_a_table_has_one_back_end() -> None:
    tir = TilePlan(64, 64, 32, reg_m=4, reg_n=4, lanes=8, num_warps=8)
    with pytest.raises(TilePlanError, match=r"one back end, not \['tir', 'triton'\]"):
        PlanTable(((16, GEMV), (None, tir)))
