"""Functions of decoded weights, what the pipeline makes of them, and how to run that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import tvm
from tvm import ir, relax
from tvm.target import codegen

from relax_fusion import make_target
from relax_fusion.options import make_options
from relax_fusion.pipeline import PHASES

from .quantised import FORMATS, Bytes, numpy_dtype
from .quick import machine, quick_host, quickly

op = relax.op
K, N = 128, 24
"""Features that are summed, which groups of 40 do not divide, and columns."""


def tensor(name: str, shape, dtype: str) -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


class Layer:
    """Parameters and bindings of a function with decoded weights."""

    def __init__(self, bb: relax.BlockBuilder, format) -> None:
        self.bb, self.format, self.params = bb, format, []

    def param(self, shape, dtype: str) -> relax.Var:
        self.params.append(tensor(f"p{len(self.params)}", shape, dtype))
        return self.params[-1]

    def packed(self, n, k: int) -> list[relax.Var]:
        return [self.param(*each) for each in self.format.shapes(n, k)]


def add_function(bb: relax.BlockBuilder, name: str, layer: Layer, emit: Callable) -> None:
    """Add a function whose results `emit` returns, to be called in a dataflow block."""
    with bb.function(name, layer.params):
        with bb.dataflow():
            outs = [bb.emit_output(out) for out in emit()]
        bb.emit_func_output(relax.Tuple(outs))


def projected(layer: Layer, x: relax.Expr, packed, n, k: int, dtype: str | None = None):
    """Multiply by a decoded weight of n x k."""
    w = layer.format.emit(layer.bb, packed, n, k)
    w = w if layer.format.layout == "kn" else op.permute_dims(w)
    return layer.bb.emit(op.matmul(x, w, dtype))


def lowered(mod: ir.IRModule, target="llvm", phases: int = 4, **options) -> ir.IRModule:
    """Return a module as the pipeline has it after some phases."""
    target = make_target(target)
    given = make_options(target, {"backend": "tir", **options})
    with target:
        for _, phase, _ in PHASES[:phases]:
            mod = tvm.transform.Sequential(phase(given))(mod)
    return mod


def called(func: relax.Function) -> list[relax.Call]:
    values = [b.value for block in func.body.blocks for b in block.bindings]
    return [v for v in values if isinstance(v, relax.Call) and v.op.name == "relax.call_tir"]


def compiled(mod: ir.IRModule, *passes: tvm.transform.Pass) -> relax.VirtualMachine:
    """Compile a module after some passes, whatever has no schedule as TVM's loops."""
    mod = tvm.transform.Sequential(passes)(mod)
    return machine(quickly(mod))


def run_by_pipeline(mod: ir.IRModule) -> relax.VirtualMachine:
    """Compile a module with our pipeline.

    LLVM may round a product and a sum of float16 once where the processor has an instruction for
    both; here each is rounded, as in the arrays to compare with, on every processor.
    """
    pipeline = relax.get_pipeline("relax_fusion", target="llvm")
    host = quick_host()
    if codegen.target_has_features("avx512fp16", host):
        host = tvm.target.Target({**host.export(), "mattr": ["-avx512fp16"]})
    return machine(quickly(mod, pipeline, host))


def add_projection(bb: relax.BlockBuilder, name: str, format, rows: int) -> None:
    """Add a function of a matmul, with a residual, and a lookup of a decoded weight."""
    layer = Layer(bb, format)
    x, ids = layer.param((rows, K), format.dtype), layer.param((3,), "int32")
    residual = layer.param((rows, N), format.dtype)
    packed = layer.packed(N, K)

    def emit():
        w = format.emit(bb, packed, N, K)
        turned = op.permute_dims(w)
        by_rows, by_columns = (w, turned) if format.layout == "nk" else (turned, w)
        y = op.add(bb.emit(op.matmul(x, by_columns)), residual)
        return y, op.take(bb.emit(by_rows), ids, axis=0)

    add_function(bb, name, layer, emit)


def random_array(rng: np.random.Generator, shape, dtype: str) -> np.ndarray:
    kind = numpy_dtype(dtype)
    if dtype.startswith(("uint", "int")):
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, shape, kind, endpoint=True)
    if dtype.startswith("float8"):  # zero and subnormal numbers among them
        return (rng.standard_normal(shape) * rng.choice([0, 2**-7, 1], shape)).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def check_numbers(
    machine: relax.VirtualMachine,
    name: str,
    x: np.ndarray,
    on: tvm.runtime.Device | None = None,
    formats: Mapping = FORMATS,
) -> None:
    """Compare every bit of the weight, which rows with a single one read out.

    Bytes by wider scales may be rounded at each step, as they are written, or once.
    """
    format, rng = formats[name.split()[0]], np.random.default_rng(3)
    packed = [random_array(rng, *each) for each in format.shapes(N, K)]
    weight = format.decoded(packed, K)
    x, ids = x.astype(weight.dtype), np.array([N - 1, 0, 7], "int32")
    residual = np.zeros((len(x), N), weight.dtype)
    arrays = [tvm.runtime.tensor(a, on) for a in (x, ids, residual, *packed)]
    y, rows = (out.numpy() for out in machine[name](*arrays))
    y, wanted = y.astype("float64"), (x @ weight.T).astype("float64")
    if on is not None and isinstance(format, Bytes) and format.scale != format.dtype:
        once = replace(format, dtype=format.scale).decoded(packed, K).astype(weight.dtype)
        wanted = np.where(y == wanted, wanted, (x @ once.T).astype("float64"))
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(rows.astype("float64"), weight[ids].astype("float64"))
