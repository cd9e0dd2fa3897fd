"""Matmuls of bytes with zero points, as importers write them, against numpy and ONNX."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from onnx.reference import ReferenceEvaluator
from tvm import relax

from relax_fusion import Report
from relax_fusion.canonical import MultiplyBytes
from relax_fusion.frontends import read_model

from ..support.quick import machine, quick_host, quickly
from ..support.slow import sampled
from .common import module, operators

WIDE = {
    "": 'R.astype({0}, "int32")',
    "()": 'R.subtract(R.astype({0}, "int32"), z{0})',
    "each": 'R.subtract(R.astype({0}, "int32"), z{0})',
}
ZEROS = {"": (), "()": (), "each": {"x": (5, 1), "w": (6,)}}


def written(x: str, w: str, zeros: tuple[str, str]) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Return a matmul of widened bytes and its operands, among them the extremes."""
    rng, params, arrays = np.random.default_rng(1), [], []
    for name, dtype, zero in (("x", x, zeros[0]), ("w", w, zeros[1])):
        ends, shape = np.iinfo(dtype), {"x": (5, 8), "w": (8, 6)}[name]
        array = rng.integers(ends.min, ends.max, shape, dtype, endpoint=True)
        array[0], array[-1] = ends.min, ends.max
        of_zero = ZEROS[zero][name] if zero == "each" else ()
        arrays += [array, np.array(rng.integers(ends.min, ends.max, of_zero), "int32")]
        params += [f"{name}: R.Tensor({shape}, '{dtype}')"]
        params += [f"z{name}: R.Tensor({of_zero}, 'int32')"]
    lines = [f"{n * 2} = {WIDE[zero].format(n)}" for n, zero in zip("xw", zeros, strict=True)]
    lines += ["y = R.matmul(xx, ww, out_dtype='int32')".replace("'", '"')]
    return module(", ".join(params), "\n".join(lines), ""), arrays


def expected(arrays: list[np.ndarray], zeros: tuple[str, str]) -> np.ndarray:
    x, zx, w, zw = (a.astype("int32") for a in arrays)
    return (x - zx * bool(zeros[0])) @ (w - zw * bool(zeros[1]))


CASES = [*product(("int8", "uint8"), ("int8", "uint8"), product(ZEROS, ZEROS))]


@pytest.mark.parametrize(("x", "w", "zeros"), sampled(CASES, 7))
def test_sums_are_those_of_numpy(x: str, w: str, zeros: tuple[str, str]) -> None:
    before, arrays = written(x, w, zeros)
    after = MultiplyBytes()(before)
    assert MultiplyBytes()(after).same_as(after)
    bindings = [b.value for block in after["main"].body.blocks for b in block.bindings]
    (call,) = (v for v in bindings if getattr(v.op, "name", "") == "relax.matmul")
    assert {str(arg.ty.dtype) for arg in call.args} == {w}
    vm = machine(quickly(after, relax.get_pipeline("relax_fusion", target=quick_host())))
    found = vm["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    np.testing.assert_array_equal(found, expected(arrays, zeros))


KEPT = {
    "a zero for each feature": 'y = R.matmul(R.subtract(R.astype(x, "int32"), f), v)',
    "numbers of 32 bits": "y = R.matmul(v, v)",
    "floats": 'y = R.matmul(R.astype(x, "float32"), R.astype(x, "float32"))',
    "bytes as they are": 'y = R.matmul(x, x, out_dtype="int32")',
    "sums of a byte": "y = R.matmul(x, x)",
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str) -> None:
    tensors = ("x", (4, 4), "int8"), ("v", (4, 4), "int32"), ("f", (4,), "int32")
    params = ", ".join(f"{n}: R.Tensor({shape}, '{dtype}')" for n, shape, dtype in tensors)
    before = module(params, KEPT[name], "")
    assert MultiplyBytes()(before).same_as(before)


@pytest.mark.parametrize("rows", [7, 1])
def test_a_dynamically_quantised_layer_of_onnx_multiplies_bytes(tmp_path: Path, rows: int) -> None:
    """As onnxruntime's `quantize_dynamic` writes it: rows of uint8, weights of int8."""
    rng, path = np.random.default_rng(2), tmp_path / "layer.onnx"
    weight = rng.integers(-128, 128, (64, 96), "int8")
    scale, bias = rng.uniform(0.01, 0.02, 96).astype("f4"), rng.standard_normal(96).astype("f4")
    kept = {"w": weight, "wz": np.zeros((), "int8"), "ws": scale, "b": bias}
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z", "wz"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "ws"], ["t"]),
        helper.make_node("Mul", ["f", "t"], ["g"]),
        helper.make_node("Add", ["g", "b"], ["y"]),
    ]
    given, made = (
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shape)
        for n, shape in (("x", (rows, 64)), ("y", (rows, 96)))
    )
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in kept.items()]
    graph = helper.make_graph(nodes, "layer", [given], [made], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    read = read_model(path)
    assert "matmul" in operators(read.mod) and read.weights["w"].dtype == "int8"
    report, x = Report(), rng.standard_normal((rows, 64)).astype("f4")
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), report=report)
    vm = machine(quickly(read.mod, pipeline))
    found = vm["main"](tvm.runtime.tensor(x), *map(tvm.runtime.tensor, read.weights.values()))
    (exact,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-5, atol=1e-5)
    (made,) = (each for each in report.schedules if "matmul" in each.function)
    assert made.rule == "GenericMatmulRule" and "fours" in str(made.plans)
