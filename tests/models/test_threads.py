"""TVM's threads: as many as the process may use processors."""

from __future__ import annotations

import os
import threading

import pytest
import tvm_ffi

from relax_fusion.errors import TargetError
from relax_fusion.hardware import target
from relax_fusion.models import threads


def in_a_thread(monkeypatch: pytest.MonkeyPatch, **environment: str) -> int:
    """Return how many threads TVM has for a thread that has not called it yet."""
    for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found: list[int] = []

    def work() -> None:
        threads.use_all_cores()
        threads.use_all_cores()
        found.append(tvm_ffi.get_global_func("runtime.NumThreads")())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert dict(os.environ).items() >= environment.items()
    assert environment or "TVM_NUM_THREADS" not in os.environ
    return found[0]


@pytest.mark.parametrize("count", sorted({1, len(os.sched_getaffinity(0))}))
def test_every_usable_processor_has_a_thread(monkeypatch, count: int) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: count)
    assert in_a_thread(monkeypatch) == count


@pytest.mark.parametrize("name", ["TVM_NUM_THREADS", "OMP_NUM_THREADS"])
def test_the_environment_is_obeyed(monkeypatch, name: str) -> None:
    assert in_a_thread(monkeypatch, **{name: "1"}) == 1


@pytest.mark.parametrize(
    "text, count", [("max 100000", 4), ("150000 100000", 2), ("50000 100000", 1), ("", 4)]
)
def test_the_quota_of_a_container_is_obeyed(monkeypatch, text: str, count: int) -> None:
    monkeypatch.setattr(target.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(target.Path, "read_text", lambda *_, **__: text)
    assert target.usable_cores() == count


@pytest.mark.parametrize("value", ["0", "-1", "x", "", "4097", "99999999999"])
def test_numbers_of_threads_that_there_are_not(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_DONE", threading.local())
    monkeypatch.setenv("TVM_NUM_THREADS", value)
    with pytest.raises(TargetError, match=f"TVM_NUM_THREADS is '{value}', must be from 1 to"):
        threads.use_all_cores()
