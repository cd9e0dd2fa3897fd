"""GroupNorm: its legalisation, and the schedule of its kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import tvm
from tvm import ir, relax, tirx

import relax_fusion
from relax_fusion import make_target
from relax_fusion.dlight_rules import NormRule
from relax_fusion.mend.legalize import LEGALIZE_MAP

from ..support.generic_cases import compiled


@dataclass(frozen=True)
class Case:
    shape: tuple[int | str, ...]
    groups: int
    channel_axis: int = 1
    dtype: str = "float32"
    shift: float = 0.0
    scale: bool = True
    activated: bool = False


CASES = {
    "images": Case((2, 8, 4, 6), 2),
    "symbolic sizes": Case(("b", 8, "s", 6), 4, activated=True),
    "float16": Case((2, 8, 16), 2, dtype="float16", activated=True),
    "channels last": Case((2, 3, 5, 16), 2, channel_axis=3),
    "one group": Case((2, 6, 5), 1),
    "a group for each channel": Case((2, 6, 5), 6),
    "far from zero": Case((2, 8, 32), 2, shift=1000.0),
    "without gamma and beta": Case((2, 8, 5), 2, scale=False),
}
SIZES = {"b": 3, "s": 5}


def module(case: Case) -> ir.IRModule:
    """Return ``main(x, gamma, beta)``."""
    symbols = {name: tirx.Var(name, "int64") for name in SIZES}
    rank, axis = len(case.shape), case.channel_axis
    shape, width = [symbols.get(d, d) for d in case.shape], (case.shape[axis],)
    types = (relax.TensorType(s, case.dtype) for s in (shape, width, width))
    params = [relax.Var(n, ty) for n, ty in zip(("x", "gamma", "beta"), types, strict=True)]
    axes = [a for a in range(1, rank) if a != axis]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            y = relax.op.nn.group_norm(
                *params, case.groups, axis, axes, 1e-5, case.scale, case.scale
            )
            y = builder.emit_output(relax.op.nn.silu(y) if case.activated else y)
        builder.emit_func_output(y)
    return builder.get()


def by_torch(case: Case, arrays: list[torch.Tensor]) -> np.ndarray:
    """Return the result in float64."""
    x, gamma, beta = (a.double() for a in arrays)
    given = (gamma, beta) if case.scale else ()
    moved = x.movedim(case.channel_axis, 1)
    y = torch.nn.functional.group_norm(moved, case.groups, *given).movedim(1, case.channel_axis)
    return (torch.nn.functional.silu(y) if case.activated else y).numpy()


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    case, report = CASES[name], relax_fusion.Report()
    target = make_target("llvm")
    pipeline = relax.get_pipeline("relax_fusion", target=target, report=report)
    vm = relax.VirtualMachine(tvm.compile(module(case), target, relax_pipeline=pipeline), tvm.cpu())
    assert [s.rule for s in report.schedules] == ["NormRule"]
    torch.manual_seed(0)
    shape, dtype = [SIZES.get(d, d) for d in case.shape], getattr(torch, case.dtype)
    sizes = (shape, *[(case.shape[case.channel_axis],)] * 2)
    arrays = [(torch.randn(size) + case.shift * (size is shape)).to(dtype) for size in sizes]
    got = torch.from_dlpack(vm["main"](*map(tvm.runtime.from_dlpack, arrays))).double().numpy()
    step = torch.finfo(dtype).eps
    allowed = (4 + 2 * case.shift) * step
    np.testing.assert_allclose(got, by_torch(case, arrays), rtol=allowed, atol=allowed)


@pytest.mark.parametrize("name", [n for n in CASES if n != "symbolic sizes"])
def test_one_kernel_on_a_gpu(name: str) -> None:
    target = make_target("h200")
    mod = relax.transform.LegalizeOps(LEGALIZE_MAP)(module(CASES[name]))
    (func,) = (f for g, f in mod.functions_items() if g.name_hint == "group_norm")
    kernel = NormRule().attempt(func, target).mod["main"]
    source = compiled(kernel, target).mod.imports[0].inspect_source()
    assert source.count("__global__") == 2  # declared, then defined
