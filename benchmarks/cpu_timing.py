"""What this CPU can do at most, measured; and threads that stay where they are put."""

from __future__ import annotations

import os

import numpy as np
import tvm
from tvm import s_tir, te
from tvm.runtime import tensor

from relax_fusion import host_target
from relax_fusion.hardware.target import device_of

ACCUMULATORS = 12
"""Vectors that are multiplied and added in turn: more than latency times throughput asks for."""

STEPS = 200_000
READ_BYTES = 512 << 20
"""More than any cache of the machine holds."""


def pin_threads() -> None:
    """Keep the calling thread on the first core and the others, in order, on the rest.

    A scheduler that packs threads onto few cores for some milliseconds would else decide the times.
    """
    cores = sorted(os.sched_getaffinity(0))
    threads = sorted(int(t) for t in os.listdir("/proc/self/task"))
    others = [t for t in threads if t != os.getpid() and len(os.sched_getaffinity(t)) > 1]
    for position, thread in enumerate(others):
        os.sched_setaffinity(thread, {cores[1:][position % max(len(cores) - 1, 1)]})
    os.sched_setaffinity(0, {cores[0]})


def peak_gflops(cores: int) -> float:
    """Return the rate of vector multiply-adds of all cores."""
    lanes = device_of(host_target()).vector_bytes // 4
    factor = te.placeholder((ACCUMULATORS, lanes), "float32", "factor")
    x = te.placeholder((cores, 16, lanes), "float32", "x")
    r = te.reduce_axis((0, STEPS), "r")
    total = te.compute(
        (cores, ACCUMULATORS, lanes),
        lambda c, a, i: te.sum(x(c, r % 16, i) * factor(a, i), axis=r),
        "total",
    )
    return 2e-9 * cores * ACCUMULATORS * lanes * STEPS / _seconds(factor, x, total)


def read_gbytes_per_s(cores: int) -> float:
    """Return the rate at which all cores together read memory."""
    lanes = device_of(host_target()).vector_bytes // 4
    rows = READ_BYTES // 4 // cores // (8 * lanes)
    x = te.placeholder((cores, rows, 8, lanes), "float32", "x")
    r = te.reduce_axis((0, rows), "r")
    total = te.compute((cores, 8, lanes), lambda c, a, i: te.sum(x(c, r, a, i), axis=r), "total")
    return 1e-9 * READ_BYTES / _seconds(x, total)


def _seconds(*tensors: te.Tensor) -> float:
    """Time sums ``[cores, vectors, lanes]``, the last of `tensors`, on all cores."""
    sch = s_tir.Schedule(te.create_prim_func(list(tensors)))
    block = sch.get_sblock("total")
    core, vector, lane, step = sch.get_loops(block)
    sch.reorder(core, step, vector, lane)
    sch.parallel(core)
    sch.unroll(vector)
    sch.vectorize(lane)
    sch.decompose_reduction(block, step)
    args = [tensor(np.ones([int(d) for d in t.shape], np.float32)) for t in tensors]
    library = tvm.compile(sch.mod, target=host_target()).jit()
    library["main"](*args)
    return min(library.time_evaluator("main", tvm.cpu(), number=1, repeat=15)(*args).results)
