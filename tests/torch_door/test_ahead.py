"""Models compiled ahead of time: called, saved and loaded."""

from __future__ import annotations

import json
import pickle

import pytest

torch = pytest.importorskip("torch")

import relax_fusion.torch as door  # noqa: E402
from relax_fusion.errors import ModelFileError, PipelineError, RelaxFusionError  # noqa: E402


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
    assert loaded.tensors["first.weight"] is loaded.tensors["second.weight"]
    for rows in (3, 12):
        same(loaded, theirs, rows)
    torch.testing.assert_close(loaded.tensors["cache"], theirs.cache)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a, k: ((a[0].double(), a[1]), k), ValueError, r"float32 \(1 to 12\)x8 .*float64"),
        (lambda a, k: ((a[0][:, :4], a[1]), k), ValueError, r"input 0 .* not of .* 2x4"),
        (lambda a, k: ((torch.zeros(13, 8), a[1]), k), ValueError, r"\(1 to 12\)x8.*13x8"),
        (lambda a, k: ((torch.zeros(0, 8), a[1]), k), ValueError, "0x8"),
        (lambda a, k: ((1.0, a[1]), k), ValueError, "input 0 must be a tensor.*not float"),
        (lambda a, k: (a, {}), TypeError, "the model takes"),
    ],
)
def test_wrong_arguments_are_named(change, error, text):
    _, compiled = made()
    args, kwargs = change(*arguments())
    with pytest.raises(error, match=text):
        compiled(*args, **kwargs)


def test_another_number_than_the_examples_is_refused(tmp_path):
    class Scaled(torch.nn.Module):
        def forward(self, x, n, mask=None):
            return x * n + 1 if mask is None else x

    compiled = door.compile(Scaled().eval(), (torch.ones(4, 4), 2))
    compiled.save(tmp_path / "kept")
    for each in (compiled, door.load(tmp_path / "kept")):
        torch.testing.assert_close(each(torch.ones(4, 4), 2), torch.full((4, 4), 3.0))
        with pytest.raises(ValueError, match=r"input 1 is 3; the model was compiled with 2"):
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


def test_a_damaged_library_is_refused(tmp_path):
    _, compiled = made()
    compiled.save(tmp_path / "kept")
    library = tmp_path / "kept" / "model.so"
    library.write_bytes(library.read_bytes()[:1000])
    with pytest.raises(ModelFileError, match=r"model.so has another checksum; it is damaged"):
        door.load(tmp_path / "kept")


def test_a_compiled_model_is_not_pickled():
    _, compiled = made()
    with pytest.raises(TypeError, match=r"use save\(\) and load\(\)"):
        pickle.dumps(compiled)


def test_what_cannot_be_compiled_is_named():
    class Spectrum(torch.nn.Module):
        def forward(self, x):
            return torch.fft.rfft(x).real

    with pytest.raises(RelaxFusionError, match=r"operators cannot be compiled.*_fft_r2c"):
        door.compile(Spectrum().eval(), (torch.randn(8),))


def test_a_module_in_training_is_refused():
    with pytest.raises(PipelineError, match=r"call module.eval\(\) first"):
        door.compile(Cell(), *arguments())


def test_no_module_is_refused():
    with pytest.raises(PipelineError, match=r"module is function; must be a torch.nn.Module"):
        door.compile(lambda x: x, (torch.ones(1),))


def test_nothing_is_overwritten(tmp_path):
    _, compiled = made()
    with pytest.raises(FileExistsError, match="choose another directory"):
        compiled.save(tmp_path)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(OSError, match=r"model\.json"):
        door.load(tmp_path)
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(ModelFileError, match="holds no compiled model"):
        door.load(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(ModelFileError, match="has version 99; this package reads 1"):
        door.load(tmp_path)
