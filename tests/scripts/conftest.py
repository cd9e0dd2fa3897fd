"""Makes the benchmarks' modules importable, as they are when a script is run; a CPU for a GPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tvm

from relax_fusion import make_target
from tests.quick import loaded, quick, quick_passes

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


class OnCpu:
    """A call and a sampler of `_gpu_timing`, without a GPU."""

    def __init__(self, call=None) -> None:
        self.graph, self.why_no_graph, self.launch = None, "no GPU", call

    def checked_result(self) -> torch.Tensor:
        out = self.launch()
        return out if isinstance(out, torch.Tensor) else torch.from_dlpack(out)

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
    import _gpu_timing
    import _relax_build

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
        monkeypatch.setattr(_gpu_timing, name, value)
    monkeypatch.setattr(_relax_build, "fill_cache", lambda build, jobs: [])
    monkeypatch.setattr(_relax_build, "make_target", lambda name: quick(make_target(name)))
    monkeypatch.setattr(tvm, "compile", compiled)
