"""`Workers`: started, given functions, and ended."""

from __future__ import annotations

import io
import itertools
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from types import FunctionType
from typing import Any, Literal

from ..errors import RelaxFusionError
from ..validation import plain, shown
from .collectives import Links, hang_up
from .worker import Answer, Seat, Worker, seat_threads

MOST_WORKERS = 64
"""More than any machine has GPUs: a typing error would fill it with processes."""

GRACE_S = 5.0
"""Where a worker says that it lost another one, that one's own words are waited for so long."""

_START = """import sys
sys.path[:] = {path!r}
from relax_fusion.parallel.worker import main
main({args!r})
"""

_SESSIONS = itertools.count(1)


class WorkerError(RelaxFusionError, RuntimeError):
    """A worker failed or ended, and all of them were ended; `worker` is its number.

    `trace` is the traceback there, empty where the process ended without one.
    """

    def __init__(self, text: str, worker: int, trace: str = "") -> None:
        super().__init__(text)
        self.worker, self.trace = worker, trace


class _Sent(pickle.Pickler):
    """Pickles what is sent to processes, which do not run the script that sends it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise WorkerError(
                f"{value.__qualname__} is defined in the script that runs, which workers that are "
                "processes do not import; define it in a module",
                -1,
            )
        return NotImplemented


class Workers:
    """Several workers that run the same functions, on CPUs or on a GPU each.

    Collectives in these functions, and in compiled code that they run, are between all workers. Use
    it as a context manager, or call `close`.  Workers are ended as well where one of them fails or
    dies, on Ctrl-C, and when the process that started them ends in whatever way.

    Parameters
    ----------
    count : int
        How many.
    device : str
        ``"cpu"``, or ``"cuda"``: worker i has GPU i, and NCCL is initialised.
    kind : str
        ``"processes"``, or ``"threads"`` of this process, on CPUs only: they start at once, and
        cannot be ended while they compute.
    own_all_reduce : bool
        All-reduces of 16-bit floats are kernels of this library where NVLink connects up to 8 GPUs.
        All others are NCCL's, as all are without this, and where CUDA shares no memory (a warning).

    Raises
    ------
    MissingPackageError
        If `device` is ``"cuda"`` and NCCL, its headers or a compiler are not installed.

    Examples
    --------
    >>> def rank(worker, factor):
    ...     return worker.rank * factor
    >>> with Workers(2, kind="threads") as workers:
    ...     workers.call(rank, 10)
    [0, 10]
    """

    def __init__(
        self,
        count: int,
        *,
        device: Literal["cpu", "cuda"] = "cpu",
        kind: Literal["processes", "threads"] = "processes",
        own_all_reduce: bool = True,
    ) -> None:
        self.count, self.device = _checked(count, device, kind), device
        library = None
        if device == "cuda":
            from .nccl import find_libraries, nccl_library

            find_libraries()  # what is missing is told before workers look for it
            library = nccl_library()
        pairs = [Pipe() for _ in range(self.count)]
        hub = [Pipe() for _ in range(self.count - 1)]
        links = [[pair[0] for pair in hub], *([pair[1]] for pair in hub)]
        seats = [
            Seat(Worker(i, self.count, device), pairs[i][1], Links(i, links[i]))
            for i in range(self.count)
        ]
        self._controls = [pair[0] for pair in pairs]
        self._ended = ""
        self._turn = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._session: list[Any] = []
        held = self._controls, [c for ends in hub for c in ends], self._processes, self._session
        self._end = weakref.finalize(self, _end, *held)
        try:
            if kind == "threads":
                self._session.append(seat_threads(next(_SESSIONS), seats))
            else:
                for seat in seats:
                    self._processes.append(_started(seat))
                for seat in seats:  # theirs alone, so that they end where the worker does
                    for connection in (seat.control, *seat.links.connections):
                        connection.close()
            if library is not None:
                self._connect(str(library), own_all_reduce)
        except BaseException:
            self.close()
            raise

    def _connect(self, library: str, own_all_reduce: bool) -> None:
        """Have GPUs find one another, and share memory for all-reduces."""
        from .all_reduce import MOST_WORKERS, join, share, use
        from .nccl import connect, unique_id

        self.call(connect, self.call(unique_id, library)[0])
        if own_all_reduce and 1 < self.count <= MOST_WORKERS:
            handles = self.call(share)
            if all(handles) and all(self.call(join, handles)):
                self.call(use)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a function on all workers; return what it returned, in order of their numbers.

        Threads of the caller take turns.

        Parameters
        ----------
        function : callable
            Of a module that workers can import; threads take those of the script, too.  It is
            called with the `Worker` and `args`.
        *args : Any
            What can be pickled.

        Raises
        ------
        WorkerError
            If it raises on a worker, or one ends; all workers are ended then.  If it is of the
            script that runs, and workers are processes.
        """
        sent = io.BytesIO()
        (_Sent if self._processes else pickle.Pickler)(sent).dump((function, args))
        with self._turn:
            return self._called(sent.getvalue())

    def _called(self, call: bytes) -> list[Any]:
        if self._ended:
            raise WorkerError(f"the workers have ended: {self._ended}", -1)
        try:
            for control in self._controls:
                with suppress(OSError):  # it has gone, which is told below
                    control.send_bytes(call)
            answers = self._answers()
        except BaseException as err:
            self.close(str(err) or type(err).__name__)
            raise
        return [answers[i].value for i in range(self.count)]

    def close(self, reason: str = "they were closed") -> None:
        """End all workers, whatever they do, and wait until they have gone."""
        self._ended = self._ended or reason
        self._end()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self) -> dict[int, Answer]:
        """Return the answer of each worker; raise for the one that went wrong by itself."""
        answers: dict[int, Answer] = {}
        lost: Answer | None = None
        until = None
        while len(answers) < self.count:
            left = [c for i, c in enumerate(self._controls) if i not in answers]
            ready = wait(left, None if until is None else max(0.0, until - time.monotonic()))
            for control in ready:
                rank = self._controls.index(control)  # type: ignore[arg-type]
                answer = self._answer(rank)
                if answer.error and answer.lost is None:
                    text = f"worker {rank} of {self.count} failed: {answer.error}"
                    raise WorkerError(text, rank, answer.trace)
                answers[rank] = answer
                lost = lost or (answer if answer.error else None)
            if lost is not None and until is None:
                until = time.monotonic() + GRACE_S
            elif not ready:
                break
        if lost is not None:
            assert lost.lost is not None
            raise WorkerError(f"worker {lost.lost} of {self.count} does not answer", lost.lost)
        return answers

    def _answer(self, rank: int) -> Answer:
        try:
            return pickle.loads(self._controls[rank].recv_bytes())
        except (EOFError, OSError) as err:
            raise WorkerError(self._death(rank), rank) from err

    def _death(self, rank: int) -> str:
        """Say how a worker ended."""
        text = f"worker {rank} of {self.count} ended"
        if not self._processes:
            return text
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        code = process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            text += f" by {name}"
            text += ", as when memory runs out" if name == "SIGKILL" else ""
        elif code is not None:
            text += f" with code {code}"
        return f"{text} (process {process.pid})"


