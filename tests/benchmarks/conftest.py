"""A CPU in place of a GPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import tvm

from benchmarks import gpu_timing
from relax_fusion import make_target
from tests.support.quick import loaded, quick, quick_passes


class OnCpu:
    """A call and a sampler of `benchmarks.gpu_timing`, without a GPU."""

    def __init__(self, call=None) -> None:
        self.graph, self.why_no_graph, self.launch = None, "no GPU", call

    def checked_result(self) -> torch.Tensor:
        return gpu_timing.side_by_side(self.launch())

    def sample_ms(self, launches) -> dict[str, list[float]]:
        found = {}
        for name, launch in launches.items():
            began = time.perf_counter()
            launch()
            found[name] = [1e3 * (time.perf_counter() - began)] * 3
        return found


@pytest.fixture
def cpu_in_place_of_a_gpu(monkeypatch):
    """Benchmarks take the CPU for their GPU, and compile in one process."""
    from benchmarks import building

    compiler = tvm.compile

    def compiled(*args, **given):
        with quick_passes():
            return loaded(compiler(*args, **given))

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    speeds = {"copy_tb_s": 0.01, "read_tb_s": 0.01, "launch_us": 0.0, "empty_graph_us": 0.0}
    fake = SimpleNamespace(DEVICE="cpu", Call=OnCpu, Sampler=OnCpu, ceilings=lambda _: speeds)
    for name, value in vars(fake).items():
        monkeypatch.setattr(gpu_timing, name, value)
    monkeypatch.setattr(building, "fill_cache", lambda build, jobs: None)
    monkeypatch.setattr(building, "make_target", lambda name: quick(make_target(name)))
    monkeypatch.setattr(tvm, "compile", compiled)
