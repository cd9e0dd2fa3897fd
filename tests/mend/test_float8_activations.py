"""Activations of 8-bit floats: rounded by the kernel that makes them, scaled behind the matmul."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import ir, relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from relax_fusion import Report, make_target
from relax_fusion.estimator.tile_plan import PLAN_ATTR

from ..support.quick import machine, quickly

K, N = 64, 96
E4M3 = ml_dtypes.float8_e4m3fn


class Projection(nn.Module):
    """A matmul as MLC-LLM quantises it: one scale for x, and one for the weight."""

    def __init__(self) -> None:
        self.weight = nn.Parameter((N, K), "float8_e4m3fn")
        self.weight_scale = nn.Parameter((1,), "float32")
        self.x_scale = nn.Parameter((1,), "float32")

    def forward(self, x: Tensor) -> Tensor:
        rounded = (x / self.x_scale.astype("float16")).astype("float8_e4m3fn")
        y = op.matmul(rounded, op.permute_dims(self.weight), out_dtype="float32")
        return (y * (self.x_scale * self.weight_scale)).astype("float16")


class Normed(nn.Module):
    def __init__(self) -> None:
        self.norm = nn.RMSNorm(K, -1, 1e-5, bias=False, dtype="float16")
        self.projection = Projection()

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


class Activated(nn.Module):
    def __init__(self) -> None:
        self.projection = Projection()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = op.split(x, 2, axis=-1)
        return self.projection(op.silu(gate) * up)


WIDTHS = {Normed: K, Activated: 2 * K}
each = pytest.mark.parametrize("model", WIDTHS, ids=lambda m: m.__name__.lower())


def exported(model: type[nn.Module]) -> tuple[ir.IRModule, dict[str, tuple[list[int], str]]]:
    """Return the module, and shape and dtype of each parameter."""
    spec = {"forward": {"x": nn.spec.Tensor(["n", WIDTHS[model]], "float16")}}
    mod, params = model().export_tvm(spec)
    return mod, {name: ([int(d) for d in p.shape], p.dtype) for name, p in params}


@each
@pytest.mark.parametrize("name", ["h200", "llvm"])
def test_a_kernel_rounds_and_a_kernel_multiplies(model: type[nn.Module], name: str) -> None:
    report = Report()
    target = make_target("h200") if name == "h200" else tvm.target.Target("llvm")
    pipeline = relax.get_pipeline("relax_fusion", target=target, report=report)
    with target:
        made = pipeline(exported(model)[0])
    (launches,) = report.launches
    assert len(launches.kernels) == 2
    rounds, multiplies = (made[kernel] for kernel in launches.kernels)
    stored = "float16" if name == "h200" else "float8_e4m3fn"  # what tensor cores multiply
    assert str(rounds.params[-1].ty.dtype) == stored
    assert [str(p.ty.dtype) for p in multiplies.params[:2]] == [stored, "float8_e4m3fn"]
    assert str(multiplies.params[-1].ty.dtype) == "float16"
    families = {plan["family"] for plan in multiplies.attrs[PLAN_ATTR]}
    assert families == ({"few_rows", "mma"} if name == "h200" else {"cpu_tiles", "panels"})


@each
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_numbers(model: type[nn.Module], rows: int) -> None:
    check_numbers(model, rows, machine(quickly(exported(model)[0]))["forward"], tvm.cpu())


def check_numbers(
    model: type[nn.Module], rows: int, main: Callable[..., Any], device: tvm.runtime.Device
) -> None:
    """Compare a compiled model with float64."""
    _, params = exported(model)
    rng = np.random.default_rng(rows)
    x = (3 * rng.standard_normal((rows, WIDTHS[model]))).astype("float16")
    given = {
        name: rng.standard_normal(shape).astype("float32") for name, (shape, _) in params.items()
    }
    given = {name: np.abs(v) + 0.05 if v.shape == (1,) else v for name, v in given.items()}
    stored = {
        name: v.astype(E4M3 if "float8" in params[name][1] else params[name][1])
        for name, v in given.items()
    }
    tensors = [tvm.runtime.tensor(a, device) for a in (x, *stored.values())]
    found = main(*tensors).numpy().astype("float64")
    exact, steps = exact_and_allowed(model, x.astype("float64"), stored)
    # A row may be rounded to the other neighbour of 8 bits where it lies between them
    assert np.abs(found - exact).max() <= steps


def exact_and_allowed(
    model: type[nn.Module], x: np.ndarray, given: dict[str, np.ndarray]
) -> tuple[np.ndarray, float]:
    """Return the result, and how far one that rounds like it in other places may be from it."""
    scales = [float(given[f"projection.{name}"][0]) for name in ("x_scale", "weight_scale")]
    weight = given["projection.weight"].astype("float64")
    if model is Normed:
        wide = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        wide = wide * given["norm.weight"].astype("float64")
    else:
        gate, up = np.split(x, 2, axis=-1)
        wide = gate / (1 + np.exp(-gate)) * up
    quotient = wide.astype("float16") / given["projection.x_scale"].astype("float16")
    rounded = quotient.astype(E4M3).astype("float64")
    exact = rounded @ weight.T * scales[0] * scales[1]
    wide = quotient.astype("float64")
    # Exponential, sigmoid, SiLU, product and quotient are float16, each half a step of 2^-10 off
    near = [(wide * (1 + step)).astype(E4M3).astype("float64") for step in (-4e-3, 4e-3)]
    changed = np.maximum(*(np.abs(other - rounded) for other in near))
    steps = (changed @ np.abs(weight).T * scales[0] * scales[1]).max()
    return exact, steps + 1e-3 * np.abs(exact).max()
