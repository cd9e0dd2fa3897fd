"""What a worker does: it waits for functions, runs each, and answers how that ended."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

import tvm_ffi

from ..mend.disco_import import disco
from .collectives import Links, use_links

SERVE = "relax_fusion.parallel.serve"


@dataclass
class Worker:
    """One of several workers, as the functions see it that run there.

    Parameters
    ----------
    rank : int
        Its number, from 0 on.
    count : int
        How many there are.
    device : str
        ``"cpu"`` or ``"cuda"``, of which a worker has the one with its number.
    kept : dict
        What functions leave there for those that come after them.
    """

    rank: int
    count: int
    device: Literal["cpu", "cuda"]
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def tvm_device(self) -> Any:
        """The device as TVM's."""
        import tvm

        return tvm.runtime.device(self.device, self.rank if self.device == "cuda" else 0)


@dataclass(frozen=True)
class Answer:
    """How a function ended on a worker."""

    value: Any = None
    """What it returned."""
    error: str = ""
    """What it raised, in one line; empty where it returned."""
    trace: str = ""
    """The traceback."""
    lost: int | None = None
    """The worker that did not give its part of a collective, if that is what was raised: what went
    wrong is told by that worker then, or by its end."""


Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that is called with the `Worker` and arguments."""


@dataclass(frozen=True)
class Seat:
    """A worker and its connections: to who starts functions, and to the other workers."""

    worker: Worker
    control: Connection
    links: Links

    def serve(self) -> None:
        """Run functions until the connection ends; nothing is raised."""
        use_links(self.links)
        try:
            while True:
                self.control.send_bytes(self._answer(self.control.recv_bytes()))
        except (EOFError, OSError):
            pass
        finally:
            self.worker.kept.clear()
            use_links(None)

    def _answer(self, call: bytes) -> bytes:
        """Run one function; return its pickled `Answer`."""
        try:
            function, args = pickle.loads(call)
            return pickle.dumps(Answer(function(self.worker, *args)))
        except BaseException as err:  # an exception that leaves a worker of Disco ends the process
            text = f"{type(err).__name__}: {shown_first_line(err)}"
            return pickle.dumps(Answer(None, text, traceback.format_exc(), self.links.lost))


def shown_first_line(err: BaseException) -> str:
    """Return the first line of what an exception says, nothing of one that fails to say it."""
    try:
        return next(iter(str(err).strip().splitlines()), "")
    except Exception:  # of anybody's exception, which may say itself in any way
        return ""


_SEATS: dict[tuple[int, int], Seat] = {}
"""The seats that threads of Disco take, by session and rank."""


def seat_threads(session: int, seats: Sequence[Seat]) -> Any:
    """Start a session of Disco, in which each thread with the rank of a seat takes that.

    TVM's collectives ask which worker their thread is, so that functions have to run in Disco's.
    The exceptions that its own calls let through end the process, and a write to a worker that has
    gone does; so it gets one call, which lasts as long as the session.
    """
    count = seats[0].worker.count
    _SEATS.update({(session, seat.worker.rank): seat for seat in seats})
    made = disco().ThreadedSession(count)
    made.call_packed(made.get_global_func(SERVE), session)
    return made


@tvm_ffi.register_global_func(SERVE)
def _serve(session: int) -> None:
    rank = tvm_ffi.get_global_func("runtime.disco.worker_rank")()
    seat = _SEATS.pop((session, rank), None)
    if seat is not None:
        seat.serve()


def main(arguments: Sequence[str]) -> None:
    """Be a worker in a process of its own, until the standard input ends.

    `arguments`: the device, the number of workers, the worker's own, and the descriptors of its
    connections.
    """
    device, *numbers = arguments
    count, rank, control, *links = map(int, numbers)
    worker = Worker(rank, count, device)  # type: ignore[arg-type]
    seat = Seat(worker, Connection(control), Links(rank, [*map(Connection, links)]))
    _session = seat_threads(0, [seat])  # kept, for its destructor waits for its threads
    # Whoever started this process has the other end, which the system closes if that is killed.
    # A kernel or a collective that never ends is no reason to stay.
    sys.stdin.buffer.read()
    os._exit(0)
