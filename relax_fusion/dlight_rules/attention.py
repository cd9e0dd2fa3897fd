"""Schedules of attention by scalar instructions, on CPUs and GPUs."""

from __future__ import annotations

from math import gcd

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target

from ..compute import attention_prim_func
from ..compute.attention_scores import DOTS
from ..compute.attention_tile import WARP
from ..errors import LoweringError
from ..estimator.tile_plan import TilePlan
from ..hardware.target import device_of, is_gpu
from ..tvm_ir import SBlockRV
from ..workload import Attention
from .verbs import block_names, vectorise_inner

REGISTER_TILES = (
    *("acc_init", "scores_init", "scores_dot", "scores_store"),
    *("values_init", "values_dot", "values_store", "store"),
)
"""Blocks whose last two loops run over a register tile."""

VECTORS = ("q_load", "max_init", "max_lanes", "sum_init", "sum_lanes", "exp")
"""Blocks whose last loop runs over neighbouring elements."""

SOMETIMES = ("k_load", "shared_load", "v_load", "mask", "mask_edge")
"""Blocks whose last loop runs over neighbouring elements, and which not every function for a CPU
has."""

FOLDS = tuple(f"{name}_fold{1 << level}" for name in ("max", "sum", "scores") for level in range(8))
"""Blocks that halve partial results, each over neighbouring elements, as often as they can be
halved."""

SPREAD = (
    *("q_load", "row_init", "k_load", "scores", "row_max", "exp"),
    *("row_sum", "row_keep", "v_load", "row_end"),
)
"""Blocks whose iterations the threads of a GPU thread block take in turn."""

OWNED = ("acc_init", "values", "store")
"""Blocks over (slot, thread, ...): what a thread keeps to itself."""

SHARED = ("q_load", "k_load", "exp", "row_init", "row_max", "row_sum")
"""Blocks that write, between them, all scratch that the threads of a block share."""


def emit(work: Attention, plan: TilePlan, target: Target) -> tirx.PrimFunc:
    """Return the kernel of a plan for scalar instructions.

    rewrite (CPU)::

        for b, h, t in T.grid(...):      ->    for bht in T.parallel(...):
            tile                                   tile, inner loops vectorised by `lanes`

    rewrite (GPU)::

        for b, h, t in T.grid(...):      ->    for h, (b, t) in blockIdx.y, x:
            tile                                   tile, each block spread over threadIdx.x;
                                                   scratch shared, results in registers
    """
    sch = s_tir.Schedule(attention_prim_func(work, plan), enable_check=False)
    if is_gpu(target):
        _schedule_gpu(sch, plan, device_of(target).max_threads_per_block)
    else:
        _schedule_cpu(sch, plan)
    return sch.mod["main"]


def _schedule_cpu(sch: s_tir.Schedule, plan: TilePlan) -> None:
    """Run the tiles in parallel, and what is inside of them on vectors."""
    if plan.num_warps:
        raise LoweringError(f"attention: a plan of {plan.num_warps} warps was given to a CPU")
    sch.parallel(fuse_all(sch, sch.get_sblock("tile")))
    there = block_names(sch.mod["main"])
    optional = [name for name in (*SOMETIMES, *FOLDS) if name in there]
    for name in (*VECTORS, *optional):
        loop = sch.get_loops(sch.get_sblock(name))[-1]
        vectorise_inner(sch, loop, gcd(int(sch.get(loop).extent), plan.lanes))
    for name in (*REGISTER_TILES, *(name for name in DOTS[1:] if name in there)):
        register_tile(sch, sch.get_sblock(name), plan.lanes)


def _schedule_gpu(sch: s_tir.Schedule, plan: TilePlan, limit: int) -> None:
    """Make a thread block of each tile, with its scratch in shared memory."""
    threads = plan.num_warps * WARP
    if not 0 < threads <= limit:
        raise LoweringError(
            f"attention: a plan of {plan.num_warps} warps of {WARP} threads was given to a GPU, "
            f"which runs 1 to {limit} threads in a block"
        )
    block_per_tile(sch, sch.get_sblock("tile"))
    for name in SHARED:
        set_scope(sch, sch.get_sblock(name), "shared")
    for name in SPREAD:
        spread_over_threads(sch, sch.get_sblock(name), threads)
    for name in OWNED:
        bind_owners(sch, sch.get_sblock(name))
    set_scope(sch, sch.get_sblock("acc_init"), "local")
    skew_rows(sch, sch.get_sblock("exp"))
    for name in REGISTER_TILES:
        register_tile(sch, sch.get_sblock(name), lanes=1)


