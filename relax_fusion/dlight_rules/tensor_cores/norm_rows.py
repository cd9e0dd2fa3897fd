"""The kernel that normalises rows in front of a matmul on tensor cores, with wide loads."""

from __future__ import annotations

from math import gcd

from tvm import s_tir

from ...estimator.limits import VECTOR_LOAD_BYTES
from ...tvm_ir import SBlockRV
from ...workload import DTYPE_BYTES
from .. import steps


def normalise_rows(sch: s_tir.Schedule, threads: int) -> None:
    """Give the norm of a contraction, with the addition in front of it, a kernel of its own.

    rewrite: ``for i: for j: sum``; ``for i: for r: square``; ``for i: for j: norm`` ->
    ``for i: bind block: for t: bind thread: sum, square, norm of every threads-th vector``

    A thread has the same elements in every step, so what it reads again it wrote itself.
    """
    names = steps.block_names(sch.mod["main"])
    stages = ("x_sum", "mean_sum", "square_sum", "x_norm")
    blocks = [sch.get_sblock(name) for name in stages if name in names]
    row = sch.get_loops(blocks[0])[0]
    steps.chain_rows(sch, blocks[1:], row)
    sch.bind(row, "blockIdx.x")
    for block in blocks:
        if sch.get(block).init is not None:
            sch.set_scope(block, 0, "shared")
        _spread(sch, block, threads)


def _spread(sch: s_tir.Schedule, block: SBlockRV, threads: int) -> None:
    """Spread the last loop of a block over the threads, a vector at a time."""
    found = sch.get(block)
    last = found.iter_vars[-1].var
    along = [i for i, r in enumerate(found.reads) if r.region[-1].min.same_as(last)]
    stores = found.init is None
    regions = [*(found.reads[i] for i in along), *(found.writes if stores else ())]
    widest = max(DTYPE_BYTES[str(region.source.ty.dtype)] for region in regions)
    lanes = gcd(int(found.iter_vars[-1].dom.extent), VECTOR_LOAD_BYTES // widest)
    turn, thread, lane = sch.split(sch.get_loops(block)[-1], [None, threads, lanes])
    sch.bind(thread, "threadIdx.x")
    steps.unroll_all(sch, [turn, lane])
    for index in along:
        steps.load_wide(sch, block, index, thread)
    if stores:
        steps.store_wide(sch, block, thread)
