"""TVM's threads: one for each processor that the process may use."""

from __future__ import annotations

import os
import threading

import tvm_ffi

from ..errors import TargetError
from ..hardware.target import usable_cores
from ..validation import shown

_ONE_EACH, _SHARED = -2, -3
"""Whether each thread has a processor of its own, or all have all: TVM's ``AffinityMode``."""

_MOST = 4096
"""A pool has at most this many threads; making one with millions takes the machine."""

_DONE = threading.local()


def use_all_cores() -> None:
    """Give the calling thread a pool of TVM's that has a thread for each usable processor.

    By itself TVM takes half of the machine's, taking them for pairs of hyper-threads, from number 0
    on, whichever the process may use.  The variables ``TVM_NUM_THREADS`` and ``OMP_NUM_THREADS``
    are obeyed instead where they are set, and a pool that the thread has used already stays as it
    is: TVM makes one for each thread that calls, and it cannot grow.

    Raises `TargetError` if ``TVM_NUM_THREADS`` is no number of threads.
    """
    if getattr(_DONE, "made", False):
        return
    stated = os.environ.get("TVM_NUM_THREADS", "1")
    if not (stated.isdecimal() and len(stated) < 9 and 1 <= int(stated) <= _MOST):
        raise TargetError(f"TVM_NUM_THREADS is {shown(stated)}, must be from 1 to {_MOST}")
    _DONE.made = True
    if "TVM_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in os.environ:
        return
    count = usable_cores()
    os.environ["TVM_NUM_THREADS"] = str(count)  # read once, when the pool is made
    try:
        made = thread_count()
    finally:
        del os.environ["TVM_NUM_THREADS"]
    if made == count:
        use_threads(count)


def thread_count() -> int:
    """Return the threads of TVM's pool that the calling thread's kernels run in."""
    return int(tvm_ffi.get_global_func("runtime.NumThreads")())


def use_threads(count: int) -> None:
    """Have kernels that the calling thread starts run in `count` threads, at most its pool's."""
    processors = sorted(os.sched_getaffinity(0))
    mode = _ONE_EACH if count == len(processors) else _SHARED
    configure = tvm_ffi.get_global_func("runtime.config_threadpool")
    configure(mode, count, [str(number) for number in processors])
