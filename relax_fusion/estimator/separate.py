"""Price of the same chain as separate kernels: what the module would do if left alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..hardware import DeviceSpec
from ..workload import DTYPE_BYTES, Attention, GatedFFN, NormMatmul
from .gpu_cost import MEMORY_LATENCY_S, SFU_PER_CLOCK, SOFTMAX_FLOPS_PER_SCORE
from .prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, largest
from .shape import AttentionSize, attention_qo_bytes, matmul_shape

TENSOR_EFFICIENCY = 0.8
"""Reached part of the tensor-core peak.  Measured on an H200: 790 of 989 Tflop/s."""

SIMT_EFFICIENCY = 0.42
"""Reached part of the FMA peak of TVM's own matmul schedule.  Measured on an H200: 27.6 and 28.8
of 66.9 Tflop/s at 1024 rows."""

SIMT_ROW_TILE, SIMT_COLUMN_TILE, SIMT_K_STEP = 32, 64, 16
"""Tile of that schedule (read in TVM 0.27's `dlight.gpu.Matmul`).  A static single row has a
schedule of its own and is not padded."""

SIMT_STEP_S = 0.73e-6
"""Least time of one of its steps along k, which load, wait at a barrier, compute and wait again.
Measured on an H200: 0.196 ms for 16 x 6144 x 4096 and a norm, less two launches, over 256 steps."""

CPU_FLOPS_PER_CYCLE = 0.18
"""What TVM's default CPU pipeline reaches on a matmul: it schedules none, so loops are scalar and
run on one core.  Measured with TVM 0.27, 64 x 1024 x 1024, float32, "nk": 0.46 Gflop/s at 2.6
GHz."""


@dataclass(frozen=True)
class Kernel:
    """One of the separate kernels.

    Parameters
    ----------
    rows : int
        Rows of a matmul, which its schedule may pad; 0 for kernels without one.
    moved_bytes : float
        Read and written.
    flops : float
        Of the matmul.
    scores : float
        Elements that go through a softmax.
    columns : int
        Of the matmul, where its tiles are to be counted.
    dynamic : bool
        Whether the schedule is one for any number of rows, and pads a single one too.
    """

    rows: int
    moved_bytes: float
    flops: float = 0.0
    scores: float = 0.0
    columns: int = 0
    dynamic: bool = False


def matmul_kernels(work: NormMatmul | GatedFFN, rows: int) -> list[Kernel]:
    """Return the norm, the matmuls with the element-wise steps that TVM fuses, and the gate.

    TVM's own FuseOps attaches element-wise steps to the matmul before them.  Behind a merged gate
    and up projection stands a split, which it cannot attach: that is a kernel of its own.  So is a
    rotation, which reads each element of the matmul twice.
    """
    shape = matmul_shape(work)
    b, out = shape.in_bytes, DTYPE_BYTES[work.out_dtype]
    x_bytes = rows * work.k * b
    kernels = []
    dynamic = not isinstance(work.rows, int)
    if work.norm is not None:
        extra = rows * work.k * b if work.norm.returns_sum or work.norm.residual else 0
        kernels.append(Kernel(0, rows * shape.x_row_bytes + x_bytes + extra))
    if isinstance(work, NormMatmul):
        for p in work.outputs:
            alone = replace(work, norm=None, outputs=(replace(p, rope=None),))
            moved = sum(alone.bytes(rows=rows).values())
            flops = alone.flops(rows=rows)
            kernels.append(Kernel(rows, moved, flops, columns=p.n, dynamic=dynamic))
            if p.rope is not None:
                kernels.append(Kernel(0, 2.0 * rows * p.rope.features * out))
        return kernels
    result, weights = rows * work.n * out, work.k * work.n * b
    if work.merged:
        moved = x_bytes + 2 * weights + 2 * result
        flops = work.flops(rows=rows)
        kernels.append(Kernel(rows, moved, flops, columns=2 * work.n, dynamic=dynamic))
        kernels.append(Kernel(0, 3 * result))
        return kernels
    for results in (1, 2):
        moved = x_bytes + weights + results * result
        flops = work.flops(rows=rows) / 2
        kernels.append(Kernel(rows, moved, flops, columns=work.n, dynamic=dynamic))
    return kernels


def attention_kernels(work: Attention, size: AttentionSize) -> list[Kernel]:
    """Return scores, softmax and values; scores are written and read again twice, unmasked.

    Keys and values that several query heads share are repeated first.  A transposition that a
    layout asks for is not counted: it may be fused into a neighbour.
    """
    b = DTYPE_BYTES[work.dtype]
    scores = float(size.batch * work.q_heads * size.q_len * size.kv_len)
    flops = work.flops_by_product(**size._asdict())
    q_rows = size.batch * work.q_heads * size.q_len
    kv_rows = size.batch * work.kv_heads * size.kv_len
    q_bytes, k_bytes = q_rows * work.head_dim * b, kv_rows * work.head_dim * b
    v_bytes, o_bytes = kv_rows * work.v_dim * b, q_rows * work.v_dim * DTYPE_BYTES[work.out_dtype]
    mask_bytes = attention_qo_bytes(work, size) - q_bytes - o_bytes
    repeated = []
    group = work.q_heads // work.kv_heads
    if group > 1:
        repeated = [Kernel(0, (1 + group) * moved) for moved in (k_bytes, v_bytes)]
        k_bytes, v_bytes = group * k_bytes, group * v_bytes
    return [
        *repeated,
        Kernel(size.q_len, q_bytes + k_bytes + mask_bytes + scores * b, flops["dot"]),
        Kernel(0, 2 * scores * b, scores=scores),
        Kernel(size.q_len, scores * b + v_bytes + o_bytes, flops["acc"]),
    ]


def price(kernels: list[Kernel], dtype: str, dev: DeviceSpec, backend: str) -> Prediction:
    """Add up the kernels, none of which overlaps another."""
    rate = _rate(dtype, dev, backend)
    terms: dict[Bound, float] = {
        "dram": 0.0,
        "compute": 0.0,
        "launch": len(kernels) * dev.launch_s,
        "latency": 0.0,
    }
    seconds = terms["launch"]
    for kernel in kernels:
        dram = kernel.moved_bytes / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
        compute = _matmul_s(kernel, rate, dev, backend)
        compute += _softmax_s(kernel.scores, dev)
        # A load and a store that depends on it, however small the kernel is
        latency = 2 * MEMORY_LATENCY_S if dev.kind == "gpu" else 0.0
        terms["dram"] += dram
        terms["compute"] += compute
        terms["latency"] += latency
        seconds += max(dram, compute, latency)
    moved = sum(k.moved_bytes for k in kernels)
    flops = sum(k.flops for k in kernels)
    return Prediction(seconds, moved, flops, len(kernels), largest(terms))


def _rate(dtype: str, dev: DeviceSpec, backend: str) -> float:
    if dev.kind == "cpu":
        return CPU_FLOPS_PER_CYCLE * dev.clock_hz
    if backend == "tir":
        return SIMT_EFFICIENCY * dev.fma_float32_flops_per_s
    return TENSOR_EFFICIENCY * (dev.tensor_flops_per_s(dtype) or dev.fma_float32_flops_per_s)


def _matmul_s(kernel: Kernel, rate: float, dev: DeviceSpec, backend: str) -> float:
    """Return the seconds of the arithmetic, in whole tiles where TVM's schedule has them."""
    if dev.kind == "cpu" or backend != "tir":
        return kernel.flops / rate
    if kernel.rows <= 1 and not kernel.dynamic:
        return kernel.flops / rate
    rows = ceil_div(kernel.rows, SIMT_ROW_TILE) * SIMT_ROW_TILE
    padded = kernel.flops * rows / kernel.rows
    if not kernel.columns:
        return padded / rate
    depth = kernel.flops / (2.0 * kernel.rows * kernel.columns)
    tiles = rows // SIMT_ROW_TILE * ceil_div(kernel.columns, SIMT_COLUMN_TILE)
    tile_s = 2.0 * SIMT_ROW_TILE * SIMT_COLUMN_TILE * depth * dev.sm_count / rate
    return max(ceil_div(tiles, dev.sm_count) * tile_s, depth / SIMT_K_STEP * SIMT_STEP_S)


def _softmax_s(scores: float, dev: DeviceSpec) -> float:
    if dev.kind == "cpu":
        return scores * SOFTMAX_FLOPS_PER_SCORE / (CPU_FLOPS_PER_CYCLE * dev.clock_hz)
    exponentials = SFU_PER_CLOCK * dev.clock_hz * dev.sm_count
    return scores * (1 / exponentials + SOFTMAX_FLOPS_PER_SCORE / dev.fma_float32_flops_per_s)
