"""Norms, softmax and sums of rows, as TVM legalises them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, te

from relax_fusion import host_target, make_target
from relax_fusion.dlight_rules import NormRule
from relax_fusion.mlc.repairs import RunThreadsInTurn

from ..support.generic_cases import Input, check, compiled, fused, run

op = relax.op


@dataclass(frozen=True)
class Case:
    inputs: tuple[Input, ...]
    emit: Any
    steps: Any
    vectors: str = ""
    """What a vector load of a GPU looks like, where the row can be read in vectors."""


def rms(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(1e-5)) * g


def layer(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
    axes = tuple(range(-g.ndim, 0))
    centred = x - x.mean(axes, keepdims=True)
    variance = (centred * centred).mean(axes, keepdims=True)
    return centred / np.sqrt(variance + x.dtype.type(1e-5)) * g + b


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def beside(x: Any) -> Any:
    """A step that the last one reads, but the reductions do not."""
    return op.add(op.nn.silu(op.maximum(x, relax.const(-0.5))), op.nn.softmax(x))


def rms_norm(x: Any, g: Any) -> Any:
    return op.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)


def layer_norm(x: Any, g: Any, b: Any, axes: tuple[int, ...] = (-1,)) -> Any:
    return op.nn.layer_norm(x, g, b, axes=list(axes), epsilon=1e-5)


CASES = {
    "RMSNorm": Case((Input(("b", "s", 64)), Input((64,))), rms_norm, rms, "float4"),
    "RMSNorm in float16": Case(
        (Input((4, 96), "float16"), Input((96,), "float16")), rms_norm, rms, "half4"
    ),
    "RMSNorm of odd width": Case(
        (Input((4, 97), "bfloat16"), Input((97,), "bfloat16")), rms_norm, rms
    ),
    "RMSNorm of a sum, of one row": Case(
        (Input((1, 1, 64)), Input((1, 1, 64)), Input((64,))),
        lambda x, r, g: rms_norm(op.add(x, r), g),
        lambda x, r, g: rms(x + r, g),
        "float4",
    ),
    "RMSNorm of heads": Case(
        (Input(("s", 6, 128), "float16"), Input((128,), "float16")), rms_norm, rms, "half4"
    ),
    "LayerNorm": Case((Input((4, 5, 96)), Input((96,)), Input((96,))), layer_norm, layer, "float4"),
    "LayerNorm over two axes": Case(
        (Input((4, 5, 12)), Input((5, 12)), Input((5, 12))),
        lambda x, g, b: layer_norm(x, g, b, (-2, -1)),
        layer,
        "float4",
    ),
    "softmax": Case((Input((4, 5, 100)),), op.nn.softmax, softmax, "float4"),
    "softmax of symbolic sizes": Case((Input((4, "s", "t")),), op.nn.softmax, softmax),
    "softmax and another step": Case(
        (Input((40, 5, 64)),),
        beside,
        lambda x: np.maximum(x, -0.5) / (1 + np.exp(-np.maximum(x, -0.5))) + softmax(x),
        "float4",
    ),
    "sums of rows": Case(
        (Input((4, 5, 100)),), lambda x: op.sum(x, axis=-1), lambda x: x.sum(-1), "float4"
    ),
    "maxima of rows": Case((Input((4, 5, 7)),), lambda x: op.max(x, axis=-1), lambda x: x.max(-1)),
    "maxima of symbolic rows": Case(
        (Input(("s", 4, "t")),), lambda x: op.max(x, axis=-1), lambda x: x.max(-1)
    ),
    "variances": Case(
        (Input((4, 64)),), lambda x: op.variance(x, axis=[-1]), lambda x: x.var(-1), "float4"
    ),
}


def test_one_number_in_bfloat16() -> None:
    """TVM 0.27 makes 0 of ``x - x``, and stores no vector of it."""

    def nothing(x: Any, g: Any) -> Any:
        norm = rms_norm(x, g)
        return op.subtract(norm, norm)

    func = fused((Input((4, 64), "bfloat16"), Input((64,), "bfloat16")), nothing)
    _, got = run(NormRule().apply(func, host_target(), False).mod["main"], host_target(), func)
    assert not got.astype("float32").any()


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    case = CASES[name]
    func = fused(case.inputs, case.emit)
    schedule = NormRule().attempt(func, host_target())
    assert isinstance(schedule, s_tir.Schedule)
    assert "T.parallel" in schedule.mod.script()
    arrays, got = run(schedule.mod["main"], host_target(), func)
    check(got, case.steps, arrays)


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_on_a_gpu(name: str) -> None:
    case = CASES[name]
    func = fused(case.inputs, case.emit)
    found = NormRule().attempt(func, make_target("h200"))
    if name == "softmax of symbolic sizes":
        assert "known when compiling" in found.detail
        return
    kernel = found.mod["main"]
    by_turns = RunThreadsInTurn()(tvm.IRModule({"main": kernel}))["main"]
    arrays, got = run(by_turns, host_target(), func)
    check(got, case.steps, arrays)
    source = compiled(kernel, make_target("h200")).mod.imports[0].inspect_source()
    assert source.count("__global__") == 2  # declared, then defined
    assert "__shfl_down_sync" in source
    assert case.vectors in source


def test_warps_share_a_block() -> None:
    """Where a warp is enough for a row, and rows are proved to come in groups."""
    case = CASES["RMSNorm of heads"]
    kernel = NormRule().attempt(fused(case.inputs, case.emit), make_target("h200")).mod["main"]
    source = compiled(kernel, make_target("h200")).mod.imports[0].inspect_source()
    assert "__launch_bounds__(64)" in source
    assert "__shared__" not in source and "__syncthreads" not in source


LEFT = {
    "another axis": (((8, 5, 6),), lambda x: op.nn.softmax(x, axis=1)),
    "columns": (((8, 5),), lambda x: op.sum(x, axis=0)),
    "a matmul": (((8, 5), (5, 3)), op.matmul),
    "a pool": (((1, 3, 8, 8),), lambda x: op.nn.max_pool2d(x, (2, 2))),
    "element-wise": (((8, 5),), op.nn.relu),
    "groups": (((2, 8, 5, 6), (8,), (8,)), lambda x, g, b: op.nn.group_norm(x, g, b, 2, 1, [2, 3])),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_leaves(name: str, target: str) -> None:
    shapes, emit = LEFT[name]
    func = fused([Input(s) for s in shapes], emit)
    assert NormRule().attempt(func, make_target(target)) is None


@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_leaves_several_results(target: str) -> None:
    """A result that nothing reads would be computed for all rows in each."""
    x = te.placeholder((8, 64), "float32")
    k = te.reduce_axis((0, 64), name="k")
    total = te.compute((8,), lambda i: te.sum(x[i, k], axis=k))
    more, less = (
        te.compute((8, 64), lambda i, j: x[i, j] + total[i]),
        te.compute((8, 64), lambda i, j: x[i, j] - total[i]),
    )
    found = NormRule().attempt(te.create_prim_func([x, more, less]), make_target(target))
    assert found.detail == "it has several results"
