"""Generated kernels are ones for Triton's compiler, which refuses what its interpreter does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from relax_fusion.launch.cache import KernelCache
from relax_fusion.tiling import Schedule
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.generated import Means, function_of, kernel_text
from relax_fusion.triton_bridge.kernel import KernelOptions, KernelSource
from relax_fusion.triton_bridge.specialize import triton_dtype
from relax_fusion.workload.graph import Graph

from ...support.generated import draw_schedule, sizes_of
from ...support.strange_graphs import KINDS


def source_of(graph: Graph, schedule: Schedule, capability: int) -> KernelSource:
    means = Means(tensor_maps=capability >= 90)
    kernel = kernel_text(graph, schedule, sizes_of(graph), means)
    function, types = function_of(kernel), {}
    for name, parameter in zip(function.arg_names, kernel.operands, strict=False):
        dtype = triton_dtype(graph[parameter.tensor].dtype, name)
        types[name] = f"tensordesc<{dtype}{list(parameter.box)}>" if parameter.box else f"*{dtype}"
    aligned = frozenset(name for name, kind in types.items() if kind.startswith("*"))
    types |= {f"{name}_size": "i32" for name in kernel.sizes}
    options = KernelOptions(num_warps=4, num_stages=2)
    return KernelSource(function, types, {}, aligned, capability, options)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_strange_graphs_compile(kind: str, capability: int, tmp_path: Path) -> None:
    if kind == "floats" and capability == 80:
        pytest.skip("sm_80 has no float8_e4m3fn")
    sources = []
    for seed in range(2):
        choose = random.Random(seed)
        graph = KINDS[kind](choose)
        schedule = draw_schedule(graph, choose, (16, 32), sizes_of(graph))
        sources += [source_of(graph, schedule, capability)] if schedule else []
    assert sources
    compile_kernels(sources, cache=KernelCache(tmp_path), jobs=1)
