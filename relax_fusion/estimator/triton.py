"""Plans of the Triton back end for matmul workloads: which there are, which fit, what they cost.

Families, by the kernels of `relax_fusion.triton_bridge.kernels`:

``gemv``     one row: dot products, no tensor cores, any device
``pointer``  tiles on tensor cores, operands loaded through pointers; k may be split
``tma``      tiles on tensor cores, operands copied by the TMA unit, persistent programs (sm_90)

Constants were fitted to timings of these kernels on an H200, float16, with a norm in front: rows 1
to 4096, k = 4096, n = 6144 and a gated n = 14336 (`2026-11-21-triton_plans.json`).  On that table,
60 sets of plans each timed in one run, the model's first choice loses 1 % on average, 15 % at
most, and predictions of plans within 30 % of the best are 7 % off; a test holds it to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..device import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import ACTIVATIONS, Dim, GatedFFN, NormMatmul, Projection
from .prediction import DRAM_EFFICIENCY, HALF_DTYPES, Bound, Prediction, ceil_div, largest
from .shape import MatmulShape, matmul_shape

FAMILIES = ("gemv", "pointer", "tma")

ROPE_FAMILIES = ("gemv", "pointer", "tma")
"""Families whose epilogue can rotate heads."""

FILL_S = 2.3e-6
"""From the start of a kernel to its full stride, and from there to its last store."""

NORM_S = 1.7e-6
"""What a norm kernel in front adds: it begins, and the matmul waits, while both are launched."""

NORM_INSIDE_S_PER_ROW = 0.11e-6
"""What statistics in the loop over k add: the operand passes through registers."""

NORM_INSIDE_ROWS, NORM_INSIDE_K = 16, 64
"""Tiles in which a norm inside does not stall the loop: with 128 elements of k at once, gamma is
not copied ahead (measured: 35 us instead of 20)."""

REDUCE_S = 0.8e-6
"""What the kernel that adds the parts of a split matmul costs."""

WAVE_S = 2.0e-6
"""What every further wave of thread blocks costs: they begin and end as the first did."""

LATENCY_S = 1.13e-6
"""Between asking for memory and having it, under load.  Bytes in flight over this is bandwidth."""

L2_SHARING = {"pointer": 1.0, "tma": 1.4}
"""Bytes that tiles read for each byte that the L2 cache delivers: persistent programs walk tiles of
the same rows together."""

TENSOR_EFFICIENCY = {"pointer": 0.86, "tma": 0.92}
"""Reached part of the tensor cores' peak, for tiles of 128 columns or more."""

NARROW_EFFICIENCY = 0.76
"""Of that, what narrower tiles reach: their operands are read more often."""

LOW_EFFICIENCY = 0.6
"""Of that, what TMA tiles of 64 rows reach.  Assumed: they read weights twice as often as those of
128, and were timed at up to 64 rows only."""

TMA_TILES = ((64, 64, 4, (3, 4, 6)), (128, 128, 8, (4, 6)), (128, 256, 8, (3, 4)))
"""Rows, columns, warps and stages; others that were timed lost at every number of rows."""

OVERLAP = 0.25
"""Part of the shorter of memory and compute time that the longer does not hide."""

ACCUMULATOR_OVERHEAD = 17
"""Registers of a thread beside its accumulators (Triton keeps operands in shared memory)."""

MAX_ACCUMULATORS = 192
"""Accumulators of a thread beyond which its registers spill."""

EXTRA_SMEM_BYTES = {"gemv": 0, "pointer": 4 << 10, "tma": 32 << 10}
"""Shared memory beside the stages: barriers, layout conversions, the tile on its way out."""

TMA_CAPABILITY = "sm_90"
"""First architecture with tensor memory accelerators."""


def split_epilogue(steps: tuple[str, ...]) -> tuple[str, str] | None:
    """Return activation and place of the residual of an epilogue that the kernels can express.

    They add a bias, then a residual ``"before"`` the activation or ``"after"`` it.  None for other
    orders.
    """
    rest = steps[1:] if steps[:1] == ("bias",) else steps
    activation, place = "none", "none"
    for step in rest:
        if step == "residual" and place == "none":
            place = "before" if activation == "none" else "after"
        elif step in ACTIVATIONS and activation == "none":
            activation = step
        else:
            return None
    if activation == "none" and place == "before":
        place = "after"
    return activation, place


