"""The same model in Relax and in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, te, tirx
from tvm.relax import op

from benchmarks.suites.cpu_q4.model import EPS, FIELDS, GROUP, ZERO, Model, Quantised

Timed = Callable[[np.ndarray], np.ndarray]


def module(model: Model, packed: bool) -> ir.IRModule:
    """Return the module whose weights are parameters, packed or in float32."""
    bb, params = relax.BlockBuilder(), []

    def param(shape: tuple[Any, ...], dtype: str = "float32") -> relax.Var:
        params.append(relax.Var(f"p{len(params)}", relax.TensorType(shape, dtype)))
        return params[-1]

    def times(x: relax.Expr, weight: Quantised) -> relax.Expr:
        n, k = weight.words.shape[0], weight.words.shape[1] * FIELDS
        if not packed:
            return op.matmul(x, op.permute_dims(param((n, k))))
        given = param((n, k // FIELDS), "uint32"), param((n, k // GROUP))
        return op.matmul(x, op.permute_dims(bb.emit_te(decoded, *given)))

    hidden = model.widths.hidden
    ones = relax.const(np.ones(hidden, "float32"))
    first = param((tirx.Var("rows", "int64"), hidden))
    outs: list[relax.Expr] = []

    def normed(x: relax.Expr) -> relax.Expr:
        return op.nn.rms_norm(x, ones, axes=[-1], epsilon=EPS)

    def body() -> None:
        x: relax.Expr = first
        for layer in model.layers:
            qkv = bb.emit(times(normed(x), layer["qkv"]))
            query = op.strided_slice(qkv, [1], [0], [hidden])
            x = bb.emit(op.add(x, times(query, layer["out"])))
            gate, up = bb.emit(op.split(times(normed(x), layer["gate_up"]), 2, axis=-1))
            x = bb.emit(op.add(x, times(op.multiply(op.nn.silu(gate), up), layer["down"])))
        outs.append(bb.emit_output(times(normed(x), model.head)))

    with bb.function("main"):
        with bb.dataflow():
            body()
        bb.emit_func_output(outs[0], params)
    return bb.get()


def decoded(words: te.Tensor, scales: te.Tensor) -> te.Tensor:
    """Return the weight that words and scales hold, as MLC-LLM's q4f32_1 writes it."""
    n, k = words.shape[0], words.shape[1] * FIELDS

    def element(j: tirx.Expr, i: tirx.Expr) -> tirx.Expr:
        shift = (i % FIELDS * 4).astype("uint32")
        field = (words[j, i // FIELDS] >> shift & tirx.const(15, "uint32")).astype("float32")
        return (field - tirx.const(float(ZERO), "float32")) * scales[j, i // GROUP]

    return te.compute((n, k), element, "decoded")


def by_us(model: Model, packed: bool, target: Any, **options: bool) -> Timed:
    """Compile the module; the weights stay parameters."""
    pipeline = relax.get_pipeline("relax_fusion", target=target, **options)
    executable = tvm.compile(module(model, packed), target, relax_pipeline=pipeline)
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    weights: list[tvm.runtime.Tensor] = []
    for w in model.weights:
        arrays = (w.words, w.scales) if packed else (w.decoded(),)
        weights += map(tvm.runtime.tensor, arrays)
    return lambda x: main(tvm.runtime.tensor(x), *weights).numpy()


def onnx_model(model: Model, accuracy: int) -> bytes:
    """Return the model with products by ``MatMulNBits`` of some accuracy level (4: int8 rows)."""
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    tensors: list[Any] = []

    def constant(array: np.ndarray) -> str:
        tensors.append(numpy_helper.from_array(array, f"c{len(tensors)}"))
        return str(tensors[-1].name)

    def apply(kind: str, *given: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"{kind}{len(nodes)}_{i}" for i in range(outputs)]
        nodes.append(helper.make_node(kind, given, names, **attributes))
        return names[0] if outputs == 1 else names

    def times(x: str, weight: Quantised) -> str:
        n, k = weight.words.shape[0], weight.words.shape[1] * FIELDS
        blocks = weight.words.view("uint8").reshape(n, k // GROUP, GROUP // 2)
        given = constant(blocks), constant(weight.scales.reshape(-1))
        sizes = {"K": k, "N": n, "bits": 4, "block_size": GROUP, "accuracy_level": accuracy}
        return str(apply("MatMulNBits", x, *given, domain="com.microsoft", **sizes))

    hidden = model.widths.hidden
    ones = constant(np.ones(hidden, "float32"))
    bounds = [constant(np.array([value])) for value in (0, hidden, 1)]

    def normed(x: str) -> Any:
        return apply("SimplifiedLayerNormalization", x, ones, epsilon=EPS)

    x: Any = "x"
    for layer in model.layers:
        query = apply("Slice", times(normed(x), layer["qkv"]), *bounds)
        x = apply("Add", x, times(query, layer["out"]))
        both = times(normed(x), layer["gate_up"])
        gate, up = apply("Split", both, outputs=2, axis=1, num_outputs=2)
        active = apply("Mul", gate, apply("Sigmoid", gate))
        x = apply("Add", x, times(apply("Mul", active, up), layer["down"]))
    y = times(normed(x), model.head)
    shapes = {"x": ["rows", hidden], y: ["rows", model.widths.vocabulary]}
    given, result = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in shapes.items()
    )
    graph = helper.make_graph(nodes, "decoder", given, result, tensors)
    versions = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=versions)
    made.ir_version = 10
    return bytes(made.SerializeToString())


def by_onnxruntime(model: Model, threads: int, accuracy: int) -> Timed:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    written = onnx_model(model, accuracy)
    session = onnxruntime.InferenceSession(written, options, ["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def by_openvino(model: Model, threads: int, group: int) -> Timed:
    """Compile for OpenVINO; `group` elements of a row are rounded to int8 together, 0: none."""
    import openvino

    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
    }
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(onnx_model(model, 0)), "CPU", options)
    request = compiled.create_infer_request()
    return lambda x: np.array(request.infer([x])[0])
