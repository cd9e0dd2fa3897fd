"""The plans worth pricing: a small, pruned part of all tilings, in the manner of MCFuser.

MCFuser (SC'24) prunes by deduplication, padding ratio and footprint.  Here duplicates never arise,
because each dimension of the search is generated from what decides it; tiles that pad more than
`MAX_PADDING` are dropped where others pad less; and `violations` drops what does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from ..hardware import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import Attention, MatmulChain, Workload
from . import chain as matmul_chain
from . import mma_attention, mma_plans, skinny, triton, triton_attention
from .footprint import OPERAND_REGISTERS, VECTOR_LOAD_BYTES
from .panels import candidates as panel_candidates
from .prediction import ceil_div, power_dividing
from .shape import MatmulShape, matmul_shape
from .violations import fits

MAX_PADDING = 0.05
"""Part of a dimension that a tile may compute in vain (MCFuser's third rule)."""

MAX_BLOCK_M = 128
"""Rows beyond which a GPU block gains no reuse that shared memory could hold."""

GPU_THREADS = (32, 64, 128, 256)
GEMV_COLUMNS = (1, 2, 4)
GEMV_STEPS = (1, 2, 4)
GPU_ATTENTION_TILES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4))
CPU_REG_M = (1, 2, 4, 8)
CPU_REG_N = (1, 2, 3, 4, 6, 8)
CPU_BLOCK_ROWS = (1, 2, 4)
CPU_TASKS_PER_CORE = (1, 2, 4, 8, 16)


def candidates(work: Workload, dev: DeviceSpec, backend: str = "tir") -> Iterator[TilePlan]:
    """Yield plans that fit `work` on `dev`, each once.

    Some hundred for a usual workload; none if the smallest tile of the family does not fit.

    Parameters
    ----------
    backend : {"tir", "triton"}
        Who is to emit the kernel.  Where Triton has no kernel for `work`, plans for TIR.
    """
    if backend == "triton" and not isinstance(work, MatmulChain):
        attends = isinstance(work, Attention)
        found = (triton_attention if attends else triton).candidates(work, dev)
        first = next(found, None)
        if first is not None:
            yield from chain([first], found)
            return
    yield from _tir(work, dev)


def _tir(work: Workload, dev: DeviceSpec) -> Iterator[TilePlan]:
    if isinstance(work, Attention):
        found = _attention_cpu(work, dev)
        if dev.kind == "gpu":
            tensor = [p for p in mma_attention.candidates(work, dev) if fits(p, work, dev)]
            found = iter(tensor) if tensor else _attention_gpu(work)
    elif isinstance(work, MatmulChain):
        found = matmul_chain.candidates(work, dev)
    else:
        shape = matmul_shape(work)
        if dev.kind == "cpu":
            found = chain(_matmul_cpu(shape, dev), panel_candidates(shape, dev))
        else:
            few = (
                plan
                for plan in skinny.candidates(work, shape, dev)
                if plan.block_n == skinny.least_columns(shape) or _columns_fit(shape, plan.block_n)
            )
            many = mma_plans.candidates(shape, work.rows, dev)
            padding_little = (p for p in many if _columns_fit(shape, p.block_n))
            tensor = [p for p in chain(few, padding_little) if fits(p, work, dev)]
            # Tensor cores are never slower than tiles of FMAs, which are many to price.
            found = chain(_gemv(shape, dev), tensor or _matmul_gpu(shape, work.rows))
    return (plan for plan in found if fits(plan, work, dev))


def _matmul_cpu(shape: MatmulShape, dev: DeviceSpec) -> Iterator[TilePlan]:
    for lanes in _cpu_lanes(shape, dev):
        for reg_m, reg_n in _cpu_tiles(shape, dev, lanes):
            for block_m in (reg_m * r for r in CPU_BLOCK_ROWS):
                # Rows in half of L2: the other half is for the weights that stream by.
                if block_m > reg_m and block_m * shape.k * 4 > dev.l2_bytes // 2:
                    break
                for block_n in _cpu_block_n(shape, dev, reg_n):
                    yield TilePlan(
                        *(block_m, block_n, shape.k), reg_m=reg_m, reg_n=reg_n, lanes=lanes
                    )


