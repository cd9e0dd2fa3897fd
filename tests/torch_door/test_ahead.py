"""Models compiled ahead of time: called, saved and loaded."""

from __future__ import annotations

import json
import pickle
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

import relax_fusion.torch as door  # noqa: E402
from relax_fusion.errors import ModelFileError, PipelineError, RelaxFusionError  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_to_compile")


class Cell(torch.nn.Module):
    """Has tied weights, a cache whose rows are written, and a buffer that is added to."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("cache", torch.zeros(16, 8))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x, rows, *, scale):
        self.cache.index_copy_(0, rows, x)
        self.total.add_(x.sum(0))
        y = self.second(torch.relu(self.first(self.norm(x))))
        return {"y": y * scale, "all": (self.cache.sum(0), self.total + 0)}

    @staticmethod
    def norm(x):
        return torch.nn.functional.layer_norm(x, (8,))


def arguments(rows=2):
    places = torch.arange(rows)
    return (torch.randn(rows, 8), places), {"scale": torch.tensor(2.0)}


def made(dynamic=True):
    torch.manual_seed(0)
    model, (args, kwargs) = Cell().eval(), arguments()
    n = torch.export.Dim("n", min=1, max=12)
    shapes = {"x": {0: n}, "rows": {0: n}, "scale": None} if dynamic else None
    return model, door.compile(model, args, kwargs, dynamic_shapes=shapes)


def same(compiled, model, rows):
    args, kwargs = arguments(rows)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args, **kwargs), model(*args, **kwargs))


def test_a_model_is_called_saved_and_loaded(tmp_path):
    model, compiled = made()
    theirs = Cell().eval()
    theirs.load_state_dict(model.state_dict())
    for rows in (2, 5):
        same(compiled, theirs, rows)
    assert compiled.tensors["cache"] is model.cache  # held, not copied
    compiled.save(tmp_path / "kept")
    loaded = door.load(tmp_path / "kept")
    sizes = "x float32 [1 to 12, 8], rows int64 [1 to 12], scale float32 []"
    assert repr(loaded) == repr(compiled) == f"<compiled Cell on cpu: {sizes}>"
    assert loaded.tensors["first.weight"] is loaded.tensors["second.weight"]
    for rows in (3, 12):
        same(loaded, theirs, rows)
    torch.testing.assert_close(loaded.tensors["cache"], theirs.cache)


X, ROWS, SCALE = torch.zeros(3, 8), torch.arange(3), torch.tensor(2.0)

CALLS = {
    "dtype": ((X.double(), ROWS), {}, "argument 'x' is of torch.float64; must be of torch.float32"),
    "width": ((X[:, :4], ROWS), {}, "dimension 1 of argument 'x' is 4; must be 8"),
    "rank": ((X[0], ROWS), {}, r"argument 'x' is of 1 dimensions, \[8\]; must be of 2"),
    "long": ((torch.zeros(13, 8), ROWS), {}, "dimension 0 of .* 'x' is 13; must be 1 to 12"),
    "empty": ((torch.zeros(0, 8), ROWS), {}, "dimension 0 of argument 'x' is 0; must be 1 to 12"),
    "tied": (
        (X, ROWS[:2]),
        {},
        "of argument 'rows' is 2; must be 3, as dimension 0 of argument 'x' is 3",
    ),
    "device": ((X.to("meta"), ROWS), {}, "argument 'x' is on meta; must be on cpu"),
    "a number": ((1.0, ROWS), {}, "argument 'x' is a float; must be a tensor of torch.float32"),
    "nothing": ((X, None), {}, "argument 'rows' is a NoneType; must be a tensor of torch.int64"),
    "nested": ((X, [ROWS]), {}, r"argument 'rows' is nested as \[\*\]; must be \*"),
    "missing": ((X,), {}, "argument 'rows' is missing; the model takes x, rows, scale"),
    "unknown": (
        (X, ROWS),
        {"bias": 1},
        "'bias' is unknown; the model was compiled with x, rows, sc",
    ),
    "many": ((X, ROWS, X), {}, "3 arguments are passed by place; the model takes 2"),
    "twice": ((X, ROWS), {"x": X}, "argument 'x' is passed both by place and by name"),
}


@pytest.fixture(scope="module")
def cell():
    return made()[1]


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_named(cell, name):
    args, kwargs, text = CALLS[name]
    with pytest.raises((TypeError, ValueError), match=text):
        cell(*args, **kwargs, scale=SCALE)


def test_arguments_can_be_passed_by_name(cell):
    expected = cell(X, ROWS, scale=SCALE)["y"]
    torch.testing.assert_close(cell(scale=SCALE, rows=ROWS, x=X)["y"], expected)


def test_sizes_that_are_made_of_others_are_named():
    class Halves(torch.nn.Module):
        def forward(self, x, pair):
            return pair["both"][: 2 * x.shape[0]].view(x.shape[0], 2, 4).sum(1) + x[:, :4]

    n = torch.export.Dim("n", min=2, max=9)
    shapes = {"x": {0: n}, "pair": {"both": {0: 2 * n}}}
    example = (torch.ones(3, 8), {"both": torch.ones(6, 4)})
    compiled = door.compile(Halves().eval(), example, dynamic_shapes=shapes)
    x, both = torch.randn(5, 8), torch.randn(10, 4)
    torch.testing.assert_close(compiled(x, {"both": both}), Halves()(x, {"both": both}))
    text = r"0 of argument \"pair\['both'\]\" is 9; must be 10, as dimension 0 of argument 'x' is 5"
    with pytest.raises(ValueError, match=text):
        compiled(x, {"both": both[:9]})


def test_what_tvm_raises_is_one_error():
    n = torch.export.Dim("n", min=2, max=9)  # which no argument has as a size
    with pytest.raises(RelaxFusionError, match=r"1 x aten\.relu\.default cannot be compiled: \w+E"):
        door.compile(torch.nn.ReLU().eval(), (torch.ones(6, 4),), dynamic_shapes=({0: 2 * n},))


class Pair(NamedTuple):
    """Is made at the top of a module, as classes are that can be kept."""

    first: torch.Tensor
    second: tuple[torch.Tensor, int]


@dataclass
class Parts:
    """Is known to PyTorch."""

    first: torch.Tensor
    second: torch.Tensor | None = None


torch.export.register_dataclass(Parts)


class Returning(torch.nn.Module):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, x):
        return self.result(torch.relu(x @ x))


def output(y):
    return sys.modules["transformers.modeling_outputs"].BaseModelOutput(
        last_hidden_state=y, hidden_states=(y + 1,)
    )


RESULTS = {
    "a named tuple": lambda y: Pair(y, (y + 1, 2)),
    "a dataclass": lambda y: Parts(y),
    "of transformers": output,
    "of torch": lambda y: torch.ops.aten.max.dim(y, 1),
    "an ordered dict": lambda y: OrderedDict(b=y, a=[y + 1, {"c": y * 2}]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_of_the_same_type(tmp_path, name):
    if name == "of transformers":
        pytest.importorskip("transformers.modeling_outputs")
    model, x = Returning(RESULTS[name]).eval(), torch.randn(4, 4)
    compiled = door.compile(model, (x,))
    compiled.save(tmp_path / "kept")
    for each in (compiled, door.load(tmp_path / "kept")):
        found, expected = each(x), model(x)
        assert type(found) is type(expected)
        values = map(torch.utils._pytree.tree_leaves, (found, expected))
        torch.testing.assert_close(*(v if isinstance(v, list) else list(v) for v in values))


def test_a_class_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    class Local(NamedTuple):
        first: torch.Tensor

    compiled = door.compile(Returning(Local).eval(), (torch.ones(2, 2),))
    assert isinstance(compiled(torch.ones(2, 2)), Local)
    with pytest.raises(RelaxFusionError, match=r"Local cannot be kept in a file; a model that is"):
        compiled.save(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    door.compile(Returning(RESULTS["a named tuple"]).eval(), (torch.ones(2, 2),)).save(
        tmp_path / "x"
    )
    monkeypatch.delitem(globals(), "Pair")
    with pytest.raises(
        ModelFileError, match=r"returns .*test_ahead:Pair, which cannot be imported"
    ):
        door.load(tmp_path / "x")


def test_a_class_that_pytorch_does_not_know_is_named():
    @dataclass
    class Unknown:
        first: torch.Tensor

    with pytest.raises(
        RelaxFusionError, match=r"returns .*Unknown; a compiled one .*register_data"
    ):
        door.compile(Returning(Unknown).eval(), (torch.ones(2, 2),))


class Int8(torch.nn.Module):
    def __init__(self):
        super().__init__()
        dtype, least = (torch.int8, -127) if type(self) is Int8 else (torch.uint8, 0)
        self.register_buffer("codes", torch.randint(least, least + 254, (128, 64), dtype=dtype))
        self.register_buffer("scale", torch.rand(128, 1) / 999)

    def weight(self, dtype):
        return self.codes.to(dtype) * self.scale

    def forward(self, x):
        return torch.nn.functional.silu(torch.nn.functional.linear(x, self.weight(x.dtype)))


class Int4(Int8):
    def weight(self, dtype):
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)
        return (codes.to(dtype) - 8) * self.scale


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_codes_of_quantised_weights_are_what_kernels_read(kind):
    model, x = kind().eval(), torch.randn(3, 64 if kind is Int8 else 128)
    compiled = door.compile(model, (x,))
    torch.testing.assert_close(compiled(x), model(x))
    text = compiled.report.text()
    assert "matmul NT packed" in text or "fused_dequantize_matmul" in text
    model.codes.add_(1)
    torch.testing.assert_close(compiled(x), model(x))


def test_another_number_than_the_examples_is_refused(tmp_path):
    class Scaled(torch.nn.Module):
        def forward(self, x, n, mask=None):
            return x * n + 1 if mask is None else x

    compiled = door.compile(Scaled().eval(), (torch.ones(4, 4), 2))
    compiled.save(tmp_path / "kept")
    for each in (compiled, door.load(tmp_path / "kept")):
        torch.testing.assert_close(each(torch.ones(4, 4), 2), torch.full((4, 4), 3.0))
        with pytest.raises(ValueError, match=r"argument 'n' is 3; the model was compiled with 2"):
            each(torch.ones(4, 4), 3)


def test_arguments_by_name_and_results_that_are_no_tensors(tmp_path):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("whole", torch.arange(8.0))
            self.register_buffer("part", self.whole[2:6])

        def forward(self, x, *, a, b):
            return x * a - b + self.whole.sum() + self.part, None, 3

    model, x = Two().eval(), torch.randn(4)
    a, b = torch.tensor(2.0), torch.tensor(5.0)
    compiled = door.compile(model, (x,), {"a": a, "b": b})
    compiled.save(tmp_path / "kept")
    for each in (compiled, door.load(tmp_path / "kept")):
        found, expected = each(x, b=b, a=a), model(x, b=b, a=a)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1:] == (None, 3)


def test_rows_that_are_counted_are_looked_up_at_any_length():
    class Masked(torch.nn.Module):  # as masks of transformers are made
        def forward(self, mask):
            rows, keys = torch.arange(mask.shape[0]), torch.arange(mask.shape[1]) + 0
            return mask[rows[:, None], keys * 1].float() * 2

    n = torch.export.Dim("n", min=2, max=64)
    model, mask = Masked().eval(), torch.rand(2, 9) > 0.5
    compiled = door.compile(model, (mask,), dynamic_shapes=({1: n},))
    for each in (mask, torch.rand(2, 33) > 0.5):
        torch.testing.assert_close(compiled(each), model(each))


def test_a_damaged_library_is_refused(cell, tmp_path):
    cell.save(tmp_path / "kept")
    library = tmp_path / "kept" / "model.so"
    library.write_bytes(library.read_bytes()[:1000])
    with pytest.raises(ModelFileError, match=r"model.so has another checksum; it is damaged"):
        door.load(tmp_path / "kept")


def test_a_compiled_model_is_not_pickled(cell):
    with pytest.raises(TypeError, match=r"use save\(\) and load\(\)"):
        pickle.dumps(cell)


def test_what_cannot_be_compiled_is_named():
    class Spectrum(torch.nn.Module):
        def forward(self, x):
            return torch.fft.rfft(x).real

    with pytest.raises(RelaxFusionError, match=r"operators cannot be compiled.*_fft_r2c"):
        door.compile(Spectrum().eval(), (torch.randn(8),))


def test_a_module_in_training_is_refused():
    with pytest.raises(PipelineError, match=r"call module.eval\(\) first"):
        door.compile(Cell(), *arguments())


def test_options_of_calls_are_refused():
    with pytest.raises(PipelineError, match=r"option dryrun is torch\.compile's"):
        door.compile(Cell().eval(), *arguments(), options={"dryrun": True})


def test_no_module_is_refused():
    with pytest.raises(PipelineError, match=r"module is function; must be a torch.nn.Module"):
        door.compile(lambda x: x, (torch.ones(1),))


def test_nothing_is_overwritten(cell, tmp_path):
    with pytest.raises(FileExistsError, match="choose another directory"):
        cell.save(tmp_path)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(OSError, match=r"model\.json"):
        door.load(tmp_path)
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(ModelFileError, match="holds no compiled model"):
        door.load(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(ModelFileError, match="has version 99; this package reads 3"):
        door.load(tmp_path)
