"""Which operators become one kernel, and the numbers of those."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from relax_fusion.pipeline import relax_fusion_pipeline

from ..support.grouped import function, kernels, lowered
from ..support.quick import machine, quick_host, quickly

X, ROWS = 'x: R.Tensor((6, 64), "float32")', 'y: R.Tensor((6, 64), "float32")'
TABLE = 'w: R.Tensor((9, 64), "float32"), i: R.Tensor((6,), "int64")'
CASES = {
    "elements": (X, "y = R.exp(R.nn.silu(R.add(x, x)))", 1),
    "a diamond": (X, "a = R.exp(x); y = R.add(R.sin(a), R.multiply(a, R.cos(a)))", 1),
    "parts": (X, "s = R.split(R.exp(x), 2, axis=1); y = R.multiply(s[1], R.nn.silu(s[0]))", 1),
    "an item that is given": (f"p: R.Tuple({X[3:]}, {X[3:]})", "y = R.exp(R.negative(p[1]))", 1),
    "in front of and behind a sum": (
        X,
        "y = R.sqrt(R.sum(R.multiply(x, R.exp(x)), axis=[1]))",
        1,
    ),
    "in front of a softmax": (
        f"{X}, {ROWS}",
        "y = R.nn.softmax(R.add(R.multiply(x, R.const(2.0)), y))",
        1,
    ),
    "embeddings": (
        TABLE,
        'y = R.multiply(R.take(w, R.astype(i, "int32"), axis=0), R.const(8.0))',
        1,
    ),
    "a view behind a sum": (X, "y = R.reshape(R.exp(R.matmul(x, R.permute_dims(x))), (4, 9))", 2),
    "two sums": (X, "y = R.sum(R.exp(R.sum(x, axis=[1], keepdims=True)))", 2),
    "a sum that is spread": (X, "y = R.subtract(x, R.exp(R.sum(x, axis=[1], keepdims=True)))", 2),
    "columns of a matmul": (X, "y = R.matmul(R.exp(x), R.permute_dims(x))", 2),
    "two results": (X, "a = R.exp(x); y = (a, R.negative(a))", 2),
    "what is read twice": (X, "a = R.exp(x); y = R.matmul(R.negative(a), R.permute_dims(a))", 3),
}


@pytest.mark.parametrize("target", ["llvm", "h200"])
@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str, target: str) -> None:
    params, body, count = CASES[name]
    ours = kernels(lowered(function(params, body), target)[0])
    theirs = kernels(lowered(function(params, body), target, by_tvm=True)[0])
    assert len(ours) == count <= len(theirs)


def test_numbers() -> None:
    rng = np.random.default_rng(3)
    for name, (params, body, _) in CASES.items():
        mod = function(params, body)
        given = [_values(rng, p.ty) for p in mod["main"].params]
        ours, theirs = (
            machine(quickly(mod, pipeline))["main"](*given)
            for pipeline in (relax_fusion_pipeline(quick_host()), "default")
        )
        for a, b in zip(_arrays(ours), _arrays(theirs), strict=True):
            np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=name)


def _values(rng: np.random.Generator, ty: tvm.ir.Type) -> Any:
    if isinstance(ty, tvm.ir.TupleType):
        return tuple(_values(rng, field) for field in ty.fields)
    shape = [int(d) for d in ty.shape.values]
    if str(ty.dtype) == "int64":
        return tvm.runtime.tensor(rng.integers(0, 9, shape))
    return tvm.runtime.tensor(rng.standard_normal(shape).astype("float32"))


def _arrays(result: Any) -> list[np.ndarray]:
    return [result.numpy()] if hasattr(result, "numpy") else [a.numpy() for a in result]
