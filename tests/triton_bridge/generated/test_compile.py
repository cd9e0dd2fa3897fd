"""Generated kernels are ones for Triton's compiler, which refuses what its interpreter does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.judge.feasibility import source_of
from relax_fusion import make_target
from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.generated.memory import footprint
from relax_fusion.estimator.families.generated.plan import launches
from relax_fusion.hardware.nvidia import capability_of
from relax_fusion.hardware.target import device_of
from relax_fusion.launch.cache import KernelCache
from relax_fusion.tiling import Schedule
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.generated import KernelText, Means, kernel_text
from relax_fusion.triton_bridge.kernel import KernelOptions
from relax_fusion.workload import Chain
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.graph import Graph
from relax_fusion.workload.values import Axis, apply

from ...support.generated import draw_schedule, sizes_of
from ...support.slow import sampled
from ...support.strange_graphs import KINDS

FEW = KernelOptions(num_warps=4, num_stages=2)


def text_of(graph: Graph, schedule: Schedule, capability: int) -> KernelText:
    return kernel_text(graph, schedule, sizes_of(graph), Means(tensor_maps=capability >= 90))


BOTH = [(kind, sm) for kind in KINDS for sm in (80, 90) if (kind, sm) != ("floats", 80)]
"""Kinds of graphs by compute capability; sm_80 has no float8_e4m3fn."""


@pytest.mark.parametrize(("kind", "capability"), sampled(BOTH, 3))
def test_strange_graphs_compile(kind: str, capability: int, tmp_path: Path) -> None:
    sources = []
    for seed in range(2):
        choose = random.Random(seed)
        graph = KINDS[kind](choose)
        schedule = draw_schedule(graph, choose, (16, 32), sizes_of(graph))
        if schedule:
            kernel = text_of(graph, schedule, capability)
            sources.append(source_of(graph, kernel, capability, FEW))
    assert sources
    compile_kernels(sources, cache=KernelCache(tmp_path), jobs=1)


def normed_mlp(width: int, hidden: int) -> Graph:
    """Return ``x + relu(rms(x) @ W) @ V``."""
    g = GraphBuilder()
    m, k, h, n = Axis("m", 2048), Axis("k", width), Axis("h", hidden), Axis("n", width)
    x = g.input("x", (2048, width), "float16")
    w, v = (g.input(*t, "float16") for t in (("w", (width, hidden)), ("v", (hidden, width))))
    total = g.sum("total", (m,), (k,), x[m, k] * x[m, k])
    rows = g.map("rows", (m, k), x[m, k] * apply("rsqrt", total[m]), "float16")
    a = g.sum("a", (m, h), (k,), rows[m, k] * w[k, h])
    b = g.map("b", (m, h), apply("relu", a[m, h]), "float16")
    c = g.sum("c", (m, n), (h,), b[m, h] * v[h, n])
    g.output(g.map("y", (m, n), c[m, n] + x[m, n], "float16"))
    return g.graph()


@pytest.mark.parametrize("device", sampled(["rtx4090", "a100", "h200"]))
def test_no_kernel_has_more_shared_memory_than_was_counted(device: str, tmp_path: Path) -> None:
    """Of plans with the most of it; what a product is computed from is loaded ahead too."""
    work, dev = Chain(normed_mlp(768, 64)), device_of(make_target(device))
    offered = [p for p in candidates(work, dev, "triton") if not p.split]
    offered.sort(key=lambda plan: -footprint(launches(work.graph, plan)[0]).smem_bytes)
    for plan in offered[:3]:
        launched = launches(work.graph, plan)[0]
        options = KernelOptions(num_warps=plan.num_warps, num_stages=plan.num_stages)
        capability = capability_of(dev.arch)
        kernel = text_of(work.graph, launched.schedule, capability)
        source = source_of(work.graph, kernel, capability, options)
        (compiled,) = compile_kernels([source], cache=KernelCache(tmp_path), jobs=1)
        assert compiled.shared_bytes <= footprint(launched).smem_bytes, plan
