"""Predictions: against measured times, and the properties that any cost model must have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_fusion.estimator import (
    AttentionSize,
    candidates,
    format_seconds,
    predict,
    predict_unfused,
    violations,
)
from relax_fusion.estimator.baseline import price_alone
from relax_fusion.estimator.families.attention_tiles import visible_blocks
from relax_fusion.estimator.families.matmuls import SCALAR_FAMILIES
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import device
from relax_fusion.workload import Atom

from ..support.estimator_cases import (
    AVX2,
    AVX512,
    DEVICES,
    GPU,
    RMS,
    WORKLOADS,
    attention,
    gated_ffn,
    norm_matmul,
    size_of,
)

PLANS = {
    (work, dev): [
        *candidates(WORKLOADS[work], DEVICES[dev], "tir"),
        *(
            candidates(WORKLOADS[work], DEVICES[dev], "triton")
            if DEVICES[dev].kind == "gpu"
            else ()
        ),
    ]
    for work in WORKLOADS
    for dev in DEVICES
}
KEYS = st.sampled_from(sorted(PLANS))
ROUNDING = 1e-9
"""Relative slack for sums that are added in another order."""

CLOCK = 1.12
"""Times the clock of the data sheet at which multiprocessors run, by the rates that were fitted."""

steady = settings(derandomize=True, deadline=None, max_examples=80)

MEASURED_ATTENTION_MS = [
    # FlexAttention (Triton), full and causal, on one H200
    (attention(batch=32), 64, 0.085),
    (attention(q_len=2048, kv_len=2048, heads=(32, 8), dims=(128, 128)), 128, 0.155),
    (attention(1, 2048, 2048, (32, 8), (128, 128), causal="top_left"), 128, 0.122),
    (attention(1, 8192, 8192, (32, 8), (128, 128)), 128, 2.16),
    (attention(1, 8192, 8192, (32, 8), (128, 128), causal="top_left"), 128, 1.31),
]


@pytest.mark.parametrize(("work", "head_dim", "measured_ms"), MEASURED_ATTENTION_MS)
def test_tensor_core_attention_is_priced_near_triton_s(work, head_dim, measured_ms):
    plan = TilePlan(*(128, 64, head_dim), num_stages=2, num_warps=8, family="attention")
    assert violations(plan, work, GPU) == ()
    size = AttentionSize(work.batch, work.q_len, work.kv_len)
    ratio = predict(work, plan, GPU, size).seconds / (measured_ms * 1e-3)
    assert 1 / 1.5 < ratio < 1.5


MEASURED_TVM_MS = [
    # A norm and a matmul by TVM's own schedule, on one H200
    (6144, 16, 0.196),
    (6144, 256, 0.500),
    (6144, 1024, 1.87),
    (6144, 4096, 7.19),
]


@pytest.mark.parametrize(("n", "rows", "measured_ms"), MEASURED_TVM_MS)
def test_matmuls_that_are_left_to_tvm_are_priced_near_what_was_measured(n, rows, measured_ms):
    alone = norm_matmul(n=n, norm=None)
    found = price_alone(Atom(0, alone, rows, maker="tvm"), GPU).seconds
    assert 1 / 1.3 < found / (measured_ms * 1e-3) < 1.3


@steady
@given(key=KEYS, pick=st.integers(0, 10**6), rows=st.integers(1, 3000), more=st.integers(0, 3000))
def test_more_rows_never_take_less_time(key, pick, rows, more):
    work, dev = WORKLOADS[key[0]], DEVICES[key[1]]
    plan = PLANS[key][pick % len(PLANS[key])]
    few = predict(work, plan, dev, size_of(work, rows)).seconds
    many = predict(work, plan, dev, size_of(work, rows + more)).seconds
    if getattr(work, "causal", "none") == "none":
        assert many >= few * (1 - ROUNDING)
    few = predict_unfused(work, dev, size_of(work, rows)).seconds
    assert predict_unfused(work, dev, size_of(work, rows + more)).seconds >= few * (1 - ROUNDING)


FASTER = (
    *("dram_bytes_per_s", "l2_bytes_per_s", "fma_float32_flops_per_s"),
    "tensor_float16_flops_per_s",
)


@steady
@given(
    key=KEYS,
    pick=st.integers(0, 10**6),
    rows=st.integers(1, 5000),
    field=st.sampled_from(FASTER),
    factor=st.floats(1, 10),
)
def test_a_faster_device_is_never_slower(key, pick, rows, field, factor):
    work, dev = WORKLOADS[key[0]], DEVICES[key[1]]
    plan = PLANS[key][pick % len(PLANS[key])]
    better = replace(dev, **{field: getattr(dev, field) * factor})
    size = size_of(work, rows)
    slow, fast = predict(work, plan, dev, size), predict(work, plan, better, size)
    assert fast.seconds <= slow.seconds * (1 + ROUNDING)
    slow, fast = predict_unfused(work, dev, size), predict_unfused(work, better, size)
    assert fast.seconds <= slow.seconds * (1 + ROUNDING)


@steady
@given(key=KEYS, pick=st.integers(0, 10**6), rows=st.integers(1, 5000))
def test_a_prediction_respects_the_roofline(key, pick, rows):
    work, dev = WORKLOADS[key[0]], DEVICES[key[1]]
    plan = PLANS[key][pick % len(PLANS[key])]
    p = predict(work, plan, dev, size_of(work, rows))
    assert p.seconds >= dev.launch_s + p.dram_bytes / dev.dram_bytes_per_s
    if getattr(work, "causal", "none") == "none":
        scalar = dev.kind == "cpu" or plan.family in (*SCALAR_FAMILIES, "fma_attention", "gemv")
        tensor = CLOCK * dev.tensor_flops_per_s("float16")
        rate = CLOCK * dev.fma_float32_flops_per_s if scalar else tensor
        assert p.seconds >= dev.launch_s + p.flops / rate
    assert p.waves >= 1


def test_rows_that_do_not_fit_l2_are_read_again():
    work, small = gated_ffn(), replace(GPU, l2_bytes=1 << 20)
    plan = TilePlan(64, 64, 32, reg_m=4, reg_n=4, lanes=8, num_warps=8, family="fma_tiles")
    far, near = (predict(work, plan, dev, 4096).dram_bytes for dev in (small, GPU))
    assert far > near


def test_one_row_reads_the_weights_once_and_little_else():
    plan = TilePlan(1, 2, 2048, num_warps=4, family="gemv")
    p = predict(gated_ffn(), plan, GPU, 1)
    assert 1 <= p.dram_bytes / (4096 * 14336 * 2 * 2) < 1.01
    assert p.bound == "dram"
    cpu = predict(
        norm_matmul(), TilePlan(1, 64, 4096, reg_n=4, lanes=8, family="cpu_tiles"), AVX2, 1
    )
    assert 1 <= cpu.dram_bytes / (4096 * 6144 * 2) < 1.01
    assert cpu.bound == "dram"


def test_larger_register_tiles_feed_the_pipes_better():
    def seconds(reg: int) -> float:
        plan = TilePlan(
            64, 64, 32, reg_m=reg, reg_n=reg, num_warps=(64 // reg) ** 2 // 32, family="fma_tiles"
        )
        return predict(norm_matmul(), plan, GPU, 4096).seconds

    assert seconds(8) < seconds(4) < seconds(2)


def test_larger_register_tiles_pay_for_attention_too():
    work, size = attention(batch=32), AttentionSize(32, 512, 512)
    small, large = (
        TilePlan(32, 32, 64, reg_m=reg, reg_n=reg, num_warps=2, family="fma_attention")
        for reg in (1, 4)
    )
    assert predict(work, large, GPU, size).seconds < predict(work, small, GPU, size).seconds / 2
    # 16 register tiles leave three quarters of 64 threads idle
    idle = TilePlan(16, 16, 64, reg_m=4, reg_n=4, num_warps=2, family="fma_attention")
    assert predict(work, idle, GPU, size).seconds > predict(work, large, GPU, size).seconds
    small, large = (
        TilePlan(16, 64, 64, reg_m=reg, reg_n=16, lanes=16, family="cpu_attention")
        for reg in (1, 4)
    )
    assert predict(work, large, AVX512, size).seconds < predict(work, small, AVX512, size).seconds


def test_cpu_reuse_wider_vectors_and_cores_pay():
    work = norm_matmul(k=512, dtype="float32")
    plan = TilePlan(1, 64, 512, lanes=8, family="cpu_tiles")
    tall = TilePlan(4, 64, 512, reg_m=4, reg_n=2, lanes=8, family="cpu_tiles")
    assert predict(work, tall, AVX2, 64).seconds < predict(work, plan, AVX2, 64).seconds
    assert (
        predict(work, tall, AVX2, 64).seconds
        < predict(work, replace(tall, lanes=4), AVX2, 64).seconds
    )
    one_core = replace(AVX2, sm_count=1)
    assert predict(work, tall, AVX2, 64).seconds < predict(work, tall, one_core, 64).seconds
    panel = replace(tall, block_m=64)
    converted = predict(norm_matmul(k=512), panel, AVX512, 64).seconds
    assert converted > predict(work, panel, AVX512, 64).seconds


def test_what_is_left_apart_is_counted():
    for work, kernels in (
        (norm_matmul(), 2),
        (norm_matmul(norm=None), 1),
        (norm_matmul(norm=replace(RMS, residual=True)), 3),
        (gated_ffn(merged=True), 2),  # the norm goes with the matmul
        (gated_ffn(merged=False), 2),
        (replace(gated_ffn(merged=False), norm=None), 3),
        (attention(), 3),
    ):
        atoms = work.apart(rows=1, batch=1, q_len=1, kv_len=512)
        assert len(atoms) == kernels
        alone = predict_unfused(work, GPU, size_of(work, 1))
        assert alone.seconds > GPU.launch_s * (1 + (kernels - 1) / 5)


def test_unfused_attention_repeats_keys_that_heads_share():
    size = AttentionSize(1, 1, 4096)
    own, shared = (
        predict_unfused(attention(1, 1, 4096, heads, (128, 128)), GPU, size)
        for heads in ((32, 32), (32, 8))
    )
    assert (own.waves, shared.waves) == (3, 5)
    # Read once, written for every head, and read again as with keys of their own
    once = 2 * 8 * 4096 * 128 * 2
    assert shared.dram_bytes - own.dram_bytes == (1 + 4) * once


def test_unfused_attention_writes_and_reads_the_scores():
    work = attention(batch=32)
    fused = predict(
        work,
        TilePlan(128, 64, 64, num_stages=2, num_warps=8, family="attention"),
        *(GPU, AttentionSize(32, 512, 512)),
    )
    unfused = predict_unfused(work, GPU, AttentionSize(32, 512, 512), backend="triton")
    assert unfused.dram_bytes - fused.dram_bytes == pytest.approx(4 * 2 * 32 * 12 * 512 * 512)
    assert unfused.seconds > 2 * fused.seconds


def test_static_sizes_win_over_given_ones():
    work, plan = attention(batch=32), TilePlan(32, 64, 64, num_warps=4, family="fma_attention")
    assert predict(work, plan, GPU, AttentionSize(1, 1, 1)) == predict(
        work, plan, GPU, AttentionSize(32, 512, 512)
    )


@pytest.mark.parametrize(
    ("work", "size", "message"),
    [
        (attention(), 5, "an Attention is priced at an AttentionSize, not at 5"),
        (norm_matmul(), AttentionSize(1, 2, 3), "a matmul workload is priced at a number of rows"),
    ],
)
def test_a_size_of_the_wrong_kind_is_refused(work, size, message):
    with pytest.raises(TypeError, match=message):
        predict_unfused(work, GPU, size)


def exact_steps(
    causal: str, lengths: tuple[int, int], bm: int, bn: int, window: int | None = None
) -> list[int]:
    q_len, kv_len = lengths
    shift = kv_len - q_len if causal == "bottom_right" else 0
    steps = []
    for start in range(0, q_len, bm):
        end = kv_len if causal == "none" else min(start + bm, q_len) + shift
        end = max(1, min(end, kv_len))
        begin = 0 if window is None else max(0, min(start + shift - window + 1, end - 1))
        steps.append(-(-end // bn) - begin // bn)
    return steps


@steady
@given(
    causal=st.sampled_from(["none", "top_left", "bottom_right"]),
    lengths=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    block_m=st.sampled_from([1, 16, 64]),
    block_n=st.sampled_from([16, 32, 128]),
)
def test_visible_blocks_are_close_to_a_count(causal, lengths, block_m, block_n):
    work = attention(1, *lengths, causal=causal)
    plan = TilePlan(block_m, block_n, 64, family="cpu_attention")
    mean, most = visible_blocks(work, plan, AttentionSize(1, *lengths))
    if causal == "none":
        assert mean == most == -(-lengths[1] // block_n)
        return
    steps = exact_steps(causal, lengths, block_m, block_n)
    assert most == max(steps)
    assert abs(mean - sum(steps) / len(steps)) <= 0.51


@steady
@given(
    causal=st.sampled_from(["none", "top_left", "bottom_right"]),
    lengths=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    block_m=st.sampled_from([1, 16, 64]),
    block_n=st.sampled_from([16, 32, 128]),
    window=st.integers(1, 900),
)
def test_visible_blocks_of_a_window_are_close_to_a_count(causal, lengths, block_m, block_n, window):
    work = replace(attention(1, *lengths, causal=causal), window=window)
    plan = TilePlan(block_m, block_n, 64, family="cpu_attention")
    mean, most = visible_blocks(work, plan, AttentionSize(1, *lengths))
    steps = exact_steps(causal, lengths, block_m, block_n, window)
    # A first and a last block that some rows of a tile see, each counted as half or whole
    assert max(steps) <= most <= max(steps) + 2
    assert abs(mean - sum(steps) / len(steps)) <= 1.6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((2.0, "2 s"), (0.0123, "12.3 ms"), (54.63e-6, "54.6 us"), (3.4e-9, "3.4 ns")),
        *(
            (0.0, "0 ns"),
            (1849.6, "1850 s"),
            (999.7, "1000 s"),
            (0.9996, "1 s"),
            (999.9e-6, "1 ms"),
        ),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_slower_cards_are_slower():
    order = ["h200", "h100", "a100", "a100_40gb", "rtx3080"]
    times = [predict_unfused(gated_ffn(), device(d), 1, backend="triton").seconds for d in order]
    assert times == sorted(times)
