"""Jobs in processes of their own: a crash of TVM is a result like any other."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass
class _Child:
    number: int
    process: ForkProcess
    pipe: Connection
    ends: float


def in_processes(
    work: Callable[[Job], Result], jobs: Sequence[Job], seconds: float, workers: int = 1
) -> Iterator[tuple[Job, Result | str]]:
    """Yield what `work` returns for each job, as they end; a sentence where it has no result.

    A job fails if it raises, if its process dies, or after `seconds`.
    """
    waiting = list(reversed(range(len(jobs))))
    running: dict[Connection, _Child] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            number = waiting.pop()
            child = _started(work, jobs[number], number, seconds)
            running[child.pipe] = child
        left = min(child.ends for child in running.values()) - time.monotonic()
        ended = wait(list(running), max(0.0, left))
        late = [pipe for pipe, child in running.items() if child.ends <= time.monotonic()]
        for pipe in ended or late:
            child = running.pop(pipe)
            yield jobs[child.number], _result(child, bool(ended))


def _started(work: Callable[[Job], Result], job: Job, number: int, seconds: float) -> _Child:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, job, theirs))
    process.start()
    theirs.close()
    return _Child(number, process, ours, time.monotonic() + seconds)


def _run(work: Callable[[Job], Result], job: Job, pipe: Connection) -> None:
    try:
        found: Result | str = work(job)
    except Exception as err:
        found = f"{type(err).__name__}: {err}"
    pipe.send(found)
    pipe.close()


def _result(child: _Child, ended: bool) -> Result | str:
    try:
        found = child.pipe.recv() if ended else "it took too long"
        child.process.join(1)
    except EOFError:
        child.process.join()
        found = f"the process ended with {child.process.exitcode}"
    if child.process.is_alive():
        child.process.kill()
        child.process.join()
    child.pipe.close()
    return found
