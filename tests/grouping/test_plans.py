"""Which operators become one kernel, and the numbers of those."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm

from relax_fusion import Report, make_target
from relax_fusion.options import make_options
from relax_fusion.pipeline import phase4_schedule, relax_fusion_pipeline
from relax_fusion.report.tables import joined_table

from ..support.grouped import function, kernels, lowered
from ..support.quick import machine, quick_host, quickly

X, ROWS = 'x: R.Tensor((6, 64), "float32")', 'y: R.Tensor((6, 64), "float32")'
TABLE = 'w: R.Tensor((9, 64), "float32"), i: R.Tensor((6,), "int64")'
IMAGES = 'x: R.Tensor((1, 16, 8, 8), "float32"), b: R.Tensor((1, 16, 4, 4), "float32")'
CASES = {
    "elements": (X, "y = R.exp(R.nn.silu(R.add(x, x)))", 1),
    "a diamond": (X, "a = R.exp(x); y = R.add(R.sin(a), R.multiply(a, R.cos(a)))", 1),
    "parts": (X, "s = R.split(R.exp(x), 2, axis=1); y = R.multiply(s[1], R.nn.silu(s[0]))", 1),
    "an item that is given": (f"p: R.Tuple({X[3:]}, {X[3:]})", "y = R.exp(R.negative(p[1]))", 1),
    "in front of and behind a sum": (X, "y = R.sqrt(R.sum(R.multiply(x, R.exp(x)), axis=[1]))", 1),
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
    "a view in front of a sum": (X, "y = R.nn.softmax(R.reshape(x, (12, 32)))", 1),
    "a view behind a norm": (
        f'{X}, g: R.Tensor((64,), "float32"), y: R.Tensor((2, 3, 64), "float32")',
        "n = R.nn.silu(R.nn.rms_norm(x, g, axes=[-1])); v = R.reshape(n, (2, 3, 64)); "
        "z = R.multiply(R.add(y, R.multiply(v, g)), R.const(2.0))",
        1,
    ),
    "a view behind a softmax": (
        f'{X}, y: R.Tensor((3, 2, 8, 8), "float32")',
        "z = R.multiply(y, R.reshape(R.nn.softmax(x), (3, 2, 8, 8)))",
        1,
    ),
    "a view that meets columns": (
        f'{X}, y: R.Tensor((8, 8), "float32")',
        "z = R.multiply(R.reshape(R.nn.softmax(x), (6, 8, 8)), y)",
        2,
    ),
    "rows in front of a norm": (X, "y = R.nn.softmax(R.strided_slice(x, (0,), (1,), (5,)))", 1),
    "heads in front of a sum": (
        'x: R.Tensor((2, 3, 64), "float32")',
        "y = R.exp(R.max(R.permute_dims(x, [1, 0, 2]), axis=[2]))",
        1,
    ),
    "parts of rows": (X, "y = R.nn.softmax(R.strided_slice(x, (1,), (1,), (5,)))", 2),
    "a pool": (IMAGES, "y = R.add(R.nn.max_pool2d(x, (2, 2), (2, 2)), b)", 1),
    "columns": (X, "y = R.sqrt(R.sum(R.multiply(x, x), axis=[0]))", 1),
    "two sums": (X, "y = R.sum(R.exp(R.sum(x, axis=[1], keepdims=True)))", 2),
    "a sum that is spread": (X, "y = R.subtract(x, R.exp(R.sum(x, axis=[1], keepdims=True)))", 1),
    "rows by their sum": (
        X,
        "y = R.exp(R.divide(x, R.sqrt(R.sum(R.multiply(x, x), axis=[1], keepdims=True))))",
        1,
    ),
    "a softmax of operators": (
        X,
        "a = R.exp(R.subtract(x, R.max(x, axis=[1], keepdims=True))); "
        "y = R.divide(a, R.sum(a, axis=[1], keepdims=True))",
        2,
    ),
    "columns by their sum": (X, "y = R.divide(x, R.sum(x, axis=[0], keepdims=True))", 2),
    "other rows": (
        f'{X}, y: R.Tensor((6, 8), "float32")',
        "z = R.divide(y, R.sum(x, axis=[1], keepdims=True))",
        2,
    ),
    "columns of a matmul": (X, "y = R.matmul(R.exp(x), R.permute_dims(x))", 2),
    "two results": (X, "a = R.exp(x); y = (a, R.negative(a))", 2),
    "what is read twice": (X, "a = R.exp(x); y = R.matmul(R.negative(a), R.permute_dims(a))", 3),
}


@pytest.mark.parametrize("target", ["llvm", "h200"])
@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str, target: str) -> None:
    params, body, count = CASES[name]
    mod = function(params, body, "z" if "z =" in body else "y")
    ours, theirs = (kernels(lowered(mod, target, by_tvm)[0]) for by_tvm in (False, True))
    assert len(ours) == count <= len(theirs)


def exponentials(depth: int) -> tvm.IRModule:
    """Return the chain of apache/tvm 20342."""
    step = 'z = R.exp(R.subtract(x, R.multiply(z, R.const(0.5, "float16"))))'
    params = 'x: R.Tensor((4096, 1), "float16"), b: R.Tensor((4096, 4096), "float16")'
    body = "; ".join([step.replace("(z", "(x"), *[step] * (depth - 1), "y = R.add(b, z)"])
    return function(params, body)


@pytest.mark.parametrize("depth, target, count", [(1, "h200", 1), (8, "h200", 2), (8, "llvm", 1)])
def test_what_is_computed_again_has_a_price(depth: int, target: str, count: int) -> None:
    mod, report = lowered(exponentials(depth), target)
    assert len(kernels(mod)) == count
    left = [j for j in report.joined if not j.joined]
    assert len(left) == count - 1
    if left:
        assert left[0].names == ("tir_exp", "add") and left[0].times == 4096
        assert left[0].fused_s > left[0].apart_s
        assert re.search("one would take .* us: it computes tir_exp 4.1e.03 times", report.text())


def test_one_long_row_is_left_to_many_blocks_of_a_gpu() -> None:
    params, body = 'x: R.Tensor((1, 500000), "float32")', CASES["columns by their sum"][1]
    mod, report = lowered(function(params, body.replace("[0]", "[1]")), "h200")
    assert kernels(mod) == ["sum", "divide"]
    (left,) = report.joined
    assert left.fused_s > left.apart_s and left.times == 1


def test_the_report_tells_what_was_joined() -> None:
    _, report = lowered(exponentials(8))
    (joined,) = report.joined
    assert joined.joined and len(joined.names) == 25
    assert "multiply, subtract, tir_exp, 21 more, add" in joined_table([joined]).text()


RULES = {
    "a pool": "WindowRule",  # on a GPU, no block of threads for each element
    "a sum that is spread": "NormRule",
    "rows by their sum": "NormRule",
    **dict.fromkeys([n for n in CASES if n.endswith(("a norm", "a softmax", "a sum"))], "NormRule"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_sum_and_what_is_around_it_has_a_schedule(name: str) -> None:
    params, body, count = CASES[name]
    mod = function(params, body, "z" if "z =" in body else "y")
    for target in (quick_host(), make_target("h200")) if count == 1 else ():
        report = Report()
        with target:
            passes = phase4_schedule(make_options(target, {"report": report}))
            tvm.transform.Sequential(passes)(lowered(mod, target)[0])
        rules = [s.rule for s in report.schedules if not s.function.startswith("reshape")]
        assert rules == [RULES[name]]


def test_numbers() -> None:
    rng = np.random.default_rng(3)
    for name, (params, body, _) in CASES.items():
        mod = function(params, body, "z" if "z =" in body else "y")
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
