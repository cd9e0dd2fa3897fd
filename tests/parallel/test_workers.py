"""Workers compute together, and end together, whatever happens to one of them."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from relax_fusion.parallel import WorkerError, Workers

from . import functions

REDUCTIONS = (np.add, np.multiply, np.minimum, np.maximum)


@pytest.fixture(scope="module")
def three() -> Iterator[Workers]:
    with Workers(3, kind="threads") as workers:
        yield workers


def alive(numbers: list[int]) -> list[int]:
    """Return which processes are there, after a while in which they may end."""
    end = time.monotonic() + 20
    left = numbers
    while left and time.monotonic() < end:
        left = [n for n in left if os.path.exists(f"/proc/{n}") and not _is_zombie(n)]
        time.sleep(0.05)
    return left


def _is_zombie(number: int) -> bool:
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_results_are_in_order_of_the_workers(three: Workers) -> None:
    assert three.call(functions.rank_times, 10) == [0, 10, 20]


def test_processes_do_not_get_what_the_script_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    with Workers(1) as workers:
        monkeypatch.setattr(functions.rank_times, "__module__", "__main__")
        with pytest.raises(WorkerError, match="rank_times is defined in the script that runs"):
            workers.call(functions.rank_times, 10)
        monkeypatch.undo()
        assert workers.call(functions.rank_times, 10) == [0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("kind", range(5))
def test_all_reduce(three: Workers, kind: int, dtype: str) -> None:
    parts = [functions.part(i, dtype).astype("float64") for i in range(3)]
    expected = sum(parts) / 3 if kind == 4 else REDUCTIONS[kind].reduce(parts)
    found = three.call(functions.collective, "allreduce", dtype, kind, True)
    assert len({each.tobytes() for each in found}) == 1
    got, rounded = found[0].astype("float64"), expected.astype(dtype).astype("float64")
    assert np.abs(got - (np.trunc(expected) if dtype == "int32" else rounded)).max() <= 1e-6


def test_all_gather_and_broadcast(three: Workers) -> None:
    parts = [functions.part(i, "float16") for i in range(3)]
    for found in three.call(functions.collective, "allgather", "float16", True):
        np.testing.assert_array_equal(found, np.concatenate(parts))
    for found in three.call(functions.collective, "broadcast_from_worker0", "float16", True):
        np.testing.assert_array_equal(found, parts[0])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_exception_names_its_worker(rank: int) -> None:
    workers = Workers(3, kind="threads")
    text = f"worker {rank} of 3 failed: ValueError: it is broken"
    with pytest.raises(WorkerError, match=f"^{text}$") as caught:
        workers.call(functions.fails_on, rank)
    assert caught.value.worker == rank and "fails_on" in caught.value.trace
    with pytest.raises(WorkerError, match=f"^the workers have ended: {text}$"):
        workers.call(functions.rank_times, 10)
    assert not [t for t in threading.enumerate() if "Dummy" in t.name and t.is_alive()]


def test_an_exception_that_says_nothing() -> None:
    with (
        Workers(1, kind="threads") as workers,
        pytest.raises(WorkerError, match=r"^worker 0 of 1 failed: Speechless: $"),
    ):
        workers.call(functions.fails_without_a_word)


def test_threads_of_the_caller_take_turns(three: Workers) -> None:
    def called(factor: int) -> list[list[int]]:
        return [three.call(functions.rank_times, factor) for _ in range(100)]

    with ThreadPoolExecutor(4) as pool:
        for factor, found in enumerate(pool.map(called, range(4))):
            assert found == [[0, factor, 2 * factor]] * 100


def test_processes_compute_the_same_and_end() -> None:
    with Workers(2) as workers:
        numbers = workers.call(functions.process_number)
        found = workers.call(functions.collective, "allreduce", "float32", 0, True)
        parts = [functions.part(i, "float32") for i in range(2)]
        np.testing.assert_array_equal(found[1], parts[0] + parts[1])
        assert len({os.getpid(), *numbers}) == 3
        with pytest.raises(WorkerError, match=r"^worker 0 of 2 ended with code 7 \(process \d+\)$"):
            workers.call(functions.exits_on, 0, 7)
        assert alive(numbers) == []


def kill_one(seed: int) -> None:
    """Kill a worker of three somewhere in its work, and look at what is said and left."""
    draw = random.Random(seed)
    victim, delay = draw.randrange(3), draw.uniform(0, 0.3)
    with Workers(3) as workers:
        numbers = workers.call(functions.process_number)
        timer = threading.Timer(delay, os.kill, (numbers[victim], signal.SIGKILL))
        timer.start()
        work = draw.choice([functions.reduce_for_ever, functions.sleep_for_ever])
        with pytest.raises(WorkerError, match=f"^worker {victim} of 3 ended by SIGKILL") as caught:
            workers.call(work)
        assert caught.value.worker == victim
        assert alive(numbers) == []
        timer.join()


def test_a_worker_that_is_killed_is_named() -> None:
    kill_one(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_workers_that_are_killed_at_random(seed: int) -> None:
    kill_one(seed)


@pytest.mark.parametrize(
    ("number", "work"), [(signal.SIGINT, "reduce"), (signal.SIGKILL, "sleep")], ids=["^C", "killed"]
)
def test_workers_end_with_their_caller(number: signal.Signals, work: str) -> None:
    code = f"from {functions.__name__} import call_for_ever; call_for_ever({work!r})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        numbers = list(map(int, process.stdout.readline().split()))
        assert len(numbers) == 2
        time.sleep(0.2)
        process.send_signal(number)
        process.wait(30)
    assert alive(numbers) == []


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Workers(0), "count is 0; must be from 1 to 64"),
        (lambda: Workers(65), "count is 65; must be from 1 to 64"),
        (lambda: Workers(2, device="rocm"), "device is 'rocm'; must be one of cpu, cuda"),
        (lambda: Workers(2, device=["cpu"]), "device is ['cpu']; must be one of cpu, cuda"),
        (lambda: Workers(2, kind="fibres"), "kind is 'fibres'; must be one of processes, threads"),
        (
            lambda: Workers(2, device="cuda", kind="threads"),
            'kind is "threads"; workers with GPUs must be processes',
        ),
    ],
)
def test_what_cannot_be_started(make: Callable[[], Workers], text: str) -> None:
    with pytest.raises(WorkerError, match=f"^{re.escape(text)}$"):
        make()