def norm_inside(work: NormMatmul | GatedFFN, plan: TilePlan) -> bool:
    """Tell whether the matmul's own kernel normalises: where it can, and nothing else wants it."""
    norm = work.norm
    if norm is None or norm.residual or norm.returns_sum or norm.returns_norm:
        return False
    if plan.family == "gemv":
        return True
    few = plan.block_m <= NORM_INSIDE_ROWS and plan.block_k == NORM_INSIDE_K
    return plan.family == "pointer" and norm.kind == "rms" and few


def unsupported(work: NormMatmul | GatedFFN, dev: DeviceSpec) -> str | None:
    """Return why the Triton kernels cannot compute `work` on `dev`; None if they can."""
    if dev.kind == "cpu":
        return "backend is 'triton', a CPU has 'tir' only"
    if work.dtype not in HALF_DTYPES:
        return f"dtype is {work.dtype}, the Triton kernels take {' and '.join(HALF_DTYPES)}"
    if not dev.tensor_flops_per_s(work.dtype):
        return f"the {dev.label} has no tensor cores for {work.dtype}"
    if isinstance(work, GatedFFN):
        return None
    if any(p.rope and set(p.epilogue) - {"bias"} for p in work.outputs):
        return "the kernels rotate a matmul with a bias, and with no other step before it"
    wrong = [p.epilogue for p in work.outputs if split_epilogue(p.epilogue) is None]
    return (
        f"the epilogue {', '.join(wrong[0])} has an order that the kernels lack" if wrong else None
    )


def candidates(work: NormMatmul | GatedFFN, dev: DeviceSpec) -> Iterator[TilePlan]:
    """Yield the plans that fit `work` on `dev`, each once; none if no kernel computes it."""
    if unsupported(work, dev) is None:
        for plan in _all(work.rows):
            if next(violations(plan, work, dev), None) is None:
                yield plan


def _all(rows: Dim) -> Iterator[TilePlan]:
    if not isinstance(rows, int) or rows <= 2:
        # Of equal prices the first is taken: in the order of what measured best
        for block_n, block_k, warps in product((2, 4, 1), (4096, 2048, 1024), (4, 8)):
            yield _plan("gemv", (1, block_n, block_k), warps, 1)
    for block_m, stages in product((16, 32, 64, 128), (4, 6, 8)):
        for block_k, split in ((64, 1), (128, 1), (64, 2), (64, 4), (64, 8)):
            yield _plan("pointer", (block_m, 64, block_k), 4, stages, split)
    for block_m, block_n, warps, depths in TMA_TILES:
        for stages in depths:
            yield _plan("tma", (block_m, block_n, 64), warps, stages)


def _plan(
    family: str, block: tuple[int, int, int], warps: int, stages: int, split: int = 1
) -> TilePlan:
    return TilePlan(
        *block,
        split_k=split,
        num_stages=stages,
        num_warps=warps,
        backend="triton",
        family=family,
    )


def smem_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the shared memory of one thread block: the stages of both operands."""
    if plan.family == "gemv":
        return 0
    return stage_bytes(plan, shape) * plan.num_stages + EXTRA_SMEM_BYTES[plan.family]


def stage_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the bytes of both operands of one step along k."""
    lines = plan.block_m + shape.parts * plan.block_n
    return lines * plan.block_k * shape.in_bytes


