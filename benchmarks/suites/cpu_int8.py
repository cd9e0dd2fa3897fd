"""Layers of int8 weights on this CPU: ours against torch, onnxruntime and OpenVINO.

    python -m benchmarks run cpu_int8 [--models bert llama] [--rows 1 16 128 512] [--threads 2]

Two things are timed.  A whole layer takes float32, rounds it to bytes by its range, multiplies, and
gives float32 with a bias.  One ONNX file (DynamicQuantizeLinear, MatMulInteger) is for our importer
and pipeline and for onnxruntime; torch has its dynamically quantised `Linear`.  OpenVINO computes
that file in floats: it gets a product with DequantizeLinear's weight, whose rows it rounds to int8,
written in that of five ways that it ran fastest.  The weight is a constant of all.  Sums alone are
int8 by int8, int32: `sums` is ours, whose weight is a constant, and `int_mm` is ``torch._int_mm``;
`ort` is onnxruntime.  Everybody takes turns; the least of the times counts.  Sums are compared with
numpy's, which are exact, layers with the file's formulas.
"""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper
from tvm import relax

from benchmarks.report import Entry, Verdict
from benchmarks.suite import Suite
from relax_fusion import host_target
from relax_fusion.estimator import format_seconds
from relax_fusion.frontends import read_model
from relax_fusion.timing import in_turn, timed

LAYERS = {
    "bert": {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072), "down": (3072, 768)},
    "llama": {
        "qkv": (2048, 3072),
        "out": (2048, 2048),
        "gate_up": (2048, 16384),
        "down": (8192, 2048),
    },
}
"""Features in and out of the layers of BERT base and of LLaMA-3.2-1B."""

OWN = {"ort": "ours", "openvino": "ours", "torch": "ours", "int_mm": "sums"}
"""With which of ours each peer is compared."""

LABELS = {
    "ort": "onnxruntime",
    "openvino": "OpenVINO",
    "torch": "torch",
    "sums": "sums alone",
    "int_mm": "torch._int_mm",
}
GOAL = 1.0
CALLS, PAUSE_S = 5, 0.25
"""Calls in a round; before each turn, for the threads of the contender before it to stop."""

Call = Callable[[], Any]
Item = tuple[str, str, int]


class CpuInt8(Suite):
    """Layers, each at several numbers of rows."""

    name = "bench_cpu_int8"
    key = ("model", "layer", "rows")
    has_target = False
    contenders = usual = ("ours", *LABELS)
    plain: ClassVar = {"threads": 2}
    head = (*key, "ours", *LABELS.values())

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--models", nargs="+", default=list(LAYERS), choices=list(LAYERS))
        add("--rows", type=int, nargs="+", default=[1, 16, 128, 512])
        add("--threads", type=int, default=2)
        add("--rounds", type=int, default=6)

    def begin(self) -> None:
        os.environ["TVM_NUM_THREADS"] = str(self.args.threads)

    def items(self) -> Iterator[Item]:
        for model in self.args.models:
            yield from ((model, layer, n) for layer in LAYERS[model] for n in self.args.rows)

    def absent(self, item: Item) -> Collection[str]:
        needs = {**dict.fromkeys(LABELS, "torch"), "ort": "onnxruntime", "openvino": "openvino"}
        return [who for who in LABELS if who != "sums" and find_spec(needs[who]) is None]

    def is_complete(self, entry: Entry, item: Item) -> bool:
        return "error" not in entry and set(self.asked(item)) <= set(entry["seconds"])

    def measured(self, item: Item) -> Entry:
        """Time every contender in turn, round after round."""
        model, layer, rows = item
        case = _Layer(rows, *LAYERS[model][layer])
        makers = {name: getattr(case, f"by_{name}") for name in self.asked(item)}
        calls = {who: make(self.args.threads) for who, make in makers.items()}

        def turn(call: Call, _: int) -> list[float]:
            time.sleep(PAUSE_S)
            return [timed(call)[1] for _ in range(CALLS)]

        found = in_turn({who: partial(turn, c) for who, c in calls.items()}, self.args.rounds)
        results = {who: np.asarray(call()) for who, call in calls.items()}
        return {
            "seconds": {who: min(s) for who, s in found.items()},
            "median_seconds": {who: statistics.median(s) for who, s in found.items()},
            "wrong": [who for who in {"ours", "sums"} & {*results} if case.is_wrong(who, results)],
        }

    # --- what is said ----------------------------------------------------------------------

    def intro(self, record: Entry) -> str:
        return (
            f"{record['threads']} threads.  Least times, and in brackets theirs over ours: of "
            "whole layers over ours, of torch._int_mm over our sums alone."
        )

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        taken, cells = entry["seconds"], list(map(str, self.key_of(entry)))
        for who in ("ours", *LABELS):
            ours = taken.get(OWN.get(who, ""))
            ratio = f" ({taken[who] / ours:.2f}x)" if ours and who in taken else ""
            cells.append(format_seconds(taken[who]) + ratio if who in taken else "")
        return tuple(cells)

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        taken = entry["seconds"]
        return [
            (self.name_of(entry), f"vs {LABELS[who]}", GOAL, taken[who] / taken[ours])
            for who, ours in OWN.items()
            if {who, ours} <= set(taken)
        ]


