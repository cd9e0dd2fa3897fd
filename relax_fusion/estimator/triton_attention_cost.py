"""What the launches of an attention under a plan of the Triton back end cost.

Attention is bound by memory (keys and values, as many as are in flight), by the matrix units, or by
the exponentials, of which a multiprocessor takes 16 a clock: at 64 features a head they last as
long as both matmuls.  A single program cannot overlap its own steps, of which each waits for the
one before; that is what short sequences are bound by.
"""

from __future__ import annotations

from math import hypot
from typing import NamedTuple

from ..device import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import DTYPE_BYTES, Attention
from .causal import visible_blocks
from .gpu_cost import SFU_PER_CLOCK, SOFTMAX_FLOPS_PER_SCORE, attention_qo_bytes
from .prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from .shape import AttentionSize
from .triton_attention import (
    heads_of_tile,
    key_parts,
    padded,
    register_values,
    row_tiles,
    smem_bytes,
)

FILL_S = {"pointer": 1.5e-6, "flash": 2.0e-6}
"""From the start of a kernel to its first matmul, and from its last to the last store."""

STEP_S = {"pointer": 0.55e-6, "flash": 0.5e-6}
"""One block of keys in a program that has its multiprocessor to itself: a matmul, the softmax and
a matmul, each of which waits for the one before."""

TENSOR_EFFICIENCY = {"pointer": 0.55, "flash": 0.72}
"""Reached part of the tensor cores' peak, before what overlaps badly."""

OVERLAP = {"pointer": 0.5, "flash": 0.2}
"""Part of the second longest of the times that the longest does not hide."""

COMBINE_S = 2.6e-6
"""What the launch that puts parts together adds."""

LATENCY_S = 0.91e-6
"""Between asking for memory and having it (as for matmuls)."""

L2_EFFICIENCY = 0.6
"""Reached part of the L2 peak by tiles of keys and values."""

REGISTERS_OVERHEAD = 48
"""Registers of a thread beside scores and results."""


class _Work(NamedTuple):
    """The programs of a launch, and the blocks of keys of one: on average, and at most."""

    programs: int
    parts: int
    mean: float
    most: float


def predict(work: Attention, plan: TilePlan, dev: DeviceSpec, size: AttentionSize) -> Prediction:
    """Return what the launches of `plan` cost at `size`."""
    load = _work(work, plan, dev, size)
    resident = _resident(work, plan, dev)
    waves = ceil_div(max(load.programs, 1), dev.sm_count * resident)
    moved = _moved_bytes(work, size)
    times: dict[Bound, float] = {
        "dram": _memory_s(work, plan, dev, size, load, resident),
        "l2": _l2_s(work, plan, dev, load),
        "compute": _compute_s(work, plan, dev, load),
        "latency": waves * load.most * STEP_S[plan.family],
    }
    longest, second, *_ = sorted(times.values(), reverse=True)
    seconds = dev.launch_s + FILL_S[plan.family] + longest + OVERLAP[plan.family] * second
    if load.parts > 1:
        seconds += COMBINE_S
    times["launch"] = dev.launch_s + FILL_S[plan.family]
    return Prediction(seconds, moved, work.flops(*size), waves, largest(times))


def _work(work: Attention, plan: TilePlan, dev: DeviceSpec, size: AttentionSize) -> _Work:
    shared = heads_of_tile(plan, work)
    tiles = size.batch * (work.q_heads // shared) * row_tiles(plan, work, size.q_len)
    queries = max(1, plan.block_m // shared)
    mean, most = visible_blocks(work, plan, size, queries)
    parts = key_parts(plan, work, dev, size)
    if parts == 1:
        return _Work(tiles, 1, mean, most)
    return _Work(tiles * parts, parts, mean / parts, ceil_div(most, parts))


def _moved_bytes(work: Attention, size: AttentionSize) -> float:
    """Return the bytes that go to and from memory once: what masks hide is not discounted."""
    return attention_qo_bytes(work, size) + _kv_bytes(work, size)


def _kv_bytes(work: Attention, size: AttentionSize) -> float:
    width = work.head_dim + work.v_dim
    seen = size.kv_len
    if work.window is not None and work.causal != "none":
        seen = min(seen, size.q_len + work.window)
    return float(size.batch * work.kv_heads * seen * width * DTYPE_BYTES[work.dtype])


def _memory_s(
    work: Attention,
    plan: TilePlan,
    dev: DeviceSpec,
    size: AttentionSize,
    load: _Work,
    resident: int,
) -> float:
    bandwidth = dev.dram_bytes_per_s * DRAM_EFFICIENCY
    block = plan.block_n * (work.head_dim + work.v_dim) * DTYPE_BYTES[work.dtype]
    at_once = min(load.programs, dev.sm_count * resident)
    in_flight = max(1, at_once) * block * max(0.5, min(plan.num_stages - 1, load.most))
    # The nearer to what memory can give, the more in flight a little more takes
    kv = _kv_bytes(work, size) * hypot(1 / bandwidth, LATENCY_S / in_flight)
    return kv + attention_qo_bytes(work, size) / bandwidth


def _l2_s(work: Attention, plan: TilePlan, dev: DeviceSpec, load: _Work) -> float:
    width = work.head_dim + work.v_dim
    read = load.programs * load.mean * plan.block_n * width * DTYPE_BYTES[work.dtype]
    return read / (dev.l2_bytes_per_s * L2_EFFICIENCY)


def _compute_s(work: Attention, plan: TilePlan, dev: DeviceSpec, load: _Work) -> float:
    """Return the time of the busiest multiprocessor: matmuls and softmax, partly overlapped."""
    scores = plan.block_m * plan.block_n
    per_sm = dev.tensor_flops_per_s(work.dtype) / dev.sm_count * TENSOR_EFFICIENCY[plan.family]
    matmuls = 2.0 * scores * (padded(work.head_dim) + padded(work.v_dim)) / per_sm
    exponentials = 1 if work.softcap is None else 3  # tanh: an exponential and a reciprocal
    softmax = scores * exponentials / (SFU_PER_CLOCK * dev.clock_hz)
    softmax += scores * SOFTMAX_FLOPS_PER_SCORE * dev.sm_count / dev.fma_float32_flops_per_s
    block = max(matmuls, softmax) + OVERLAP[plan.family] * min(matmuls, softmax)
    share = max(load.programs / dev.sm_count * load.mean, load.most)
    if load.programs > dev.sm_count:
        whole = ceil_div(load.programs, dev.sm_count) * load.mean
        share = (share + whole) / 2  # the last multiprocessors to end are partly alone
    return share * block


def _resident(work: Attention, plan: TilePlan, dev: DeviceSpec) -> int:
    """Return how many thread blocks a multiprocessor holds at once."""
    if plan.family == "flash":
        return 1  # its threads have all registers
    threads = 32 * plan.num_warps
    registers = min(register_values(plan, work) + REGISTERS_OVERHEAD, dev.max_registers_per_thread)
    by_smem = dev.smem_per_sm_bytes // max(1, smem_bytes(plan, work, dev))
    by_registers = dev.registers_per_sm // (registers * threads)
    return max(1, min(by_smem, by_registers, dev.max_threads_per_sm // threads))
