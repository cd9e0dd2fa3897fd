"""What the launches of an attention under a plan of the Triton back end cost.

Attention is bound by memory (keys and values, as many as are in flight), by the matrix units, or by
the softmax: an exponential takes one of 16 slots a clock of a multiprocessor, and at 64 features a
head softmax lasts longer than both matmuls.  A program that has its multiprocessor to itself cannot
overlap its own steps, of which each waits for the one before; that is what short sequences are
bound by.  Constants were fitted to timings of the kernels on an H200, float16.
"""

from __future__ import annotations

from math import hypot
from typing import NamedTuple

from ..device import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import DTYPE_BYTES, Attention
from .causal import visible_blocks, visible_keys
from .gpu_cost import attention_qo_bytes
from .prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from .shape import AttentionSize
from .triton_attention import (
    HALVES_BLOCKS,
    few_scores,
    heads_of_tile,
    key_parts,
    padded,
    register_values,
    row_tiles,
    smem_bytes,
    two_tiles,
)

FILL_S = {"pointer": 2.4e-6, "flash": 2.6e-6, "groups": 0.0, "halves": 0.0}
"""From the start of a kernel to its first matmul, and from its last to the last store."""

QUERIES_FIRST_S = 1.0e-6
"""What it adds that larger pointer tiles wait for their queries before they ask for keys."""

FILL_S_PER_BYTE = 31e-12
"""The same for the first tiles of queries, keys and values of `flash`."""

STEP_S, STEP_S_PER_VALUE, FEW_ROWS_STEP = 0.15e-6, 1.52e-10, 0.65
"""What a pointer program that has its multiprocessor to itself takes for a block of keys, and for
each of its keys and features: a matmul, the softmax and a matmul wait for each other.  The latter
is less with 16 rows."""

BLOCK_S = 0.2e-6
"""What a block of keys costs besides its operations: barriers, and the row maxima."""

TENSOR_EFFICIENCY = {"pointer": 0.7, "flash": 0.855}
"""Reached part of the tensor cores' peak, before what overlaps badly."""

SCORES_PER_CLOCK = 9.2
"""Scores that a multiprocessor takes through a softmax: scale, maximum, exponential, sum, convert.
0.9 us for 128 x 128."""

SCORE_WORK = {"softcap": 1.5, "alibi": 0.6, "bias": 1.85, "mask": 1.6, "line": 0.3}
"""What is done to a score besides, over the time of its softmax.  Assumed is that of a bias or mask
with one value a key (or a query), of which a tile reads a line."""

OVERLAP = {"pointer": 0.5, "flash": 0.2}
"""Part of the shorter of matmuls and softmax that the longer does not hide."""

NEXT_TILE_S = {"pointer": 0.3e-6, "flash": 0.7e-6}
"""What a further tile of a multiprocessor adds to its blocks: it ends and begins."""

EDGE_S = 1.0e-6
"""What blocks of which some rows see a part cost besides, in a tile of 128 rows.  Twice that for
128 keys in the first tile, when there is nothing else to do."""

COMBINE_S, COMBINE_S_PER_ROW, COMBINE_S_PER_PART = 1.5e-6, 0.5e-9, 2e-9
"""What the launch that puts parts together adds, for a row, and for a part that there could be,
beside the parts' way through L2."""

LATENCY_S = 0.91e-6
"""Between asking for memory and having it (as for matmuls)."""

L2_EFFICIENCY = 0.6
"""Reached part of the L2 peak by tiles of keys and values."""

REGISTERS_OVERHEAD = 32
"""Registers of a thread beside scores and results."""

SHORT_S, SHORT_S_PER_SCORE = 2.0e-6, {"groups": 0.24e-9, "halves": 0.087e-9}
"""What the programs that a multiprocessor holds at once take in the kernels for short sequences:
from the first load to the last store, and for each of their scores at 64 features."""