class _Layer:
    """The operands of a layer, and who computes it."""

    def __init__(self, rows: int, k: int, n: int):
        rng = np.random.default_rng(rows + k + n)
        self.x = rng.standard_normal((rows, k)).astype("float32")
        self.bytes = rng.integers(-127, 128, (rows, k), "int8")
        self.weight = rng.integers(-127, 128, (k, n), "int8")
        self.scales = rng.uniform(0.5, 1.5, n).astype("float32") / (64 * k**0.5)
        self.bias = rng.standard_normal(n).astype("float32")
        self.file = self._written(
            helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            helper.make_node("MatMulInteger", ["q", "w", "z", "wz"], ["i"]),
            helper.make_node("Cast", ["i"], ["f"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Mul", ["s", "ws"], ["t"]),
            helper.make_node("Mul", ["f", "t"], ["g"]),
        )

    def _written(self, *nodes: onnx.NodeProto) -> onnx.ModelProto:
        """Write a file of nodes from x to g, what stands before the bias."""
        kept = {"w": self.weight, "wz": np.zeros((), "int8"), "ws": self.scales, "b": self.bias}
        nodes = (*nodes, helper.make_node("Add", ["g", "b"], ["y"]))
        shapes = {"x": self.x.shape, "y": (len(self.x), len(self.bias))}
        given, made = (
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            for name, shape in shapes.items()
        )
        stored = [numpy_helper.from_array(array, name) for name, array in kept.items()]
        graph = helper.make_graph(nodes, "layer", [given], [made], stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def by_ours(self, threads: int) -> Call:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layer.onnx"
            onnx.save(self.file, path)
            read = read_model(path)
        held = zip(read.mod["main"].params[1:], read.weights.values(), strict=True)
        bind = relax.transform.BindParams("main", {p.name: w for p, w in held})
        return self._called(bind(read.mod), [self.x])

    def by_sums(self, threads: int) -> Call:
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType(self.bytes.shape, "int8"))
        with builder.function("main", [x]):
            with builder.dataflow():
                weight = relax.const(self.weight)
                out = builder.emit_output(relax.op.matmul(x, weight, out_dtype="int32"))
            builder.emit_func_output(out)
        return self._called(builder.get(), [self.bytes])

    def _called(self, mod: tvm.IRModule, arrays: list[np.ndarray]) -> Call:
        target = host_target()
        pipeline = relax.get_pipeline("relax_fusion", target=target)
        executable = tvm.compile(mod, target, relax_pipeline=pipeline)
        main = relax.VirtualMachine(executable, tvm.cpu())["main"]
        given = [tvm.runtime.tensor(array) for array in arrays]
        return lambda: np.from_dlpack(main(*given))

    def by_ort(self, threads: int) -> Call:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        text = self.file.SerializeToString()
        session = onnxruntime.InferenceSession(text, options, ["CPUExecutionProvider"])
        return lambda: session.run(None, {"x": self.x})[0]

    def by_openvino(self, threads: int) -> Call:
        import openvino

        file = self._written(
            helper.make_node("DequantizeLinear", ["w", "ws"], ["f"], axis=1),
            helper.make_node("MatMul", ["x", "f"], ["g"]),
        )
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": self.x.shape[1],
        }
        core = openvino.Core()
        model = core.read_model(io.BytesIO(file.SerializeToString()))
        request = core.compile_model(model, "CPU", options).create_infer_request()
        return lambda: np.array(request.infer([self.x])[0])

    def by_torch(self, threads: int) -> Call:
        import torch
        from torch.ao.nn.quantized import dynamic

        torch.set_num_threads(threads)
        n, zeros = len(self.bias), torch.zeros(len(self.bias), dtype=torch.int64)
        layer = dynamic.Linear(self.weight.shape[0], n)
        whole = torch.from_numpy(self.weight.T * self.scales[:, None].astype("float32"))
        scales = torch.from_numpy(self.scales.astype("float64"))
        kept = torch.quantize_per_channel(whole, scales, zeros, 0, torch.qint8)
        layer.set_weight_bias(kept, torch.from_numpy(self.bias))
        x = torch.from_numpy(self.x)
        return torch.inference_mode()(lambda: layer(x).numpy())

    def by_int_mm(self, threads: int) -> Call:
        import torch

        torch.set_num_threads(threads)
        x, w = (torch.from_numpy(each) for each in (self.bytes, self.weight))
        return torch.inference_mode()(lambda: torch._int_mm(x, w).numpy())

    def is_wrong(self, who: str, results: dict[str, np.ndarray]) -> bool:
        """Tell whether sums are not exact, or a layer is not the file's."""
        if who == "sums":
            exact = self.bytes.astype("float64") @ self.weight.astype("float64")
            return not np.array_equal(results[who], exact)
        low, high = min(self.x.min(), 0), max(self.x.max(), 0)
        scale = np.float32(high - low) / np.float32(255)
        zero = np.round(np.clip(-low / scale, 0, 255))
        rounded = np.clip(np.round(self.x / scale) + zero, 0, 255) - zero
        exact = rounded.astype("float64") @ self.weight.astype("float64") * (scale * self.scales)
        error = np.abs(results[who] - (exact + self.bias)).max()
        return bool(error > 1e-3 * np.abs(exact).max())
