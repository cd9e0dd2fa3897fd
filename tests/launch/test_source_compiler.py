"""Kernels in CUDA C++ that are compiled in threads, beside a pipeline: no NVRTC needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tvm

from relax_fusion.errors import KernelError
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.launch import cuda_source
from relax_fusion.launch.cache import KernelCache
from relax_fusion.launch.cuda_source import (
    CUDASource,
    SourceCompiler,
    compiler_of_pipeline,
    source_compiler,
)
from relax_fusion.launch.kernel import LaunchOptions
from relax_fusion.launch.nvrtc import Nvrtc
from relax_fusion.triton_bridge.emit import fused_of
from relax_fusion.triton_bridge.sources import CompileAhead

from ..cuda_kernels.cases import matmul, plan
from ..support.triton_modules import module_of
from ..triton_bridge.common import H200

NVRTC: Any = SimpleNamespace(version="0.0", includes=())
WAIT_S = 20


def source(name: str) -> CUDASource:
    return CUDASource(name, name, 90, (), (32, 1, 1), 0, LaunchOptions())


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[SourceCompiler]:
    with SourceCompiler(NVRTC, KernelCache(tmp_path)) as made:
        yield made


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> dict[str, threading.Event]:
    """Let each kernel wait until the event of its name is set; the one called bad is an error."""
    events: dict[str, threading.Event] = {}

    def wait(self: CUDASource, key: str, nvrtc: Nvrtc) -> Any:
        begins, goes_on = (
            events.setdefault(f"{self.entry}{end}", threading.Event()) for end in "+-"
        )
        begins.set()
        assert goes_on.wait(WAIT_S)
        if self.entry == "bad":
            raise KernelError("bad does not compile")
        return self.entry

    monkeypatch.setattr(CUDASource, "compile", wait)
    monkeypatch.setattr(KernelCache, "put", lambda *_: None)
    for name in ("a", "b", "c", "bad"):
        events |= {name + "+": threading.Event(), name + "-": threading.Event()}
    return events


def test_an_error_is_told_to_who_asks(compiler: SourceCompiler, begun: dict) -> None:
    begun["a-"].set()
    begun["bad-"].set()
    compiler.start([source("bad"), source("a"), source("a")])
    assert compiler.kernel(source("a")) == "a"
    with pytest.raises(KernelError, match="bad does not compile"):
        compiler.kernel(source("bad"))


def test_nothing_is_under_way_in_a_pause(
    compiler: SourceCompiler, begun: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        begun[name + "-"].set()
    compiler.start([source("a")])
    with compiler.paused():
        if begun["a+"].is_set():
            assert compiler._made[source("a")].done()  # it was waited for
        compiler.start([source("b"), source("c")])
        assert not begun["b+"].wait(0.2) and not begun["c+"].is_set()
    assert compiler.kernel(source("b")) == "b" and compiler.kernel(source("c")) == "c"


def test_a_pause_comes_before_what_waits(
    compiler: SourceCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CUDASource, "compile", lambda *_: time.sleep(0.01))
    monkeypatch.setattr(KernelCache, "put", lambda *_: None)
    compiler.start([source(f"n{i}") for i in range(100)])
    with compiler.paused():
        done = [future.done() for future in compiler._made.values()]
        time.sleep(0.05)
        assert [future.done() for future in compiler._made.values()] == done
        assert done.count(True) < 50


def test_no_thread_is_left_behind_an_error(begun: dict) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), source_compiler() as compiler:
        compiler._nvrtc = NVRTC
        compiler._jobs, compiler._pool._max_workers = 1, 1
        with source_compiler() as inner:
            assert inner is compiler
        compiler.start([source("a"), source("b")])
        assert begun["a+"].wait(WAIT_S)
        threading.Timer(0.1, begun["a-"].set).start()
        raise KeyboardInterrupt
    timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    for timer in timers:
        timer.join()
    assert set(threading.enumerate()) <= threads and not begun["b+"].is_set()
    assert compiler_of_pipeline() is None


def test_what_is_begun_ahead_is_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a function that is not the first to launch anything."""
    monkeypatch.setattr(cuda_source, "find_nvrtc", lambda: NVRTC)
    mod = module_of(matmul(), PlanTable.single(plan(16, 64)), outputs=1)
    assert CompileAhead(H200)(mod).same_as(mod)  # no pipeline runs
    started: list[CUDASource] = []
    monkeypatch.setattr(SourceCompiler, "start", lambda _, sources: started.extend(sources))
    with source_compiler():
        ahead = CompileAhead(H200)
        tvm.transform.Sequential([ahead, ahead])(mod)
        assert len(started) == 1
    (func,) = (f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    assert fused_of(func) is not None
    (text,) = (s.text for s in started)
    assert "constexpr int EARLY = 1;" in text
