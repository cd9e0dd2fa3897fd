"""Small models as files: ONNX, and programs of ``torch.export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

WORDS, WIDTH, WIDE = 80, 64, 96
INPUTS = {"ids=1": ("int64", ["batch", "seq"]), "x.in": ("float32", ["batch", "seq", WIDTH])}
OUTPUTS = ("hidden/states", "sum")


def weights(dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return the weights of the model: a table, a projection and its bias."""
    rng = np.random.default_rng(3)
    shapes = {"table": (WORDS, WIDTH), "w": (WIDTH, WIDE), "b": (WIDE,)}
    return {n: (rng.standard_normal(s) * 0.1).astype(dtype) for n, s in shapes.items()}


def arrays(batch: int = 2, seq: int = 3, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return inputs of the model."""
    rng = np.random.default_rng(4)
    ids = rng.integers(0, WORDS, (batch, seq))
    return {"ids=1": ids, "x.in": rng.standard_normal((batch, seq, WIDTH)).astype(dtype)}


def expected(given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return what the model computes."""
    kept = {name: array.astype("float64") for name, array in weights().items()}
    rows = kept["table"][np.minimum(given["ids=1"], WORDS - 1)] + given["x.in"].astype("float64")
    hidden = np.maximum(rows @ kept["w"] + kept["b"], 0)
    return [hidden, hidden.sum(-1)]


def write_onnx(path: Path, inputs: dict[str, Any] | None = None) -> Path:
    """Write the model, with these names, types and axes of its inputs."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    names = list(inputs or INPUTS)
    nodes = [
        helper.make_node("Gather", ["table", names[0]], ["rows"]),
        helper.make_node("Add", ["rows", names[1]], ["both"]),
        helper.make_node("MatMul", ["both", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["biased"]),
        helper.make_node("Relu", ["biased"], [OUTPUTS[0]]),
        helper.make_node("ReduceSum", [OUTPUTS[0], "axes"], [OUTPUTS[1]], keepdims=0),
    ]
    kept = [numpy_helper.from_array(array, name) for name, array in weights().items()]
    kept.append(numpy_helper.from_array(np.array([-1]), "axes"))
    kinds = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
    taken = [
        helper.make_tensor_value_info(name, kinds[dtype], shape)
        for name, (dtype, shape) in (inputs or INPUTS).items()
    ]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in OUTPUTS]
    graph = helper.make_graph(nodes, "model", taken, given, kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    return path


def program(dtype: str = "float32", bias: bool = True) -> Any:
    """Return the model as a program of ``torch.export``; x has axes of 2 to 8 and 1 to 16."""
    import torch

    kind = getattr(torch, dtype)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(WORDS, WIDTH)
            self.linear = torch.nn.Linear(WIDTH, WIDE, bias=bias)

        def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = torch.relu(self.linear(self.table(ids) + x))
            return hidden, hidden.sum(-1)

    model = Model()
    kept = {name: torch.from_numpy(array) for name, array in weights().items()}
    state = {"table.weight": kept["table"], "linear.weight": kept["w"].T}
    model.load_state_dict(state | ({"linear.bias": kept["b"]} if bias else {}))
    b, s = torch.export.Dim("b", min=2, max=8), torch.export.Dim("s", max=16)
    given = arrays(dtype=dtype)
    inputs = tuple(torch.from_numpy(array) for array in given.values())
    shapes = ({0: b, 1: s}, {0: b, 1: s})
    return torch.export.export(model.to(kind).eval(), inputs, dynamic_shapes=shapes)


def write_program(path: Path, dtype: str = "float32") -> Path:
    """Write the model as ``torch.export`` saves it."""
    import torch

    torch.export.save(program(dtype), path)
    return path
