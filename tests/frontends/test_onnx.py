"""ONNX files: names, sizes, weights, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from relax_fusion.errors import MissingPackageError, ModelFileError
from relax_fusion.frontends import TensorSpec, read_model

from ..support.files import INPUTS, WIDE, WIDTH, WORDS, weights, write_onnx


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_onnx(tmp_path / "model.onnx")


def test_names_sizes_and_weights_are_those_of_the_file(file: Path) -> None:
    model = read_model(file)
    taken = [TensorSpec(n, tuple(shape), dtype) for n, (dtype, shape) in INPUTS.items()]
    hidden = TensorSpec("hidden/states", ("batch", "seq", WIDE), "float32")
    total = TensorSpec("sum", ("batch", "seq"), "float32")
    assert model.signature.inputs == tuple(taken)
    assert model.signature.outputs == (hidden, total)
    assert model.signature.sizes == {"batch": (0, None), "seq": (0, None)}
    kept = weights()
    assert list(model.weights) == ["table", "w"]  # a small bias stays a constant
    assert all(np.array_equal(model.weights[name], kept[name]) for name in model.weights)
    assert model.dtype == "float32" and int(model.mod["main"].attrs["num_input"]) == 2


def test_wrong_tokens_read_no_memory_beside_the_table(file: Path) -> None:
    assert 'mode="fast"' not in read_model(file).mod.script()


@pytest.mark.parametrize(
    "axes, names",
    [
        ([None, None], ("ids_1_0", "ids_1_1")),
        (["batch-size", "2nd"], ("batch_size", "size_2nd")),
        (["n", "2*n"], ("n", "2 * n")),
        (["n", 5], ("n", 5)),
    ],
)
def test_axes_without_a_proper_name_get_one(tmp_path: Path, axes: list, names: tuple) -> None:
    inputs = {"ids=1": ("int64", axes), "x.in": ("float32", [1, 1, WIDTH])}
    model = read_model(write_onnx(tmp_path / "model.onnx", inputs))
    assert model.signature.inputs[0].shape == names
    assert set(model.signature.sizes) == {n for n in names if str(n).isidentifier()}


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_file_cut_short(file: Path, keep: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelFileError, match=r"model\.onnx (is empty|cannot be read|holds no)"):
        read_model(file)


def test_what_is_not_onnx(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("hello")
    with pytest.raises(ModelFileError, match="cannot be read as ONNX"):
        read_model(tmp_path / "model.onnx")
    with pytest.raises(ModelFileError, match=r"suffix '.txt'; known ones: .onnx, .pt2"):
        read_model(tmp_path / "model.txt")
    with pytest.raises(FileNotFoundError):
        read_model(tmp_path / "missing.onnx")


def test_an_operator_that_tvm_does_not_import(file: Path) -> None:
    model = onnx.load(file)
    model.graph.node[4].op_type = "Unheard"
    onnx.save(model, file)
    with pytest.raises(ModelFileError, match=r"does not take .*model\.onnx: .*Unheard"):
        read_model(file)


def test_inputs_that_are_no_tensors(file: Path) -> None:
    model = onnx.load(file)
    model.graph.input[1].type.tensor_type.ClearField("shape")
    onnx.save(model, file)
    with pytest.raises(ModelFileError, match=r"'x\.in' is R\.Tensor.*; must be a tensor with axes"):
        read_model(file)
    kind = onnx.helper.make_tensor_sequence_value_info("x.in", onnx.TensorProto.FLOAT, [WORDS])
    model.graph.input[1].CopyFrom(kind)
    onnx.save(model, file)
    with pytest.raises(ModelFileError, match=r"'x\.in' is no tensor"):
        read_model(file)


def test_a_missing_package_is_named(file: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'relax-fusion\[onnx\]'"):
        read_model(file)


def saved(file: Path, size: int | str, functions: int = 0) -> Path:
    """Write a model of one input; each of its functions calls the one before it twice."""
    value = onnx.helper.make_tensor_value_info
    made, opsets = onnx.helper.make_node, [onnx.helper.make_opsetid("", 17)]
    graph = onnx.helper.make_graph(
        [
            made(f"F{functions - 1}", ["x"], ["y"], domain="d")
            if functions
            else made("Relu", ["x"], ["y"])
        ],
        "g",
        [value("x", onnx.TensorProto.FLOAT, [size])],
        [value("y", onnx.TensorProto.FLOAT, None)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[*opsets, onnx.helper.make_opsetid("d", 1)])
    for n in range(functions):
        name, kind = f"F{n}", {"domain": "d"} if n else {}
        inner = f"F{n - 1}" if n else "Relu"
        calls = [made(inner, ["x"], ["t"], **kind), made(inner, ["t"], ["y"], **kind)]
        imports = [*opsets, onnx.helper.make_opsetid("d", 1)]
        model.functions.append(onnx.helper.make_function("d", name, ["x"], ["y"], calls, imports))
    file.write_bytes(model.SerializeToString())
    return file


def test_functions_that_grow_without_end(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"come to \d{13} nodes .* at most 1000000"):
        read_model(saved(tmp_path / "a.onnx", 4, functions=40))
    assert read_model(saved(tmp_path / "b.onnx", 4, functions=3)).signature.inputs


def test_a_size_of_many_terms(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="a size of the input 'x' has 20001 terms"):
        read_model(saved(tmp_path / "a.onnx", "a" + "+a" * 20000))
