"""Plans of the Triton back end for matmul workloads: which there are, and which fit.

Families, by the kernels of `relax_fusion.triton_bridge.kernels`:

``gemv``        one row: dot products, no tensor cores, any device
``pointer``     tiles on tensor cores, operands loaded through pointers; k may be split
``stream``      few rows on sm_90: tiles copied by the TMA unit, weights first; k may be split
``persistent``  many rows on sm_90: one program a multiprocessor, tiles copied by the TMA unit

`triton_cost` prices them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ....hardware import DeviceSpec
from ....hardware.instructions import MMA
from ....workload import ACTIVATIONS, GatedFFN, NormMatmul, Projection
from ...prediction import HALF_DTYPES, ceil_div
from ...shape import MatmulShape, matmul_shape
from ...tile_plan import TilePlan

FAMILIES = ("gemv", "pointer", "stream", "persistent")

HOPPER_FAMILIES = ("stream", "persistent")
"""Families that need warp-group matrix instructions, which only sm_90 has."""

NORM_INSIDE_ROWS, NORM_INSIDE_K = 16, 64
"""Pointer tiles in which a norm inside does not stall the loop: with 128 elements of k at once,
gamma is not copied ahead (measured: 35 us instead of 20)."""

GEMV_TILES = ((8192, 8), (2048, 8), (1024, 4), (512, 4), (256, 4))
"""Elements of k and warps of one row's tiles; with fewer elements, a lane loads less than 16 bytes
at a time."""

LEAST_ROWS = 16
"""Rows of the lowest tiles of tensor cores."""

STREAM_ROWS = (LEAST_ROWS, 32, 64, 128)
STREAM_TILES = (
    *((64, 128, stages, 1) for stages in (4, 5, 3, 2)),
    *((64, 64, stages, 1) for stages in (10, 6, 4)),
    *((64, block_k, stages, split) for block_k, stages in ((128, 4), (64, 6)) for split in (2, 4)),
)
"""Columns, elements of k, stages and parts of k of the streaming tiles."""

PERSISTENT_COLUMNS = {
    64: (64, 0),
    96: (64, 32),
    128: (128, 0),
    160: (128, 32),
    192: (128, 64),
    256: (128, 128),
}
"""Columns of a persistent tile, and of its two accumulators."""

MAX_ACCUMULATORS = 192
"""Accumulators of a thread beyond which its registers spill."""

STREAM_ACCUMULATORS = 64
"""The same for `stream`, whose threads get fewer registers."""

SMEM_RESERVE_BYTES = {"gemv": 0, "pointer": 4 << 10, "stream": 1 << 10, "persistent": 17 << 10}
"""Shared memory beside the stages: barriers and layout conversions."""


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


def accumulator_columns(plan: TilePlan, *, gated: bool, rotated: bool) -> tuple[int, int]:
    """Return the columns of the two accumulators of a Hopper kernel; of the second, maybe 0.

    `block_n` counts columns of the result: a gated kernel has an accumulator for each of two
    products, one that rotates heads has half of the columns in each.
    """
    if gated:
        return plan.block_n, plan.block_n
    if rotated:
        return plan.block_n // 2, plan.block_n // 2
    if plan.family == "persistent":
        return PERSISTENT_COLUMNS[plan.block_n]
    return plan.block_n, 0


def unsupported(work: NormMatmul | GatedFFN, dev: DeviceSpec) -> str | None:
    """Return why the Triton kernels cannot compute `work` on `dev`; None if they can."""
    if dev.kind == "cpu":
        return "backend is 'triton', a CPU has 'tir' only"
    if work.dtype not in HALF_DTYPES:
        return f"dtype is {work.dtype}, the Triton kernels take {' and '.join(HALF_DTYPES)}"
    if MMA[work.dtype] not in dev.capabilities.matrix_instructions:
        return f"the {dev.label} has no tensor cores for {work.dtype}"
    if isinstance(work, GatedFFN):
        return None
    if any(p.rope and set(p.epilogue) - {"bias"} for p in work.outputs):
        return "the kernels rotate a matmul with a bias, and with no other step before it"
    wrong = [p.epilogue for p in work.outputs if split_epilogue(p.epilogue) is None]
    return (
        f"the epilogue {', '.join(wrong[0])} has an order that the kernels lack" if wrong else None
    )


def candidates(work: NormMatmul | GatedFFN) -> Iterator[TilePlan]:
    """Yield plans, and among those that may cost the same, first the one that measured best."""
    if not isinstance(work.rows, int) or work.rows <= 2:
        for (block_k, warps), block_n in product(GEMV_TILES, (2, 1)):
            yield triton_plan("gemv", (1, block_n, block_k), warps, 1)
    for block_m, (block_n, block_k, stages, split) in product(STREAM_ROWS, STREAM_TILES):
        yield triton_plan("stream", (block_m, block_n, block_k), 4, stages, split)
    for block_n, stages in product(PERSISTENT_COLUMNS, (6, 5, 4)):
        yield triton_plan("persistent", (128, block_n, 64), 8, stages)
    for block_m, stages in product(STREAM_ROWS, (6, 8, 4)):
        for block_k, split in ((64, 1), (128, 1), (64, 4)):
            yield triton_plan("pointer", (block_m, 64, block_k), 4, stages, split)


def triton_plan(
    family: str, block: tuple[int, int, int], warps: int, stages: int, split: int = 1
) -> TilePlan:
    """Return a plan of the Triton back end; `block` is ``(block_m, block_n, block_k)``."""
    return TilePlan(
        *block,
        split_k=split,
        num_stages=stages,
        num_warps=warps,
        backend="triton",
        family=family,
    )


def smem_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the shared memory of one thread block: the stages of both operands, and the rest."""
    if plan.family == "gemv":
        return 0
    used = stage_bytes(plan, shape) * plan.num_stages + SMEM_RESERVE_BYTES[plan.family]
    # The tile on its way from accumulators to rows
    return used + 4 * plan.block_m * 64 if plan.family == "stream" else used


