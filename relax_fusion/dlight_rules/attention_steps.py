"""Scheduling verbs of the attention rule.

The blocks of an online softmax read what they write, key block after key block, so none of them is
a complete or a reduction block in TVM's sense; the rule therefore schedules with `enable_check`
off, and each verb keeps to loops whose iterations are independent by construction.
"""

from __future__ import annotations

from math import gcd

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV

from ..tvm_ir import SBlockRV


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