def _checked(count: Any, device: Any, kind: Any) -> int:
    count = plain(count)
    if type(count) is not int or not 1 <= count <= MOST_WORKERS:
        raise WorkerError(f"count is {shown(count)}; must be from 1 to {MOST_WORKERS}", -1)
    for what, value, known in (
        ("device", device, ("cpu", "cuda")),
        ("kind", kind, ("processes", "threads")),
    ):
        if not isinstance(value, str) or value not in known:
            raise WorkerError(f"{what} is {shown(value)}; must be one of {', '.join(known)}", -1)
    if (device, kind) == ("cuda", "threads"):
        raise WorkerError('kind is "threads"; workers with GPUs must be processes', -1)
    return count


def _started(seat: Seat) -> subprocess.Popen[bytes]:
    """Start the process of a worker, which ends when its standard input does."""
    ends = [c.fileno() for c in (seat.control, *seat.links.connections)]
    worker = seat.worker
    args = [worker.device, *map(str, (worker.count, worker.rank, *ends))]
    return subprocess.Popen(
        [sys.executable, "-c", _START.format(path=sys.path, args=args)],
        stdin=subprocess.PIPE,
        stdout=2,  # what the caller prints may be read by a program
        pass_fds=ends,
        start_new_session=True,  # Ctrl-C is for the caller, who ends the workers
    )


def _end(
    controls: Sequence[Connection],
    hub: Sequence[Connection],
    processes: Sequence[subprocess.Popen[bytes]],
    session: list[Any],
) -> None:
    """End processes at once, and threads at their next word to anybody."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
    if not processes:
        hang_up([*controls, *hub])
    for made in session:
        made._sync_all()  # threads are joined by a destructor, which would not let them finish
    session.clear()
    for connection in (*controls, *hub):
        connection.close()