class _Load(NamedTuple):
    """The programs of a launch, and the blocks of keys of one: on average, and at most."""

    programs: int
    parts: int
    mean: float
    most: float


def predict(work: Attention, plan: TilePlan, dev: DeviceSpec, size: AttentionSize) -> Prediction:
    """Return what the launches of `plan` cost at `size`."""
    load = _load(work, plan, dev, size)
    resident = _resident(work, plan, dev)
    waves = ceil_div(max(load.programs, 1), dev.sm_count * resident)
    times: dict[Bound, float] = {
        "dram": _memory_s(work, plan, dev, size, load, resident),
        "l2": _l2_s(work, plan, dev, load),
    }
    if plan.family in SHORT_S_PER_SCORE:
        at_once = min(resident, ceil_div(load.programs, dev.sm_count))
        times["latency"] = waves * (SHORT_S + at_once * _short_s(work, plan))
    else:
        times["compute"] = _compute_s(work, plan, dev, load)
        times["latency"] = load.most * _step_s(work, plan)
    launch = dev.launch_s + _fill_s(work, plan)
    if load.parts > 1:
        launch += _combine_s(work, plan, dev, size, load.parts)
    seconds = launch + max(times.values())
    moved = attention_qo_bytes(work, size) + _kv_bytes(work, size)
    return Prediction(
        seconds, moved, work.flops(*size), waves, largest({**times, "launch": launch})
    )


def _fill_s(work: Attention, plan: TilePlan) -> float:
    if plan.family == "pointer":
        return FILL_S["pointer"] + (0.0 if few_scores(plan) else QUERIES_FIRST_S)
    if plan.family != "flash":
        return FILL_S[plan.family]
    width, v_width = padded(work.head_dim), padded(work.v_dim)
    values = plan.block_m * width + plan.block_n * (width + v_width)
    return FILL_S[plan.family] + values * DTYPE_BYTES[work.dtype] * FILL_S_PER_BYTE


def _short_s(work: Attention, plan: TilePlan) -> float:
    """Return what a program of the kernels for short sequences takes besides its latencies."""
    if plan.family == "groups":
        keys, width = plan.split_k * plan.block_n, two_tiles(work.head_dim)
    else:
        keys, width = HALVES_BLOCKS * plan.block_n, padded(work.head_dim)
    each = SHORT_S_PER_SCORE[plan.family] * _score_work(work)
    return plan.block_m * keys * width / 64 * each


def _step_s(work: Attention, plan: TilePlan) -> float:
    """Return the least time of a block of keys."""
    if plan.family == "flash":
        return 0.0  # its warp groups work in turns, which is in what blocks cost
    values = plan.block_n * (padded(work.head_dim) + padded(work.v_dim)) / 2
    each = STEP_S_PER_VALUE * (FEW_ROWS_STEP if plan.block_m <= 16 else 1.0)
    return STEP_S + values * each


def _combine_s(
    work: Attention, plan: TilePlan, dev: DeviceSpec, size: AttentionSize, parts: int
) -> float:
    rows = size.batch * work.q_heads * size.q_len
    moved = 2.0 * rows * parts * work.v_dim * DTYPE_BYTES["float32"]
    own = COMBINE_S + rows * COMBINE_S_PER_ROW + plan.split_k * COMBINE_S_PER_PART
    return own + moved / (dev.l2_bytes_per_s * L2_EFFICIENCY)