def stage_bytes(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the shared memory of both operands of one step along k."""
    columns = shape.parts * plan.block_n
    if plan.family == "stream":
        # A matrix instruction has 64 features, whether the tile has as many or not
        columns = 64 * (2 if shape.paired else 1)
    return (plan.block_m + columns) * plan.block_k * shape.in_bytes


def accumulators(plan: TilePlan, shape: MatmulShape) -> int:
    """Return the float32 accumulators of one thread."""
    if plan.family == "stream":
        return plan.block_m // 2 * (2 if shape.paired else 1)
    return ceil_div(plan.block_m * plan.block_n * shape.parts, 32 * max(plan.num_warps, 1))


def violations(plan: TilePlan, work: NormMatmul | GatedFFN, dev: DeviceSpec) -> Iterator[str]:
    """Yield why `plan` cannot run `work` on `dev`, one sentence each, with both numbers."""
    shape = matmul_shape(work, pairs=False)
    for name in ("block_m", "block_n", "block_k", "num_warps"):
        value = getattr(plan, name)
        if plan.family == "persistent" and name == "block_n":
            continue
        if value < 1 or value & (value - 1):
            yield f"{name} is {value}, triton needs a power of two"
    if plan.family == "gemv":
        yield from _gemv_violations(plan, shape)
    elif plan.family == "pointer":
        yield from _tile_violations(plan, shape, dev)
    else:
        yield from _hopper_violations(plan, shape, work, dev)
    if shape.rotated and plan.family not in HOPPER_FAMILIES and plan.block_n % 2:
        yield f"block_n is {plan.block_n}, rotated features come 2 at a time"


def _gemv_violations(plan: TilePlan, shape: MatmulShape) -> Iterator[str]:
    if plan.block_m != 1:
        yield f"block_m is {plan.block_m}, family 'gemv' takes 1 row"
    elements = plan.block_n * plan.block_k * shape.parts // (32 * max(plan.num_warps, 1))
    if elements > MAX_ACCUMULATORS:
        yield f"a thread holds {elements} weights, at most {MAX_ACCUMULATORS} fit its registers"
    if plan.split_k != 1:
        yield f"split_k is {plan.split_k}, family 'gemv' reduces in 1 part"


def _tile_violations(plan: TilePlan, shape: MatmulShape, dev: DeviceSpec) -> Iterator[str]:
    """Check what all tiles on tensor cores must meet."""
    for name in ("block_m", "block_n", "block_k"):
        if getattr(plan, name) < 16:
            yield f"{name} is {getattr(plan, name)}, tensor cores need 16"
    used, most = smem_bytes(plan, shape), dev.smem_per_block_bytes
    if used > most:
        yield f"needs {used} B of shared memory, the {dev.label} has {most} B per block"
    sums = accumulators(plan, shape)
    limit = STREAM_ACCUMULATORS if plan.family == "stream" else MAX_ACCUMULATORS
    if sums > limit:
        yield f"a thread has {sums} accumulators, at most {limit} fit its registers"
    if plan.split_k > ceil_div(shape.k, plan.block_k):
        yield f"split_k is {plan.split_k}, k has {ceil_div(shape.k, plan.block_k)} blocks"


def _hopper_violations(
    plan: TilePlan, shape: MatmulShape, work: NormMatmul | GatedFFN, dev: DeviceSpec
) -> Iterator[str]:
    """Check what the kernels for Hopper must meet."""
    if not (dev.capabilities.tma and dev.capabilities.warp_group_mma):
        yield f"family {plan.family!r} needs TMA and wgmma (sm_90), which the {dev.label} lacks"
    yield from _tile_violations(plan, shape, dev)
    sizes = [("k", work.k)] + [("n", p.n) for p in _projections(work) if p.layout == "kn"]
    for name, size in sizes:
        if size % 8:
            yield f"{name} is {size}, rows of a tensor map must be multiples of 8 elements"
    given = {"num_warps": 4}
    if plan.family == "persistent":
        given = {"num_warps": 8, "block_m": 128, "block_k": 64, "split_k": 1}
        allowed = (64, 128) if shape.parts == 2 else (128,) if shape.rotated else PERSISTENT_COLUMNS
        if plan.block_n not in allowed:
            text = ", ".join(map(str, allowed))
            yield f"block_n is {plan.block_n}, family 'persistent' has {text} for this"
            return
        both = any(
            "residual" in p.epilogue and set(p.epilogue) & set(ACTIVATIONS)
            for p in _projections(work)
        )
        if both and plan.block_n > 128:
            yield (
                f"block_n is {plan.block_n}, with an activation and a residual more than 128 spill "
                "registers"
            )
    for name, value in given.items():
        if getattr(plan, name) != value:
            yield f"{name} is {getattr(plan, name)}, family {plan.family!r} has {value}"
    yield from _copy_violations(plan, shape, work)


def _copy_violations(
    plan: TilePlan, shape: MatmulShape, work: NormMatmul | GatedFFN
) -> Iterator[str]:
    """Check the boxes in which weights are copied."""
    columns, _ = accumulator_columns(plan, gated=shape.parts == 2, rotated=shape.rotated)
    if plan.family == "stream":
        if columns > 64:
            yield f"block_n is {plan.block_n}, a matrix instruction has 64 features"
        if columns < 64 and plan.block_k != 64:
            yield f"block_k is {plan.block_k}, less than 64 features are copied 64 elements wide"
    narrow = columns % 64 != 0 or min(shape.contiguous) < columns
    if narrow and "kn" in shape.layouts:
        yield f"block_n is {plan.block_n}, of a weight [k, n] boxes have a multiple of 64 features"
    for rope in (p.rope for p in _projections(work) if p.rope is not None):
        if rope.half % columns and columns % rope.half:
            yield f"block_n is {plan.block_n}, {columns} pairs do not divide heads of {rope.half}"
        if rope.half % 8:
            yield f"head_dim is {rope.head_dim}, family {plan.family!r} needs a multiple of 16"


def _projections(work: NormMatmul | GatedFFN) -> tuple[Projection, ...]:
    if isinstance(work, GatedFFN):
        return (Projection(work.n, work.layout),)
    return work.outputs
