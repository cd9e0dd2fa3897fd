"""Plans that a library measures at the first call, on a GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tvm
from tvm import ir, relax
from tvm.relax.frontend import nn

from relax_fusion.estimator import Choice, choose
from relax_fusion.estimator.embedded import Embedded, embedded
from relax_fusion.estimator.tile_plan import Box, PlanTable, TilePlan
from relax_fusion.hardware.target import device_of
from relax_fusion.transforms.cuda_graph import RUN_OR_CAPTURE
from relax_fusion.triton_bridge import EmbedTritonKernels, EmitTritonKernels
from relax_fusion.workload import DynamicDim, NormMatmul, Projection

from ..support.contraction_cases import RMS, Case
from ..support.gpu import gpu_target, needs_gpu
from ..support.triton_modules import module_of, with_candidates

pytestmark = [pytest.mark.gpu, needs_gpu]

ROWS, WIDTH, LAYERS = 2048, 4096, 3
SLOW = TilePlan(16, 64, 64, num_stages=2, num_warps=4, backend="triton", family="pointer")
FAST = TilePlan(128, 128, 64, num_stages=3, num_warps=8, backend="triton", family="pointer")


class Matmuls(nn.Module):
    """Matmuls one behind the other, so that there is something to record as a graph."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def main(self, x: nn.Tensor) -> nn.Tensor:
        for linear in self.layers:
            x = linear(x)
        return x


def matmuls() -> ir.IRModule:
    module = Matmuls()
    module.to("float16")
    return module.export_tvm(spec={"main": {"x": nn.spec.Tensor([ROWS, WIDTH], "float16")}})[0]


def compiled(
    monkeypatch: pytest.MonkeyPatch, plans: tuple[TilePlan, ...], graphs: bool
) -> relax.VMExecutable:
    """Compile with one plan, or have the library measure several."""
    target = gpu_target()
    options = {"use_cuda_graph": graphs, "backend": "triton", "always_fuse": True}
    if len(plans) == 1:
        options["plans"] = {"FuseMatmulEpilogue": PlanTable.single(plans[0])}
    else:
        found = (Embedded(Box(), plans),)
        monkeypatch.setattr("relax_fusion.passes.driver.embedded", lambda *_: found)
        options["autotune"] = True
    disable = ("FuseChains", "FuseMatmulChain")
    pipeline = relax.get_pipeline("relax_fusion", target=target, disable=disable, **options)
    built = tvm.compile(matmuls(), target, relax_pipeline=pipeline)
    assert (RUN_OR_CAPTURE in built.as_text()) == graphs
    return built


def results_and_seconds(built: relax.VMExecutable) -> tuple[list[np.ndarray], float]:
    """Return the results of the first call and of a later one, and the least time of a call."""
    dev, rng = tvm.cuda(0), np.random.default_rng(0)
    shapes = [(ROWS, WIDTH), *[(WIDTH, WIDTH)] * LAYERS]
    given = [(rng.standard_normal(shape) / 64).astype("float16") for shape in shapes]
    args = [tvm.runtime.tensor(array, dev) for array in given]
    main = relax.VirtualMachine(built, dev)["main"]
    results, times = [main(*args).numpy()], []
    for _ in range(10):
        dev.sync()
        began = time.perf_counter()
        out = main(*args)
        dev.sync()
        times.append(time.perf_counter() - began)
    return [*results, out.numpy()], min(times)


@pytest.mark.parametrize("graphs", [False, True], ids=["no graph", "graph"])
def test_the_fastest_plan_is_found_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """The slow plan comes first, so it would be taken where nothing was measured."""
    (right, _), slow = results_and_seconds(compiled(monkeypatch, (SLOW,), graphs))
    (same, _), fast = results_and_seconds(compiled(monkeypatch, (FAST,), graphs))
    found, seconds = results_and_seconds(compiled(monkeypatch, (SLOW, FAST), graphs))
    assert fast * 2 < slow, "the two plans should differ much, or this test says nothing"
    assert seconds < (slow * fast) ** 0.5, f"{seconds:.1e} s; {slow:.1e} or {fast:.1e} by one plan"
    for result in found:
        np.testing.assert_array_equal(result, same)
    np.testing.assert_allclose(right.astype("float32"), same.astype("float32"), atol=1e-2)


STEPS = Projection(256, "nk", ("bias", "residual"))
WORK = NormMatmul(DynamicDim("rows"), 256, (STEPS,), RMS, "float16", "float16")


def test_results_are_right_while_measuring_and_behind_it() -> None:
    target = gpu_target()
    choice = choose(WORK, device_of(target), backend="triton", always=True)
    assert isinstance(choice, Choice)
    found = embedded(WORK, device_of(target), "triton", choice.plans)
    assert max(len(each.plans) for each in found) == 4
    mod = with_candidates(module_of(WORK, choice.plans, outputs=1), found)
    built = tvm.compile(EmbedTritonKernels()(EmitTritonKernels(target)(mod)), target)
    dev = tvm.cuda(0)
    main = relax.VirtualMachine(built, dev)["main"]
    for rows in sorted({1, *(each.box.rows or 999 for each in found)}):
        case = Case(f"rows {rows}", WORK, rows)
        arrays = case.inputs()
        args = [tvm.runtime.tensor(array, dev) for array in arrays.values()]
        for _ in range(3):
            case.check(arrays, [main(*args).numpy()], stored=True)