def _load(work: Attention, plan: TilePlan, dev: DeviceSpec, size: AttentionSize) -> _Load:
    shared = heads_of_tile(plan, work)
    tiles = size.batch * (work.q_heads // shared) * row_tiles(plan, work, size.q_len)
    mean, most = visible_blocks(work, plan, size, max(1, plan.block_m // shared))
    parts = key_parts(plan, work, dev, size)
    if parts == 1:
        return _Load(tiles, 1, mean, most)
    return _Load(tiles * parts, parts, mean / parts, ceil_div(most, parts))


def _kv_bytes(work: Attention, size: AttentionSize) -> float:
    """Return the bytes of the keys and values that some query sees."""
    each = (work.head_dim + work.v_dim) * DTYPE_BYTES[work.dtype]
    return float(size.batch * work.kv_heads * visible_keys(work, size) * each)


def _memory_s(
    work: Attention,
    plan: TilePlan,
    dev: DeviceSpec,
    size: AttentionSize,
    load: _Load,
    resident: int,
) -> float:
    bandwidth = dev.dram_bytes_per_s * DRAM_EFFICIENCY
    block = plan.block_n * (work.head_dim + work.v_dim) * DTYPE_BYTES[work.dtype]
    at_once = max(1, min(load.programs, dev.sm_count * resident))
    ahead = load.most if plan.family in SHORT_S_PER_SCORE else max(1, plan.num_stages - 1)
    in_flight = at_once * block * max(0.5, min(ahead, load.most))
    # The nearer to what memory can give, the more in flight a little more takes
    kv = _kv_bytes(work, size) * hypot(1 / bandwidth, LATENCY_S / in_flight)
    return kv + attention_qo_bytes(work, size) / bandwidth


def _l2_s(work: Attention, plan: TilePlan, dev: DeviceSpec, load: _Load) -> float:
    width = work.head_dim + work.v_dim
    read = load.programs * load.mean * plan.block_n * width * DTYPE_BYTES[work.dtype]
    return read / (dev.l2_bytes_per_s * L2_EFFICIENCY)


def _score_work(work: Attention) -> float:
    """Return the time of a score's softmax, and of what is done to it before, over the former."""
    found = 1.0
    for name, given in (("softcap", work.softcap), ("alibi", work.alibi)):
        found += 0.0 if given is None else SCORE_WORK[name]
    for name, dims in (("bias", work.bias_dims), ("mask", work.mask_dims)):
        if dims is not None:
            found += SCORE_WORK[name if dims[2] and dims[3] else "line"]
    return found


def _compute_s(work: Attention, plan: TilePlan, dev: DeviceSpec, load: _Load) -> float:
    """Return the time of the busiest multiprocessor: matmuls and softmax, partly overlapped."""
    scores = plan.block_m * plan.block_n
    per_sm = dev.tensor_flops_per_s(work.dtype) / dev.sm_count * TENSOR_EFFICIENCY[plan.family]
    matmuls = 2.0 * scores * (padded(work.head_dim) + padded(work.v_dim)) / per_sm
    softmax = scores * _score_work(work) / (SCORES_PER_CLOCK * dev.clock_hz)
    block = max(matmuls, softmax) + OVERLAP[plan.family] * min(matmuls, softmax)
    block += BLOCK_S
    edges = (work.causal != "none") + (work.window is not None)
    first = 2 * edges * EDGE_S * (0.35 + 0.65 * scores / (128 * 128))
    further = NEXT_TILE_S[plan.family] + edges * EDGE_S * plan.block_m / 128
    tiles = ceil_div(load.programs, dev.sm_count)
    share = max(tiles * load.mean, load.most)
    if work.causal != "none" and tiles > 1:  # the shortest come last, and fill the gaps
        share = max(load.programs / dev.sm_count * load.mean, load.most)
    return share * block + first + (tiles - 1) * further


def _resident(work: Attention, plan: TilePlan, dev: DeviceSpec) -> int:
    """Return how many thread blocks a multiprocessor holds at once."""
    if plan.family == "flash":
        return 1  # its threads have all registers
    threads = 32 * plan.num_warps
    registers = min(register_values(plan, work) + REGISTERS_OVERHEAD, dev.max_registers_per_thread)
    by_smem = dev.smem_per_sm_bytes // max(1, smem_bytes(plan, work, dev))
    by_registers = dev.registers_per_sm // (registers * threads)
    return max(1, min(by_smem, by_registers, dev.max_threads_per_sm // threads))
