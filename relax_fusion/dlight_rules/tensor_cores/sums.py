"""The sums of a lane when the products are done, and those of a cluster of blocks added up.

With ``split_k`` above 1, as many thread blocks have the same tile, and each a part of the
reduction.  They are a cluster: each leaves its sums in its own shared memory, all of them add up a
part of the tile each, straight from one another's, and go on with the epilogue of that part.  What
is added in which order does not depend on time, and no memory outside of the chip is used.
(PTX ISA: "Cooperative Thread Arrays and Clusters", ``mapa``, ``barrier.cluster``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from tvm import tirx

from ...estimator.families.tensor_cores.tiles import SUM_BYTES
from ...tvm_ir import T
from .fragments import local, ptx
from .mma_kernel import MmaKernel
from .tile import int32

WIDEST = 4
"""One load or store moves at most this many sums."""


@dataclass(frozen=True)
class Run:
    """Sums of a lane, for each part, whose columns are neighbours; the first is named."""

    row: tirx.Expr
    column: tirx.Expr
    sums: Sequence[Sequence[tirx.Expr]]


def own_sums(kernel: MmaKernel) -> list[list[Run]]:
    """Return all sums of a lane, row by row."""
    return [
        [
            _run(kernel, line, index, _of_lane(kernel, line, index))
            for index in range(_runs_of_row(kernel))
        ]
        for line in range(_lines(kernel))
    ]


def cluster_sums(kernel: MmaKernel) -> list[list[Run]]:
    """Emit the addition over a cluster; return the runs of a lane that are this block's share.

    The caller ends with `leave_cluster`.
    """
    split, width = kernel.tile.plan.split_k, gcd(kernel.tile.run, WIDEST)
    runs = _lines(kernel) * _runs_of_row(kernel)
    vectors = kernel.tile.parts * kernel.tile.run // width  # of a run
    _leave(kernel, width)
    share = runs // split
    total = local("total", share * vectors * width, kernel.types.registers)
    other = local("other", width, kernel.types.registers)
    near, far = local("near", 1, "uint32"), local("far", 1, "uint32")
    T.buffer_store(near, _place(kernel, kernel.rank * int32(share * vectors), width), [0])
    for peer in range(split):
        T.evaluate(ptx["mapa.shared::cluster.u32"](far[0], near[0], tirx.const(peer, "uint32")))
        for vector in range(share * vectors):
            step = vector * kernel.tile.threads * width * SUM_BYTES
            into = [
                (other if peer else total)[vector * width * (not peer) + e] for e in range(width)
            ]
            T.evaluate(ptx[f"ld.shared::cluster.v{width}.b32"](*into, ptx.addr(far[0], step)))
            for e in range(width if peer else 0):
                at = vector * width + e
                T.buffer_store(total, total[at] + other[e], [at])
    T.evaluate(ptx["barrier.cluster.arrive.release.aligned"]())
    return [[_shared_run(kernel, total, share, index)] for index in range(share)]


def leave_cluster() -> None:
    """Wait until no other block reads this one's shared memory any more."""
    T.evaluate(ptx["barrier.cluster.wait.acquire"]())


def _leave(kernel: MmaKernel, width: int) -> None:
    """Store the sums in shared memory, run after run, for the others to see."""
    T.evaluate(tirx.op.tvm_storage_sync("shared.dyn"))  # the operands are done with
    address = local("address", 1, "uint32")
    T.buffer_store(address, _place(kernel, int32(0), width), [0])
    position = 0
    for line in range(_lines(kernel)):
        for index in range(_runs_of_row(kernel)):
            for sums in _of_lane(kernel, line, index):
                for first in range(0, len(sums), width):
                    step = position * kernel.tile.threads * width * SUM_BYTES
                    to = ptx.addr(address[0], step)
                    values = [s.astype(kernel.types.registers) for s in sums[first : first + width]]
                    T.evaluate(ptx[f"st.shared.v{width}.b32"](to, *values))
                    position += 1
    T.evaluate(ptx["barrier.cluster.arrive.release.aligned"]())
    T.evaluate(ptx["barrier.cluster.wait.acquire.aligned"]())


def _place(kernel: MmaKernel, vector: tirx.Expr, width: int) -> tirx.Expr:
    """Return where this thread has a vector of sums: beside those of its neighbours."""
    offset = (vector * int32(kernel.tile.threads) + kernel.thread) * int32(width * SUM_BYTES)
    return kernel.base[0] + offset.astype("uint32")


def _lines(kernel: MmaKernel) -> int:
    """Return the rows of a lane."""
    return 2 * kernel.tiles_m


def _runs_of_row(kernel: MmaKernel) -> int:
    return 2 * kernel.tiles_n // kernel.tile.run


def _of_lane(kernel: MmaKernel, line: int, index: int) -> list[list[tirx.Expr]]:
    """Return the sums of a run, by part."""
    positions = range(index * kernel.tile.run, (index + 1) * kernel.tile.run)
    return [[kernel.sum_at(part, line, p) for p in positions] for part in range(kernel.tile.parts)]


def _shared_run(kernel: MmaKernel, total: tirx.Var, share: int, index: int) -> Run:
    """Return one of the runs that this block added up."""
    number = kernel.rank * int32(share) + int32(index)
    of_row, size = int32(_runs_of_row(kernel)), kernel.tile.run
    first = index * kernel.tile.parts * size
    sums = [
        [total[first + part * size + i].astype(kernel.types.total) for i in range(size)]
        for part in range(kernel.tile.parts)
    ]
    return _run(kernel, number // of_row, number % of_row, sums)


def _run(
    kernel: MmaKernel,
    line: int | tirx.Expr,
    index: int | tirx.Expr,
    sums: Sequence[Sequence[tirx.Expr]],
) -> Run:
    """Return a run with its place: lanes with the same ``lane % 4`` have the same columns."""
    run = kernel.tile.run
    row = kernel.warp_row + kernel.lane // int32(4) + line * 8
    column = kernel.warp_column + index * (4 * run) + kernel.lane % int32(4) * int32(run)
    return Run(row, column, sums)
