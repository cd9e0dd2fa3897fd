"""ONNX files: names, sizes, weights, and what is refused."""

from __future__ import annotations

import gc
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


NODE, VALUE = onnx.helper.make_node, onnx.helper.make_tensor_value_info
FLOAT, INT = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def graph(*nodes: onnx.NodeProto, result: str = "y", **inputs: tuple) -> onnx.GraphProto:
    """Return a graph of `nodes` whose inputs are given as types and shapes."""
    taken = [VALUE(name, *given) for name, given in inputs.items()]
    return onnx.helper.make_graph([*nodes], "g", taken, [VALUE(result, FLOAT, None)])


def opsets(version: int = 17) -> list[onnx.OperatorSetIdProto]:
    return [onnx.helper.make_opsetid("", version), onnx.helper.make_opsetid("d", 1)]


X, SHAPE = (FLOAT, ["batch", "seq len", 4]), (INT, [2])
FIXED = (
    r"symbolic sizes \('batch', 'seq len'\) .*`python -m onnxruntime\.tools\."
    r"make_dynamic_shape_fixed --dim_param batch --dim_value N \S*m\.onnx \S*m-fixed\.onnx`, "
    "for --bound only bounds them"
)
UNNAMED = r"\(axes of 'x'\) .* --input_name x --input_shape N,4 \S*m\.onnx"
RESHAPE = NODE("Reshape", ["x", "shape"], ["y"], name="/view")
UNHEARD = NODE("Unheard", ["a"], ["y"], name="odd")


def branches(*nodes: onnx.NodeProto) -> onnx.NodeProto:
    one, other = graph(*nodes), graph(NODE("Relu", ["x"], ["y"]))
    return NODE("If", ["yes"], ["z"], name="if", then_branch=one, else_branch=other)


REFUSED = {
    "a shape computed": (
        *(graph(RESHAPE, x=X, shape=SHAPE), 17),
        rf": Reshape '/view' \(x, shape -> y\): TypeError: .*; its {FIXED}$",
    ),
    "a size without a name": (
        *(graph(RESHAPE, x=(FLOAT, [None, 4]), shape=SHAPE), 17),
        rf"'/view' .*{UNNAMED}",
    ),
    "fixed sizes": (graph(RESHAPE, x=(FLOAT, [2, 4]), shape=SHAPE), 17, r"'/view' [^`]*$"),
    "operators": (
        graph(NODE("Loop", ["x"], ["a"]), UNHEARD, NODE("Unheard", ["y"], ["z"]), x=X),
        *(17, r"it has no operator for Loop \(x -> a\); Unheard 'odd' \(a -> y\) and 1 more$"),
    ),
    "an operator of a branch": (
        graph(branches(NODE("Unheard", ["x"], ["y"], name="in")), result="z", x=X, yes=(9, [])),
        *(17, r": Unheard 'in' \(x -> y\): NotImplementedError: [^`]*$"),
    ),
    "a shape computed in a branch": (
        graph(branches(RESHAPE), result="z", x=X, shape=SHAPE, yes=(9, [])),
        *(17, rf": Reshape '/view' .*{FIXED}$"),
    ),
    "a function's node": (
        *(graph(NODE("F", ["x", "shape"], ["y"], domain="d"), x=X, shape=SHAPE), 17),
        r": Reshape '?\S* ?\(x, shape -> y\): TypeError",
    ),
    "an input that nothing computes": (
        *(graph(NODE("Add", ["x", "what"], ["y"], name="sum"), x=X), 17),
        r"Add 'sum' \(x, what -> y\): nothing computes 'what'$",
    ),
    "an output that nothing computes": (
        *(graph(NODE("Relu", ["x"], ["z"]), x=X), 17),
        r"m\.onnx: nothing computes 'y'$",
    ),
    "an opset of the future": (graph(NODE("Relu", ["x"], ["y"]), x=X), 999, "opset 999; must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tvm_does_not_import(name: str, tmp_path: Path, capfd) -> None:
    """The node is named, and how to fix sizes where they may be why; nothing else is printed."""
    made, opset, told = REFUSED[name]
    model = onnx.helper.make_model(made, opset_imports=opsets(opset))
    kind = ("d", "F", ["x", "shape"], ["y"], [NODE("Reshape", ["x", "shape"], ["y"])])
    model.functions.append(onnx.helper.make_function(*kind, opsets()))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    gc.freeze()  # what other tests left takes long to look through
    with pytest.raises(ModelFileError, match=told):
        read_model(tmp_path / "m.onnx")
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_data_that_is_missing(tmp_path: Path) -> None:
    model = onnx.load(write_onnx(tmp_path / "model.onnx"))
    onnx.save(
        model, tmp_path / "m.onnx", save_as_external_data=True, location="data", size_threshold=0
    )
    (tmp_path / "data").unlink()
    with pytest.raises(
        ModelFileError, match=r"m\.onnx cannot .*data, .*; data that it keeps in other files"
    ):
        read_model(tmp_path / "m.onnx")


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
    call = NODE(f"F{functions - 1}", ["x"], ["y"], domain="d")
    first = call if functions else NODE("Relu", ["x"], ["y"])
    model = onnx.helper.make_model(graph(first, x=(FLOAT, [size])), opset_imports=opsets())
    for n in range(functions):
        inner, kind = (f"F{n - 1}", {"domain": "d"}) if n else ("Relu", {})
        calls = [NODE(inner, ["x"], ["t"], **kind), NODE(inner, ["t"], ["y"], **kind)]
        made = onnx.helper.make_function("d", f"F{n}", ["x"], ["y"], calls, opsets())
        model.functions.append(made)
    file.write_bytes(model.SerializeToString())
    return file


def test_functions_that_grow_without_end(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"come to \d{13} nodes .* at most 1000000"):
        read_model(saved(tmp_path / "a.onnx", 4, functions=40))
    assert read_model(saved(tmp_path / "b.onnx", 4, functions=3)).signature.inputs


def test_a_size_of_many_terms(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="a size of the input 'x' has 20001 terms"):
        read_model(saved(tmp_path / "a.onnx", "a" + "+a" * 20000))
