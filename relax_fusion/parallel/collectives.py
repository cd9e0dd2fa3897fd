"""Collectives between workers on CPUs, by NumPy.

``runtime.disco.allreduce`` and the others of Disco look their implementation up by the name of the
library that a worker has initialised, as ``runtime.disco.nccl.allreduce``.  A worker on a CPU has
initialised none, and its name is empty: what is registered here has the names of that case.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import cache, reduce
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import tvm_ffi

_KINDS: tuple[Callable[..., np.ndarray], ...] = (np.add, np.multiply, np.minimum, np.maximum)
"""By the numbers that ``relax.op.ccl.allreduce`` is legalised to; behind them, 4 is the mean."""

_MEAN = 4


class Links:
    """The connections over which a worker on a CPU exchanges arrays with all others.

    Worker 0 has one to each other worker, from worker 1 on; these have one, to worker 0.
    """

    def __init__(self, rank: int, connections: Sequence[Connection]) -> None:
        self.rank, self.connections = rank, tuple(connections)
        self.lost: int | None = None

    def gathered(self, part: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of all workers, of one shape and dtype, in order of their numbers.

        Raises `ConnectionError` if a worker has gone; `lost` is its number then.
        """
        sent = np.ascontiguousarray(part)
        if self.rank == 0:
            parts = [sent.tobytes(), *(self._from(i) for i in range(len(self.connections)))]
            everything = b"".join(parts)
            for i in range(len(self.connections)):
                self._to(i, everything)
        else:
            self._to(0, sent.tobytes())
            everything = self._from(0)
        flat = np.frombuffer(everything, part.dtype)
        return list(flat.reshape(-1, *part.shape)) if part.size else [sent]

    def _from(self, i: int) -> bytes:
        try:
            return self.connections[i].recv_bytes()
        except (EOFError, OSError) as err:
            raise self._gone(i) from err

    def _to(self, i: int, data: bytes) -> None:
        try:
            self.connections[i].send_bytes(data)
        except OSError as err:
            raise self._gone(i) from err

    def _gone(self, i: int) -> ConnectionError:
        self.lost = i + 1 if self.rank == 0 else 0
        return ConnectionError(f"worker {self.lost} ended before it gave its part of a collective")


def hang_up(connections: Sequence[Connection]) -> None:
    """End connections, so that whoever waits at one of their ends wakes up; they stay open."""
    for connection in connections:
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was closed, or the other end was
            continue


_HERE = threading.local()


def use_links(links: Links | None) -> None:
    """Have the collectives of the calling thread go over these connections."""
    _HERE.links = links
    register()


def _gathered(part: np.ndarray) -> list[np.ndarray]:
    return _HERE.links.gathered(part)


def reduced(parts: Sequence[np.ndarray], kind: int) -> np.ndarray:
    """Return what an all-reduce makes of the workers' arrays: in their order, and rounded once."""
    narrow = parts[0].dtype.itemsize < 4 and parts[0].dtype.kind not in "iu"
    wide = [part.astype("float32") if narrow else part for part in parts]
    total = reduce(_KINDS[0 if kind == _MEAN else kind], wide)
    mean = total / np.asarray(len(parts), total.dtype) if kind == _MEAN else total
    return mean.astype(parts[0].dtype)


def _allreduce(send: Any, kind: int, _in_group: bool, received: Any) -> None:
    received.copyfrom(reduced(_gathered(send.numpy()), kind))


def _allgather(send: Any, _in_group: bool, received: Any) -> None:
    parts = _gathered(send.numpy())
    received.copyfrom(np.stack(parts).reshape(received.shape))


def _broadcast(send: Any, _in_group: bool, received: Any) -> None:
    received.copyfrom(_gathered(send.numpy())[0])


@cache
def register() -> None:
    """Register the collectives that compiled code calls."""
    for name, function in (
        ("allreduce", _allreduce),
        ("allgather", _allgather),
        ("broadcast_from_worker0", _broadcast),
    ):
        tvm_ffi.register_global_func(f"runtime.disco..{name}", function)
