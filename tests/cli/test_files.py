"""Models from files, through `main`: compiling them, and calling them with arrays."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from relax_fusion.cli import arrays as arrays_module
from relax_fusion.cli import main
from relax_fusion.cli.arrays import check_new, read_inputs, write_outputs
from relax_fusion.cli.console import CliError
from relax_fusion.frontends import Signature, TensorSpec, read_model
from relax_fusion.models import config_from_dict, export, random_weights

from ..support.chain_reference import evaluate
from ..support.commands import links
from ..support.files import WIDTH, arrays, expected, write_onnx, write_program

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """What ``compile`` makes of an ONNX file, with a bound."""
    folder = tmp_path_factory.mktemp("onnx")
    file = write_onnx(folder / "model.onnx")
    assert main(["compile", str(file), "-o", str(folder / "out"), "--bound", "seq=16", "-q"]) == 0
    return folder / "out"


@pytest.fixture
def error(capsys):
    """Return what the one line on stderr says."""

    def read() -> str:
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("relax-fusion: error: ")
        assert sum(line.startswith("relax-fusion: error: ") for line in lines) == 1
        return lines[-1]

    return read


def saved(folder: Path, given: dict[str, np.ndarray]) -> list[str]:
    """Write arrays; return the arguments that name them."""
    names = {name: folder / f"{n}=.npy" for n, name in enumerate(given)}
    for name, path in names.items():
        np.save(path, given[name])
    return [text for name, path in names.items() for text in ("--input", f"{name}={path}")]


def assert_right(found: list[np.ndarray], given: dict[str, np.ndarray]) -> None:
    for array, want in zip(found, expected(given), strict=True):
        np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-5)


# --- compile and explain ----------------------------------------------------------------------


@links
def test_weights_and_signature_are_kept(compiled: Path) -> None:
    manifest = json.loads((compiled / "manifest.json").read_text())
    assert manifest["config"] is None and manifest["functions"] == ["main"]
    sizes = {"batch": [0, None], "seq": [0, 16]}
    assert manifest["signature"]["sizes"] == sizes
    with safe_open(compiled / "params.safetensors", framework="numpy") as kept:
        assert set(kept.keys()) == {"table", "w"} == {p["name"] for p in manifest["parameters"]}


@links
def test_a_program_of_torch_export(tmp_path: Path, capsys) -> None:
    file, out = write_program(tmp_path / "Model.PT2", "float16"), tmp_path / "out"
    assert main(["compile", str(file), "-o", str(out), "--json", "-q"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["source"] == "Model" and facts["dtype"] == "float16" and facts["fused"]
    given = arrays(dtype="float16")
    named = saved(tmp_path, {"ids": given["ids=1"], "x": given["x.in"]})
    assert main(["run", str(out), *named, "--output", str(tmp_path / "got.npz"), "-q"]) == 0
    with np.load(tmp_path / "got.npz") as got:
        np.testing.assert_allclose(got["output_0"], expected(given)[0], rtol=4e-3, atol=4e-3)


def test_explain_a_file(tmp_path: Path, capsys) -> None:
    file = write_onnx(tmp_path / "model.onnx")
    assert main(["explain", str(file), "--coverage", "-q", "--bound", "batch=4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("model, float32, ids=1 [batch, seq], x.in [batch, seq, 64], for ")
    assert "1 chains fused, no operators of transformers left to TVM" in text
    assert "batch = 4" in text


@pytest.mark.parametrize(
    "options, says",
    [
        (["--dtype", "float16"], "--dtype is for models from a configuration"),
        (["--quantization", "q4f16_1"], "--quantization is for models from a configuration"),
        (["--batch", "1"], "--batch is for models from a configuration"),
        (["--max-seq-len", "8"], "--max-seq-len is for models from a configuration"),
        (["--bound", "n=8"], "--bound names 'n', which is no size"),
        (["--bound", "seq"], "not of the form NAME=N"),
        (["--bound", "seq=0"], "'0' is not an integer between 1"),
    ],
)
def test_options_that_do_not_fit_a_file(tmp_path: Path, error, options: list, says: str) -> None:
    file = write_onnx(tmp_path / "model.onnx")
    assert main(["explain", str(file), *options]) == 2
    assert says in error()


def test_bounds_stay_in_what_was_exported(tmp_path: Path, error) -> None:
    file = write_program(tmp_path / "model.pt2")
    (name,) = [n for n, limits in read_model(file).signature.sizes.items() if limits[0] == 2]
    for bound in ("1", "9"):
        assert main(["explain", str(file), "--bound", f"{name}={bound}"]) == 2
        assert f"was exported for {name} from 2 to 8" in error()


def test_bounds_are_for_files(error) -> None:
    assert main(["explain", "demo-gpt2", "--bound", "seq_len=8"]) == 2
    assert "demo-gpt2 takes --max-seq-len and --batch" in error()


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("missing.onnx", None, ": No such file or directory"),
        ("empty.pt2", b"", "empty.pt2 is empty"),
        ("text.onnx", b"hello", "text.onnx cannot be read as ONNX"),
        ("text.pt2", b"hello", "text.pt2 cannot be read as a program of torch.export"),
        ("model.pt", b"\x80\x02", "files of models end in .onnx or .pt2"),
        ("model", b"\x80\x02", "cannot be read as JSON"),
    ],
)
def test_files_that_hold_no_model(tmp_path: Path, error, name: str, content, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["compile", str(tmp_path / name), "-o", str(tmp_path / "out")]) == 1
    assert says in error()
    assert not (tmp_path / "out").exists()


@links
@pytest.mark.parametrize("masked_lm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_encoder_takes_arrays(tmp_path: Path, capsys, masked_lm: bool) -> None:
    config = {
        "architectures": ["BertForMaskedLM" if masked_lm else "BertModel"],
        "model_type": "bert",
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    out, ids = tmp_path / "out", np.ones((1, 5), "int32")
    assert main(["compile", str(tmp_path / "config.json"), "-o", str(out), "-q"]) == 0
    np.savez(tmp_path / "in.npz", input_ids=ids, token_type_ids=ids * 0, attention_mask=ids)
    arguments = ["--input", str(tmp_path / "in.npz"), "--output", str(tmp_path / "got.npz")]
    assert main(["run", str(out), *arguments, "-q", "--seed", "3"]) == 0
    with np.load(tmp_path / "got.npz") as got:
        (name,) = got
        assert (name, got[name].shape) == (
            ("logits", (1, 5, 32)) if masked_lm else ("hidden_states", (1, 5, 64))
        )
        exported = export(config_from_dict(config), max_seq_len=8)
        weights = tuple(random_weights(exported, 3))
        (exact,) = evaluate(exported.mod["encode"], [ids, ids * 0, ids, weights])
        np.testing.assert_allclose(got[name], exact, rtol=1e-5, atol=1e-5)
    np.savez(tmp_path / "in.npz", input_ids=np.ones((1, 9), "int32"))
    assert main(["run", str(out), *arguments[:2]]) == 2


# --- run --------------------------------------------------------------------------------------


@links
@pytest.mark.parametrize("batch, seq", [(2, 3), (1, 16), (3, 1)])
def test_arrays_in_arrays_out(compiled: Path, tmp_path: Path, batch: int, seq: int) -> None:
    given = arrays(batch, seq)
    out = tmp_path / "deep" / "out"
    assert main(["run", str(compiled), *saved(tmp_path, given), "--output", str(out), "-q"]) == 0
    names = sorted(path.name for path in out.iterdir())
    assert names == ["hidden_states.npy", "sum.npy"]
    assert_right([np.load(out / name) for name in names], given)


@links
def test_an_archive_of_inputs_and_one_of_outputs(compiled: Path, tmp_path: Path, capsys) -> None:
    given = arrays()
    np.savez(tmp_path / "in=.npz", **given)
    arguments = ["--input", str(tmp_path / "in=.npz"), "--output", str(tmp_path / "out.npz")]
    assert main(["run", str(compiled), *arguments, "--json", "-q"]) == 0
    told = json.loads(capsys.readouterr().out)["outputs"]
    assert told["sum"] == {"dtype": "float32", "shape": [2, 3]}
    with zipfile.ZipFile(tmp_path / "out.npz") as got:
        assert got.namelist() == ["hidden/states.npy", "sum.npy"]
    with np.load(tmp_path / "out.npz") as got:
        assert_right([got["hidden/states"], got["sum"]], given)
    assert main(["run", str(compiled), *arguments]) == 2
    assert "exists already" in capsys.readouterr().err


@links
@pytest.mark.parametrize("order", ["fortran", "strided", "big-endian", "empty"])
def test_arrays_of_any_layout(compiled: Path, tmp_path: Path, capsys, order: str) -> None:
    given = arrays(2, 0 if order == "empty" else 3)
    change = {
        "fortran": np.asfortranarray,
        "strided": lambda a: a,
        "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
        "empty": lambda a: a,
    }[order]
    named = saved(tmp_path, {name: change(array) for name, array in given.items()})
    assert main(["run", str(compiled), *named, "--output", str(tmp_path / "out.npz")]) == 0
    with np.load(tmp_path / "out.npz") as got:
        assert_right([got["hidden/states"], got["sum"]], given)


@links
def test_tokens_beyond_the_table_read_its_last_row(compiled: Path, tmp_path: Path) -> None:
    given = arrays()
    given["ids=1"][0, 0] = 10**12
    named = saved(tmp_path, given)
    assert main(["run", str(compiled), *named, "--output", str(tmp_path / "out.npz")]) == 0
    with np.load(tmp_path / "out.npz") as got:
        assert_right([got["hidden/states"], got["sum"]], given)


@links
@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--prompt-ids", "1"], "generates no text; give its inputs by --input"),
        (["--max-new-tokens", "4"], "generates no text"),
        (["--seed", "1"], "--seed is for random weights"),
        ([], "needs --input for ids=1 int64 [batch, seq], x.in float32 [batch, seq, 64]"),
        (["--input", "nothing"], "neither NAME=FILE.npy nor FILE.npz"),
        (["--input", "y=a.npy"], "no input 'y'; it takes ids=1 int64 [batch, seq], x.in"),
        (["--output", "a.npy"], "must be a directory, or a file that ends in .npz"),
    ],
)
def test_run_refuses_arguments(compiled: Path, error, arguments: list, says: str) -> None:
    assert main(["run", str(compiled), *arguments]) == 2
    assert says in error()


SIGNATURE = Signature(
    (
        TensorSpec("a", ("n", 4), "float32"),
        TensorSpec("b", ("n", "m"), "int32"),
        TensorSpec("h", (), "bfloat16"),
    ),
    (),
    {"n": (2, 8), "m": (0, None)},
)


def given_arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    plain = {"a": np.zeros((3, 4), "float32"), "b": np.zeros((3, 5), "int32")}
    return plain | {"h": np.array(1.5, ml_dtypes.bfloat16)} | changes


@pytest.mark.parametrize(
    "name, array, says",
    [
        ("a", np.zeros((3, 4)), "'a' is float64 [3, 4]; must be float32 [n, 4]"),
        ("a", np.zeros((3, 4), "complex64"), "'a' is complex64 [3, 4]; must be float32 [n, 4]"),
        ("a", np.zeros((3, 4), "U2"), "'a' is <U2 [3, 4]; must be float32 [n, 4]"),
        ("a", np.zeros((3, 5), "float32"), "'a' has shape [3, 5]; must be [n, 4]"),
        ("a", np.zeros(4, "float32"), "'a' has shape [4]; must be [n, 4]"),
        ("a", np.zeros((1, 4), "float32"), "'a' has shape [1, 4]; must be [n, 4] with n 2 to 8"),
        ("a", np.zeros((9, 4), "float32"), "'a' has shape [9, 4]; must be [n, 4] with n 2 to 8"),
        ("b", np.zeros((2, 5), "int32"), "'b' has shape [2, 5]; must be [n, m], and n is 3 in 'a'"),
        ("h", np.zeros((), "float16"), "'h' is float16 []; must be bfloat16 []"),
    ],
)
def test_an_array_that_does_not_fit(tmp_path: Path, name: str, array, says: str) -> None:
    texts = saved(tmp_path, given_arrays(**{name: array}))[1::2]
    with pytest.raises(CliError) as caught:
        read_inputs(texts, SIGNATURE)
    assert says in str(caught.value)


def test_arrays_are_brought_into_the_form_that_tvm_takes(tmp_path: Path) -> None:
    wrong = {"a": np.ones((4, 3), ">f4").T, "b": np.ones((6, 5), "i4")[::2]}
    a, b, h = read_inputs(saved(tmp_path, given_arrays(**wrong))[1::2], SIGNATURE)
    assert a.flags.c_contiguous and b.flags.c_contiguous and a.dtype == "float32" and a.all()
    assert h.dtype == ml_dtypes.bfloat16 and h.shape == () and float(h) == 1.5


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.npy", b"", "cannot be read as an array (.npy): EOFError"),
        ("a.npy", b"hello", "cannot be read as an array (.npy)"),
        ("a.npz", b"PK\3\4", "cannot be read as arrays (.npz)"),
        ("a.npz", b"", "cannot be read as arrays (.npz)"),
    ],
)
def test_files_that_hold_no_array(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    path = str(tmp_path / name)
    with pytest.raises(CliError) as caught:
        read_inputs([path if name.endswith("z") else f"a={path}"], SIGNATURE)
    assert says in str(caught.value) and name in str(caught.value)


def test_an_archive_that_unpacks_to_more_than_the_machine_has(tmp_path: Path, monkeypatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(2**16, "float32"))
    monkeypatch.setattr(arrays_module.os, "sysconf", lambda _: 2**8)
    with pytest.raises(CliError, match="unpacked it has 262272 bytes, this machine 65536"):
        read_inputs([str(tmp_path / "a.npz")], SIGNATURE)


def test_damaged_and_foreign_arrays(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.zeros((3, 4), "float32"))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CliError, match=r"a\.npy cannot be read"):
        read_inputs([f"a={file}"], SIGNATURE)
    np.save(file, np.array([{}], object))
    with pytest.raises(CliError, match="Object arrays cannot be loaded"):
        read_inputs([f"a={file}"], SIGNATURE)
    file.write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': ")
    with file.open("ab") as stream:
        stream.write(b"(999999999999999,), }".ljust(117 - 45) + b"\n")
    with pytest.raises(CliError, match=r"a\.npy cannot be read"):
        read_inputs([f"a={file}"], SIGNATURE)
    np.savez(tmp_path / "a.npz", a=np.zeros(1))
    with pytest.raises(CliError, match="give it as --input"):
        read_inputs([f"a={tmp_path / 'a.npz'}"], SIGNATURE)
    with pytest.raises(OSError, match="no regular file"):
        read_inputs([f"a={tmp_path}"], SIGNATURE)


def test_an_input_that_is_given_twice(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", **given_arrays())
    texts = [str(tmp_path / "all.npz"), *saved(tmp_path, given_arrays())[1:2]]
    with pytest.raises(CliError, match="the input 'a' is given twice"):
        read_inputs(texts, SIGNATURE)


def test_outputs_go_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert check_new(str(tmp_path / "empty")) == tmp_path / "empty"
    (tmp_path / "out.npz").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for name in ("out.npz", "full"):
        with pytest.raises(CliError, match="exists already"):
            check_new(str(tmp_path / name))


def test_outputs_of_any_name_and_type(tmp_path: Path) -> None:
    half = np.array([1.5, -2], ml_dtypes.bfloat16)
    outputs = {"file": half, "../a": np.ones(2), "a/../a": np.zeros(2), ".._a": np.ones(1)}
    write_outputs(tmp_path / "out.npz", outputs)
    with np.load(tmp_path / "out.npz") as got:
        assert got["file"].dtype == "float32" and list(got["file"]) == [1.5, -2]
        assert set(got) == set(outputs)
    write_outputs(tmp_path / "out", outputs)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [".._a.npy", ".._a_.npy", "a_.._a.npy", "file.npy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.npz"]


@pytest.mark.parametrize("name", ["out.npz", "out"])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch, name: str) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(arrays_module.np.lib.format, "write_array", fail)
    monkeypatch.setattr(arrays_module.np, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        write_outputs(tmp_path / "new" / name, {"a": np.ones((WIDTH,))})
    assert list(tmp_path.iterdir()) == []