def _accumulators(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the float32 accumulators of one thread."""
    return ceil_div(plan.block_m * plan.block_n * shape.parts, 32 * max(plan.num_warps, 1))


def violations(plan: TilePlan, work: NormMatmul | GatedFFN, dev: DeviceSpec) -> Iterator[str]:
    """Yield why `plan` cannot run `work` on `dev`, one sentence each, with both numbers."""
    reason = unsupported(work, dev)
    if reason is not None:
        yield reason
        return
    shape = matmul_shape(work, pairs=False)
    if plan.family not in FAMILIES:
        yield f"family is {plan.family!r}, backend 'triton' has {', '.join(FAMILIES)}"
        return
    for name in ("block_m", "block_n", "block_k", "num_warps"):
        value = getattr(plan, name)
        if value < 1 or value & (value - 1):
            yield f"{name} is {value}, triton needs a power of two"
    yield from _rope_violations(plan, work)
    if plan.family == "gemv":
        yield from _gemv_violations(plan, shape)
    else:
        yield from _tile_violations(plan, shape, work, dev)


def _rope_violations(plan: TilePlan, work: NormMatmul | GatedFFN) -> Iterator[str]:
    """Check that tiles have whole pairs of rotated features, those of TMA whole heads."""
    for rope in (p.rope for p in _projections(work) if p.rope is not None):
        if plan.family not in ROPE_FAMILIES:
            yield f"family is {plan.family!r}, heads are rotated by {', '.join(ROPE_FAMILIES)}"
        least = rope.head_dim if plan.family == "tma" else 2
        if plan.block_n % least:
            yield f"block_n is {plan.block_n}, rotated features come {least} at a time"


def _gemv_violations(plan: TilePlan, shape: MatmulShape) -> Iterator[str]:
    if plan.block_m != 1:
        yield f"block_m is {plan.block_m}, family 'gemv' takes 1 row"
    elements = plan.block_n * plan.block_k * shape.parts // (32 * max(plan.num_warps, 1))
    if elements > MAX_ACCUMULATORS:
        yield f"a thread holds {elements} weights, at most {MAX_ACCUMULATORS} fit its registers"
    if plan.split_k != 1:
        yield f"split_k is {plan.split_k}, family 'gemv' reduces in 1 part"


def _tile_violations(
    plan: TilePlan, shape: MatmulShape, work: NormMatmul | GatedFFN, dev: DeviceSpec
) -> Iterator[str]:
    for name in ("block_m", "block_n", "block_k"):
        if getattr(plan, name) < 16:
            yield f"{name} is {getattr(plan, name)}, tensor cores need 16"
    used, most = smem_bytes(plan, shape), dev.smem_per_block_bytes
    if used > most:
        yield f"needs {used} B of shared memory, the {dev.label} has {most} B per block"
    sums = _accumulators(plan, shape)
    if sums > MAX_ACCUMULATORS:
        yield f"a thread has {sums} accumulators, at most {MAX_ACCUMULATORS} fit its registers"
    if plan.split_k > ceil_div(shape.k, plan.block_k):
        yield f"split_k is {plan.split_k}, k has {ceil_div(shape.k, plan.block_k)} blocks"
    if plan.family == "tma":
        yield from _tma_violations(plan, work, dev)


def _tma_violations(plan: TilePlan, work: NormMatmul | GatedFFN, dev: DeviceSpec) -> Iterator[str]:
    if dev.arch < TMA_CAPABILITY:
        yield f"family 'tma' needs {TMA_CAPABILITY}, the {dev.label} is {dev.arch}"
    if plan.split_k != 1:
        yield f"split_k is {plan.split_k}, family 'tma' reduces in 1 part"
    if plan.block_m < 64:
        yield f"block_m is {plan.block_m}, family 'tma' needs 64"
    heavy = any(set(p.epilogue) & {"gelu", "residual"} for p in _projections(work))
    if heavy and plan.block_n > 128:
        yield f"block_n is {plan.block_n}, with a residual or gelu more than 128 spill registers"
    rows = [("k", work.k)] + [("n", p.n) for p in _projections(work) if p.layout == "kn"]
    for name, size in rows:
        if size % 8:
            yield f"{name} is {size}, rows of a tensor map must be multiples of 8 elements"


def _projections(work: NormMatmul | GatedFFN) -> tuple[Projection, ...]:
    if isinstance(work, GatedFFN):
        return (Projection(work.n, work.layout),)
    return work.outputs


def predict(work: NormMatmul | GatedFFN, plan: TilePlan, dev: DeviceSpec, rows: int) -> Prediction:
    """Return what the launches of `plan` cost at `rows` rows."""
    shape = matmul_shape(work, pairs=False)
    bandwidth = dev.dram_bytes_per_s * DRAM_EFFICIENCY
    side = rows * (shape.x_row_bytes + shape.out_row_bytes + shape.side_row_bytes)
    moved = shape.weight_bytes + side
    # One launch for each projection; they follow one another without a gap
    seconds = dev.launch_s + FILL_S + (len(shape.n_parts) - 1) * WAVE_S
    terms: dict[Bound, float] = {"launch": seconds}
    waves = 0
    for n in shape.n_parts:
        times, more = _matmul(shape, plan, dev, (rows, n))
        for bound, time in times.items():
            terms[bound] = terms.get(bound, 0.0) + time
        waves += more
        exposed = OVERLAP * min(times["dram"], times["compute"])
        seconds += max(times.values()) + exposed + (more - 1) * WAVE_S
    if plan.split_k > 1:
        parts_bytes = 8 * plan.split_k * shape.parts * rows * shape.n
        seconds += len(shape.n_parts) * REDUCE_S + parts_bytes / dev.l2_bytes_per_s
    if work.norm is not None:
        if norm_inside(work, plan):
            seconds += NORM_INSIDE_S_PER_ROW * rows if plan.family == "pointer" else 0.0
        else:
            seconds += NORM_S + 2 * rows * shape.k * shape.in_bytes / bandwidth
    seconds += side / bandwidth
    return Prediction(seconds, moved, shape.flops(rows), waves, largest(terms))


def _matmul(
    shape: MatmulShape, plan: TilePlan, dev: DeviceSpec, size: tuple[int, int]
) -> tuple[dict[Bound, float], int]:
    """Return the times by bound, and the waves, of one projection at (rows, columns)."""
    rows, n = size
    bandwidth = dev.dram_bytes_per_s * DRAM_EFFICIENCY
    weight_bytes = n * shape.parts * shape.k * shape.in_bytes
    if plan.family == "gemv":
        padding = ceil_div(shape.k, plan.block_k) * plan.block_k / shape.k
        return {"dram": weight_bytes * padding * rows / bandwidth, "compute": 0.0}, 1
    tiles = ceil_div(rows, plan.block_m) * ceil_div(n, plan.block_n) * plan.split_k
    slots = dev.sm_count * _resident(plan, shape, dev)
    stage = stage_bytes(plan, shape)
    in_flight = min(tiles, slots) * stage * max(1, plan.num_stages - 1)
    memory = weight_bytes / min(bandwidth, in_flight / LATENCY_S)
    # Every tile reads its rows and columns again, mostly from L2
    read = tiles * ceil_div(shape.k, plan.block_k * plan.split_k) * stage
    l2 = read / (L2_SHARING[plan.family] * dev.l2_bytes_per_s)
    efficiency = TENSOR_EFFICIENCY[plan.family]
    if plan.block_n * shape.parts < 128:
        efficiency *= NARROW_EFFICIENCY
    if plan.family == "tma" and plan.block_m < 128:
        efficiency *= LOW_EFFICIENCY
    per_sm = dev.tensor_flops_per_s(shape.dtype) / dev.sm_count * efficiency
    tile_flops = 2.0 * plan.block_m * plan.block_n * shape.parts * shape.k / plan.split_k
    compute = ceil_div(tiles, dev.sm_count) * tile_flops / per_sm
    return {"dram": memory, "l2": l2, "compute": compute}, ceil_div(tiles, slots)


def _resident(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> int:
    """Return how many thread blocks a multiprocessor holds at once."""
    if plan.family == "tma":
        return 1
    threads = 32 * plan.num_warps
    registers = _accumulators(plan, shape) + ACCUMULATOR_OVERHEAD
    by_smem = dev.smem_per_sm_bytes // max(1, smem_bytes(plan, shape))
    by_registers = dev.registers_per_sm // (registers * threads)
    return max(1, min(by_smem, by_registers, dev.max_threads_per_sm // threads))