def _cpu_lanes(shape: MatmulShape, dev: DeviceSpec) -> list[int]:
    """Return the widest vector that the layouts allow, and the widest that needs no tail."""
    most = dev.vector_bytes // 4
    if "nk" in shape.layouts:
        return [power_dividing(shape.k, most)]
    exact = min(power_dividing(n, most) for n in shape.contiguous)
    # A vector that goes over the end of half a head would be a gather.
    return sorted({exact, most} if shape.contiguous == shape.n_parts else {exact})


def _cpu_tiles(shape: MatmulShape, dev: DeviceSpec, lanes: int) -> Iterator[tuple[int, int]]:
    """Yield the register tiles whose accumulators and operands the registers can hold."""
    unit = lanes if "kn" in shape.layouts else 1
    columns = [unit * r for r in CPU_REG_N]
    exact = [c for c in columns if all(n % c == 0 for n in shape.n_parts)]
    vectors_per_column = shape.parts / (lanes if shape.layouts == {"kn"} else 1)
    for reg_m in CPU_REG_M:
        free = dev.vector_registers - reg_m - OPERAND_REGISTERS
        for reg_n in exact or columns:
            if reg_m * reg_n * vectors_per_column <= free:
                yield reg_m, reg_n


def _cpu_block_n(shape: MatmulShape, dev: DeviceSpec, reg_n: int) -> list[int]:
    """Return column counts that make some tasks per core, dividing n where a divisor is near."""
    found = set()
    n = min(shape.n_parts)
    for per_core in CPU_TASKS_PER_CORE:
        tiles = max(1, shape.n // (dev.sm_count * per_core) // reg_n)
        near = range(tiles, max(tiles // 2, 1) - 1, -1)
        exact = next((t for t in near if n % (t * reg_n) == 0), tiles)
        found.add(exact * reg_n)
    return sorted(found)


def _matmul_gpu(shape: MatmulShape, rows: object) -> Iterator[TilePlan]:
    most_m, first_m = MAX_BLOCK_M, 2 if shape.layouts == {"nk"} else 1
    if isinstance(rows, int):
        most_m = max(first_m, min(most_m, next_power(rows)))
    blocks_k = _gpu_block_k(shape.k)
    for block_m, reg_m, reg_n, threads in _gpu_tiles(first_m, most_m):
        block_n = threads // (block_m // reg_m) * reg_n
        if not 16 <= block_n <= 256 or not _columns_fit(shape, block_n):
            continue
        for block_k in blocks_k:
            yield TilePlan(
                *(block_m, block_n, block_k),
                reg_m=reg_m,
                reg_n=reg_n,
                lanes=_gpu_lanes(shape, block_n, block_k),
                num_warps=threads // 32,
            )


def _gemv(shape: MatmulShape, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield dot products of whole warps along k, for weights in which k is contiguous."""
    if shape.layouts != {"nk"}:
        return
    lanes = power_dividing(shape.k, VECTOR_LOAD_BYTES // shape.in_bytes)
    for threads in (t for t in GPU_THREADS if t > dev.warp_size):
        for along_k in powers(dev.warp_size, threads):
            for reg_n in GEMV_COLUMNS:
                block_n = threads // along_k * reg_n
                if not _columns_fit(shape, block_n):
                    continue
                for step in GEMV_STEPS:
                    block_k = along_k * lanes * step
                    if shape.k % block_k == 0:
                        yield TilePlan(
                            *(1, block_n, block_k),
                            reg_n=reg_n,
                            lanes=lanes,
                            num_warps=threads // dev.warp_size,
                        )


def _gpu_tiles(first_m: int, most_m: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (block_m, reg_m, reg_n, threads) with register tiles not far from square."""
    for block_m in powers(first_m, most_m):
        for reg_m in powers(1, min(block_m, 8)):
            for reg_n in powers(1, 8):
                # Oblong tiles load more words per FMA; they pay only where there are no more rows.
                if (reg_n > 2 * reg_m and reg_m < block_m) or reg_m > 2 * reg_n:
                    continue
                # One warp alone waits at each barrier for its own loads; one row can feed no more.
                for threads in GPU_THREADS if block_m == 1 else GPU_THREADS[1:]:
                    if threads % (block_m // reg_m) == 0:
                        yield block_m, reg_m, reg_n, threads


def _columns_fit(shape: MatmulShape, block_n: int) -> bool:
    """Tell whether `block_n` pads n by no more than `MAX_PADDING`, or is the least tile."""
    padded = sum(ceil_div(n, block_n) * block_n for n in shape.n_parts)
    return block_n <= 32 or padded <= shape.n * (1 + MAX_PADDING)


def _gpu_block_k(k: int) -> list[int]:
    """Return the powers of two that divide k, else any divisors, else a tail for the last step."""
    wanted = [b for b in (8, 16, 32, 64, 128) if k % b == 0]
    if wanted:
        return wanted[-4:]
    divisors = [b for b in range(4, 65) if k % b == 0]
    return divisors[-3:] or ([min(k, 16)] if k < 64 else [16, 32])


def _gpu_lanes(shape: MatmulShape, block_n: int, block_k: int) -> int:
    """Return the widest vector load that the contiguous extents of tile and weights allow."""
    lanes = VECTOR_LOAD_BYTES // shape.in_bytes
    if "nk" in shape.layouts:
        lanes = min(lanes, power_dividing(block_k, lanes), power_dividing(shape.k, lanes))
    if "kn" in shape.layouts:
        lanes = min(power_dividing(n, lanes) for n in (block_n, *shape.contiguous))
    return lanes


def _attention_cpu(work: Attention, dev: DeviceSpec) -> Iterator[TilePlan]:
    lanes = power_dividing(work.v_dim, dev.vector_bytes // 4)
    for block_m in powers(1, _most_q(work, 128)):
        for block_n in powers(16, _most_kv(work, 256)):
            # Tall first: of equal prices, 4 rows x 2 vectors measured best (Zen 5).
            for reg_m in reversed([*powers(1, min(block_m, 4))]):
                for reg_n in powers(lanes, min(block_n, 4 * lanes)):
                    yield TilePlan(
                        *(block_m, block_n, work.head_dim), reg_m=reg_m, reg_n=reg_n, lanes=lanes
                    )


def _attention_gpu(work: Attention) -> Iterator[TilePlan]:
    """Yield tiles whose register tiles keep at least half of the threads busy."""
    for block_m in powers(1, _most_q(work, 128)):
        for block_n in powers(16, _most_kv(work, 256)):
            for num_warps in (1, 2, 4, 8):
                for reg_m, reg_n in GPU_ATTENTION_TILES:
                    tiles = block_m * block_n // (reg_m * reg_n)
                    if block_m % reg_m == 0 and tiles >= num_warps * 16:
                        yield TilePlan(
                            *(block_m, block_n, work.head_dim),
                            reg_m=reg_m,
                            reg_n=reg_n,
                            num_warps=num_warps,
                        )


def _most_q(work: Attention, limit: int) -> int:
    """Return the most rows of a tile; those of query heads that share keys share it, too."""
    if not isinstance(work.q_len, int):
        return limit
    return min(limit, next_power(work.q_len * work.q_heads // work.kv_heads))


def _most_kv(work: Attention, limit: int) -> int:
    return max(16, min(limit, next_power(work.kv_len))) if isinstance(work.kv_len, int) else limit


def powers(first: int, last: int) -> Iterable[int]:
    """Yield `first`, twice that, and so on up to `last`."""
    while first <= last:
        yield first
        first *= 2


def next_power(value: int) -> int:
    """Return the least power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()