# --- steps -----------------------------------------------------------------------------------
#
# The blocks of an online softmax read what they write, key block after key block, so none of them
# is a complete or a reduction block in TVM's sense; the rule therefore schedules with
# `enable_check` off, and each step keeps to loops whose iterations are independent by construction.


def fuse_all(sch: s_tir.Schedule, block: SBlockRV) -> LoopRV:
    """Make one loop of all loops around `block` in its scope.

    rewrite::

        for i, j in T.grid(a, b):        ->    for ij in range(a * b):
            block(i, j)                            block(ij // b, ij % b)
    """
    loops = sch.get_loops(block)
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def register_tile(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> None:
    """Unroll the rows and the vectors of a register tile, so that it lives in registers.

    rewrite::

        for ..., ii in range(4):         ->    for ...:
            for ji in range(32):                   for ii in T.unroll(4):
                block                                  for j0 in T.unroll(2):
                                                           for j1 in T.vectorized(16):
                                                               block
    """
    rows, columns = sch.get_loops(block)[-2:]
    width = gcd(int(sch.get(columns).extent), lanes)
    outer, inner = sch.split(columns, [None, width])
    sch.unroll(rows)
    sch.unroll(outer)
    if width > 1:
        sch.vectorize(inner)


def spread_over_threads(sch: s_tir.Schedule, block: SBlockRV, threads: int) -> None:
    """Deal the iterations around `block` out to the threads of a thread block, in turn.

    Neighbouring threads get neighbouring elements of the innermost axis.

    rewrite::

        for i, j in T.grid(a, b):        ->    for e in range(ceil(a * b / threads)):
            block(i, j)                            for tx in T.thread_binding("threadIdx.x"):
                                                       block, where e * threads + tx < a * b
    """
    _, thread = sch.split(fuse_all(sch, block), [None, threads])
    sch.bind(thread, "threadIdx.x")


def block_per_tile(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Give each tile a thread block.

    Heads have a grid dimension of their own, as taking an index of dynamic extents apart costs a
    division.  Batches do not: the second and third dimension of a grid end at 65535, and WebGPU
    leaves no third one to kernels.

    rewrite::

        for b, h, t in T.grid(...):      ->    for h in T.thread_binding("blockIdx.y"):
            tile                                   for bt in T.thread_binding("blockIdx.x"):
                                                       tile
    """
    batch, head, tile = sch.get_loops(block)
    sch.reorder(head, batch, tile)
    sch.bind(head, "blockIdx.y")
    sch.bind(sch.fuse(batch, tile), "blockIdx.x")


def bind_owners(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Let each thread run the iterations of its own, known at compile time one by one.

    rewrite::

        for slot, thread in T.grid(...): ->    for slot in T.unroll(...):
            block                                  for thread in T.thread_binding("threadIdx.x"):
                                                       block
    """
    slot, thread = sch.get_loops(block)[:2]
    sch.unroll(slot)
    sch.bind(thread, "threadIdx.x")


def set_scope(sch: s_tir.Schedule, block: SBlockRV, scope: str) -> None:
    """Put everything that `block` writes into the memory `scope`.

    rewrite::

        a = T.sblock_alloc_buffer(...)   ->    a = T.sblock_alloc_buffer(..., scope="shared")
    """
    for index in range(len(sch.get(block).writes)):
        sch.set_scope(block, index, scope)


def skew_rows(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Lengthen each row of what `block` writes by one element.

    Threads that walk down neighbouring rows then meet different banks of shared memory.

    rewrite::

        a = alloc((16, 32))              ->    a = alloc((16, 32), strides=(33, 1))
    """
    row = int(sch.get(block).writes[0].source.ty.shape[-1])
    sch.storage_align(block, 0, axis=-2, factor=row, offset=1)
