"""Matmuls of TVM's legaliser and FuseTIR, scheduled as ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, te, tirx
from tvm.s_tir import dlight as dl

from relax_fusion import host_target, make_target
from relax_fusion.dlight_rules import GenericMatmulRule
from relax_fusion.dlight_rules.generic_matmul.matmul import generic_matmul
from relax_fusion.dlight_rules.generic_matmul.plans import planned
from relax_fusion.errors import Decline, Reason
from relax_fusion.estimator.registry import table_of
from relax_fusion.estimator.tile_plan import PLAN_ATTR
from relax_fusion.hardware.target import device_of

from ..support.generic_cases import Input, Quantised, check, compiled, fused, run
from ..support.slow import sampled
from .compiled import kernels

op = relax.op


@dataclass(frozen=True)
class Case:
    inputs: tuple[Input, ...]
    rows_n_k: tuple[int | str, int, int]
    emit: Any = op.matmul
    steps: Any = np.matmul
    layout: str = "kn"
    batch: int = 0


def inputs(*shapes: tuple[int | str, ...], dtype: str = "float32") -> tuple[Input, ...]:
    return tuple(Input(shape, dtype) for shape in shapes)


def gelu(x: np.ndarray) -> np.ndarray:
    from math import erf

    return x * (0.5 + 0.5 * np.vectorize(erf)(x / np.sqrt(2)).astype(x.dtype))


def everything(x: Any, w: Any, bias: Any, residual: Any) -> Any:
    return op.add(op.nn.gelu(op.add(op.matmul(x, w), bias)), residual)


def widened(x: Any, w: Any) -> Any:
    return op.astype(op.matmul(op.astype(x, "float32"), op.astype(w, "float32")), "float16")


def scores(q: Any, k: Any) -> Any:
    return op.matmul(op.permute_dims(q, (0, 2, 1, 3)), op.permute_dims(k, (0, 2, 3, 1)))


CASES = {
    "rows of two dimensions": Case(inputs((4, 8, 64), (64, 48)), (32, 48, 64)),
    "float16": Case(inputs((33, 64), (64, 40), dtype="float16"), (33, 40, 64)),
    "bfloat16": Case(inputs((33, 64), (64, 40), dtype="bfloat16"), (33, 40, 64)),
    "float32 result": Case(
        inputs((3, 64), (64, 40), dtype="float16"),
        (3, 40, 64),
        lambda x, w: op.matmul(x, w, out_dtype="float32"),
    ),
    "casts": Case(inputs((3, 64), (64, 40), dtype="float16"), (3, 40, 64), widened),
    "symbolic rows and an epilogue": Case(
        inputs(("b", "s", 64), (64, 32), (32,), ("b", "s", 32)),
        ("b * s", 32, 64),
        everything,
        lambda x, w, bias, r: gelu(x @ w + bias) + r,
    ),
    "transposed w": Case(
        inputs((4, 8, 64), (48, 64)),
        (32, 48, 64),
        lambda x, w: op.matmul(x, op.permute_dims(w)),
        lambda x, w: x @ w.T,
        layout="nk",
    ),
    "transposed x": Case(
        inputs((64, 37), (64, 48)),
        (37, 48, 64),
        lambda x, w: op.matmul(op.permute_dims(x), w),
        lambda x, w: x.T @ w,
    ),
    "a batch": Case(inputs((2, 3, 17, 32), (2, 3, 32, 19)), (17, 19, 32), batch=2),
    "a symbolic batch": Case(inputs(("b", 3, "s", 32), ("b", 3, 32, 19)), ("s", 19, 32), batch=2),
    "heads that share keys": Case(inputs((2, 4, 17, 32), (2, 1, 32, 19)), (68, 19, 32), batch=1),
    "one x for several w": Case(inputs((17, 32), (5, 32, 19)), (17, 19, 32), batch=1),
    "strided rows": Case(
        inputs((2, 19, 4, 32), (2, 21, 4, 32)),
        (19, 21, 32),
        scores,
        lambda q, k: q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1),
        layout="nk",
        batch=2,
    ),
    "an epilogue in a batch": Case(
        inputs((2, 3, 5, 16), (2, 3, 16, 19), (2, 1, 5, 19)),
        (5, 19, 16),
        lambda x, w, m: op.add(op.multiply(op.matmul(x, w), relax.const(0.25)), m),
        lambda x, w, m: (x @ w) * x.dtype.type(0.25) + m,
        batch=2,
    ),
    "a vector on the right": Case(inputs((5, 17, 32), (32,)), (1, 85, 32), layout="nk"),
    "a vector on the left": Case(inputs((32,), (3, 32, 19)), (1, 19, 32), batch=1),
    "a scale of no dimensions": Case(
        inputs((33, 64), (64, 40), ()),
        (33, 40, 64),
        lambda x, w, s: op.matmul(x, op.multiply(w, s)),
        lambda x, w, s: x @ (w * s),
    ),
    "one column": Case(inputs((7, 32), (32, 1)), (7, 1, 32), layout="nk"),
    "a sum of one": Case(inputs((7, 1), (1, 9)), (7, 9, 1)),
    "an activation in front": Case(
        inputs((4, 37, 64), (64, 48)),
        (148, 48, 64),
        lambda x, w: op.matmul(op.nn.relu(x), w),
        lambda x, w: np.maximum(x, 0) @ w,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    case = CASES[name]
    func = fused(case.inputs, case.emit)
    form = generic_matmul(func)
    assert form is not None
    work = form.workload()
    rows = work.rows if isinstance(work.rows, int) else work.rows.name
    assert (rows, work.n, work.k) == case.rows_n_k
    assert (work.outputs[0].layout, len(form.batch)) == (case.layout, case.batch)
    schedule = GenericMatmulRule().apply(func, host_target(), False)
    arrays, got = run(schedule.mod["main"], host_target(), func)
    check(got, case.steps, arrays)


LEFT = ("a sum of one", "an epilogue in a batch")
"""What has no plan on a GPU, and what has a constant that is no float16."""


@pytest.mark.parametrize("name", sampled(n for n in CASES if n not in LEFT))
def test_cuda_compiles(name: str) -> None:
    func = fused(CASES[name].inputs, CASES[name].emit)
    kernel = GenericMatmulRule().apply(func, make_target("h200"), False).mod["main"]
    ranges = len(table_of(kernel.attrs[PLAN_ATTR]).entries)
    source = compiled(kernel, make_target("h200")).mod.imports[0].inspect_source()
    assert source.count("__global__") >= 2 * ranges  # declared, then defined
    assert ("blockIdx.z" in source) == bool(CASES[name].batch)


HALVES = inputs((512, 512), (512, 1024), dtype="float16")

NOT_IN_VECTORS = {
    "a condition": (
        (Input((512, 1024), "bool"), Input((512, 1024), "float16")),
        lambda x, w, keep, r: op.where(keep, op.matmul(x, w), r),
    ),
    "an integer": (
        (Input((1024,), "int32"),),
        lambda x, w, bias: op.add(op.matmul(x, w), op.astype(bias, "float16")),
    ),
    "one of two tensors": (
        inputs((512,), (512,), dtype="float16"),
        lambda x, w, b, c: op.add(op.matmul(x, w), op.concat([b, c], axis=0)),
    ),
    "as many as there are even columns": (
        inputs((1024,), dtype="float16"),
        lambda x, w, b: op.add(
            op.add(op.matmul(x, w), b),
            op.repeat(op.strided_slice(b, [0], [0], [1024], [2]), 2, axis=0),
        ),
    ),
}


@pytest.mark.parametrize("name", NOT_IN_VECTORS)
def test_tensor_cores_load_operands_one_by_one_that_are_no_vectors(name: str) -> None:
    more, emit = NOT_IN_VECTORS[name]
    func = fused((*HALVES, *more), emit)
    kernel = GenericMatmulRule().apply(func, make_target("h200"), False).mod["main"]
    assert "ldmatrix" in kernel.script() or "wgmma" in kernel.script()
    assert compiled(kernel, make_target("h200")) is not None
    if name == "one of two tensors":  # beyond the end of one begins the other
        assert "operand" not in kernel.script()


def test_a_dequantisation_becomes_part_of_the_kernel() -> None:
    case = Quantised(40, 64, "s")
    kernel = GenericMatmulRule().apply(case.func(), host_target(), False).mod["main"]
    arrays, got = run(kernel, host_target(), case.func())
    check(got, case.steps, arrays)


def test_weights_are_computed_in_front_where_many_rows_pay_for_it() -> None:
    form = generic_matmul(Quantised(4096, 4096, "s").func())
    assert form is not None
    _, _, found = planned(form, device_of(make_target("h200")), False)
    assert [each.upper for each in found[:2]] == [8, 16]
    assert all(each.plan.family for each in found)
    in_front = [each.in_front for each in found]
    assert in_front == sorted(in_front) and in_front[-1] and not any(in_front[:2])
    batched = generic_matmul(Quantised(4096, 4096, "s", batch=2).func())
    assert batched is not None
    _, _, found = planned(batched, device_of(make_target("h200")), False)
    assert {e.plan.family for e in found} == {"few_rows"}  # one kernel for all of a batch
    assert found[-1].upper is None and not any(each.in_front for each in found)


def test_an_activation_in_front_is_computed_by_a_kernel_of_its_own() -> None:
    func = fused(HALVES, lambda x, w: op.matmul(op.nn.relu(x), w))
    kernel = GenericMatmulRule().apply(func, make_target("h200"), False).mod["main"]
    first, second = kernels(compiled(kernel, make_target("h200")).mod.imports[0].inspect_source())
    assert "*(uint4*)(x" in first and "mma" in second  # which stores vectors


@pytest.mark.parametrize("name", [n for n in CASES if n not in LEFT])
def test_half_precision_has_a_kernel_on_a_gpu(name: str) -> None:
    """Also where a kernel in front computes the weight: a scale, quantised ones of many rows."""
    given = [replace(i, dtype="float16") for i in CASES[name].inputs]
    func = fused(given, CASES[name].emit)
    assert GenericMatmulRule().apply(func, make_target("h200"), False) is not None


def test_parts_of_two_axes_are_no_lines() -> None:
    """Of `(3, 4)` read `(2, 4)`: lines of 8 lie 12 apart, which 16 bytes do not divide."""

    def product(size: int) -> tirx.PrimFunc:
        x = te.placeholder((64, 32), "float16", "x")
        w = te.placeholder((32, size, 4), "float16", "w")
        k = te.reduce_axis((0, 32), "k")
        out = te.compute((64, 2, 4), lambda i, a, b: te.sum(x[i, k] * w[k, a, b], axis=k))
        return te.create_prim_func([x, w, out])

    columns = [generic_matmul(product(size)).columns for size in (2, 3)]
    assert [len(c) for c in columns] == [2, 1]


def test_a_part_of_the_sums_is_left() -> None:
    """Its kernel would write all of them, beyond the end of the result."""
    x, w = (te.placeholder(shape, "float32") for shape in ((8, 16), (16, 12)))
    k = te.reduce_axis((0, 16), "k")
    sums = te.compute((8, 12), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k))
    for shape in ((4, 12), (8, 5)):
        part = te.compute(shape, lambda i, j: sums[i, j] + 1.0)
        assert generic_matmul(te.create_prim_func([x, w, part])) is None
    whole = te.compute((8, 12), lambda i, j: sums[i, j] + 1.0)
    assert generic_matmul(te.create_prim_func([x, w, whole])) is not None


DECLINED = {
    "float64": (inputs((7, 32), (32, 9), dtype="float64"), Reason.DTYPE),
    "integers": (inputs((7, 32), (32, 9), dtype="int32"), Reason.DTYPE),
    "empty": (inputs((0, 32), (32, 9)), Reason.SHAPE),
    "symbolic n": (inputs((7, 32), (32, "s")), Reason.SHAPE),
    "symbolic k": (inputs((7, "s"), ("s", 9)), Reason.SHAPE),
}


@pytest.mark.parametrize("name", DECLINED)
@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_declines(name: str, target: str) -> None:
    specs, reason = DECLINED[name]
    func = fused(specs, op.matmul)
    result = GenericMatmulRule().attempt(func, make_target(target))
    assert isinstance(result, Decline) and result.reason == reason
    assert GenericMatmulRule().apply(func, make_target(target), False) is None


NO_MATMUL = {
    "a sum": (inputs((7, 32)), lambda x: op.sum(x, axis=1)),
    "a convolution": (inputs((1, 4, 8, 8), (4, 4, 3, 3)), op.nn.conv2d),
    "two sums": (inputs((7, 32), (32, 9), (9, 8)), lambda x, w, v: op.matmul(op.matmul(x, w), v)),
    "a scalar": (inputs((32,), (32,)), op.matmul),
    "a reshape behind": (
        inputs((7, 32), (32, 8)),
        lambda x, w: op.reshape(op.matmul(x, w), (14, 4)),
    ),
    "a product with itself": (
        inputs((8, 8), (8, 8)),
        lambda x, w: (lambda y: op.multiply(y, op.permute_dims(y)))(op.matmul(x, w)),
    ),
}


@pytest.mark.parametrize("name", NO_MATMUL)
def test_leaves(name: str) -> None:
    specs, emit = NO_MATMUL[name]
    assert GenericMatmulRule().attempt(fused(specs, emit), host_target()) is None


@pytest.mark.parametrize("times", [1, 2, 9])
def test_formulas_whose_code_would_grow_beyond_all_bounds_are_left(times: int) -> None:
    def activated(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        value = op.matmul(x, w)
        for _ in range(times):
            value = op.nn.gelu_tanh(value)
        return value

    found = generic_matmul(fused(inputs((2, 7, 32), (2, 32, 9)), activated))
    assert (found is not None) == (times == 1)


def test_a_scheduled_function_is_left() -> None:
    func = fused(inputs((7, 32), (32, 9)), op.matmul)
    once = GenericMatmulRule().apply(func, host_target(), False)
    assert isinstance(once, s_tir.Schedule)
    assert GenericMatmulRule().apply(once.mod["main"], host_target(), False) is None


def test_every_projection_of_batch_decode_is_kept_from_tvms_rule() -> None:
    """There `dl.gpu.Matmul` ends in a segmentation fault (TVM 0.26 and 0.27)."""
    func = fused(
        inputs(("b", 1, 2048), (3072, 2048), dtype="float16"),
        lambda x, w: op.matmul(x, op.permute_dims(w)),
    )
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with make_target("h200"):
        mod = dl.ApplyDefaultSchedule(GenericMatmulRule(), dl.gpu.Matmul())(mod)
    assert PLAN_ATTR in mod["main"].attrs
