"""Groups that meet in a number become one function on a CPU."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion import Report
from relax_fusion.pipeline import relax_fusion_pipeline

from ..support.grouped import function, kernels, lowered
from ..support.quick import machine, quick_host, quickly
from ..support.slow import sampled

X = 'x: R.Tensor((6, 64), "float32")'
RANGE = "a = R.max(x); b = R.min(x); s = R.subtract(a, b)"
CASES = {
    "a range": (X, f"{RANGE}; y = R.divide(x, s)", 1),
    "several results": (X, f"{RANGE}; y = (R.divide(x, s), R.exp(s), a)", 1),
    "another reads what is between": (
        f'{X}, w: R.Tensor((64, 8), "float32")',
        f"{RANGE}; u = R.divide(x, s); v = R.matmul(u, w); t = R.sum(v); y = R.multiply(v, t)",
        3,
    ),
    "a number by way of a matmul": (
        f'{X}, w: R.Tensor((6, 64), "float32")',
        "m = R.max(x); p = R.matmul(R.multiply(x, m), R.permute_dims(w)); "
        "y = R.multiply(R.sum(p), m)",
        3,
    ),
    "rows are no numbers": (X, "y = R.divide(x, R.sum(R.exp(x), axis=[0]))", 2),
    "sizes that are cast": (
        'x: R.Tensor(ndim=2, dtype="float32")',
        "n = T.int64(); c = R.match_cast(x, R.Tensor((n, 64), 'float32')); "
        "m = R.max(c); y = R.divide(c, m)",
        1,
    ),
    "items of a tuple": (X, "p = R.split(x, 2, axis=1); m = R.max(p[0]); y = R.divide(p[1], m)", 2),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str) -> None:
    params, body, count = CASES[name]
    mod = function(params, body)
    assert len(kernels(lowered(mod)[0])) == count
    rng = np.random.default_rng(4)
    shapes = [(6, 64), (64, 8) if "(64, 8)" in params else (6, 64)][: params.count("R.Tensor")]
    given = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    ours, theirs = (
        machine(quickly(mod, pipeline))["main"](*given)
        for pipeline in (relax_fusion_pipeline(quick_host()), "default")
    )
    several = name == "several results"
    for a, b in zip(ours if several else [ours], theirs if several else [theirs], strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), 1e-4, 1e-5)


def test_a_gpu_has_no_function_of_several_grids() -> None:
    params, body, _ = CASES["a range"]
    assert len(kernels(lowered(function(params, body), "h200")[0])) == 3
    assert len(kernels(lowered(function(params, body))[0])) == 1


def test_the_report_tells_what_meets() -> None:
    params, body, _ = CASES["several results"]
    (joined,) = lowered(function(params, body))[1].joined
    assert joined.names == ("max", "min", "subtract", "divide", "tir_exp")


def drawn(seed: int) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Return a function of numbers and tensors that read each other at random, and its inputs."""
    rng, op, builder = Random(seed), relax.op, relax.BlockBuilder()
    rows: Any = rng.choice([tvm.tirx.Var("n", "int64"), 1, 9])
    x = relax.Var("x", relax.TensorType([rows, 64], "float32"))
    w = relax.Var("w", relax.TensorType([64, 64], "float32"))
    tensors, numbers = [x], list[relax.Expr]()

    def number() -> relax.Expr:
        made = rng.choice([op.max, op.min, op.mean])(rng.choice(tensors))
        return op.multiply(builder.emit(made), relax.const(0.5))

    def tensor() -> relax.Expr:
        one = builder.emit(op.tanh(rng.choice(tensors)))
        return rng.choice([op.add, op.maximum])(one, rng.choice([*numbers, *tensors]))

    def product() -> relax.Expr:
        return op.multiply(op.matmul(rng.choice(tensors), w), relax.const(0.1))

    with builder.function("main", [x, w]):
        with builder.dataflow():
            for make in rng.choices([number, tensor, product], [4, 4, 1], k=10):
                (numbers if make is number else tensors).append(builder.emit(make()))
            results = rng.sample([*tensors[1:], *numbers], 3)
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)
    shapes = [(rows if isinstance(rows, int) else 9, 64), (64, 64)]
    return builder.get(), [np.float32(np.random.default_rng(seed).random(s)) for s in shapes]


@pytest.mark.parametrize("seed", sampled(range(60), 6))
def test_drawn(seed: int) -> None:
    mod, given = drawn(seed)
    report = Report()
    ours = machine(quickly(mod, relax_fusion_pipeline(quick_host(), report=report)))["main"]
    theirs = machine(quickly(mod))["main"]
    assert not report.left_out
    for a, b in zip(*(f(*map(tvm.runtime.tensor, given)) for f in (ours, theirs)), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), 1e-4, 1e-5)
