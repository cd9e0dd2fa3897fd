"""Programs of torch.export: half precision, sizes, weights, and what is refused."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from relax_fusion.equivalence.interpreter import evaluate
from relax_fusion.errors import MissingPackageError, ModelFileError
from relax_fusion.frontends import TensorSpec, read_model
from relax_fusion.frontends.promotion import decompositions
from relax_fusion.frontends.torch import from_exported_program
from relax_fusion.matching.pattern import is_call

from ..support.files import WIDE, WIDTH, program, weights, write_program


def dtypes(mod, op: str) -> list[str]:
    """Return the dtypes of the results of an operator."""
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    return [str(b.var.ty.dtype) for b in bindings if is_call(b.value, op)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
def test_products_have_the_dtype_of_their_operands(dtype: str, bias: bool) -> None:
    if dtype == "bfloat16":
        exported = program("float32", bias).module().to(torch.bfloat16)
        x = torch.ones(2, 3, WIDTH, dtype=torch.bfloat16)
        exported = torch.export.export(exported, (torch.ones(2, 3, dtype=torch.int64), x))
    else:
        exported = program(dtype, bias)
    mod = from_exported_program(exported)
    assert dtypes(mod, "relax.matmul") == [dtype]
    assert "float32" not in mod.script() or dtype == "float32"


def test_convolutions_have_the_dtype_of_their_operands() -> None:
    layer = torch.nn.Conv1d(4, 8, 3).half().eval()
    with torch.no_grad():
        exported = torch.export.export(layer, (torch.ones(2, 4, 9, dtype=torch.float16),))
    mod = from_exported_program(exported)
    assert dtypes(mod, "relax.nn.conv1d") == ["float32"]  # rounded once, behind the sum
    assert dtypes(mod, "relax.astype") == dtypes(mod, "relax.add") == ["float16"]


def test_branches_are_imported_alike() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda v: v @ v, lambda v: v - 1, (x,))

    exported = torch.export.export(Model(), (torch.ones(4, 4, dtype=torch.float16),))
    mod = from_exported_program(exported)
    assert "R.matmul" in mod.script() and 'out_dtype="float32"' not in mod.script()


def test_views_that_negate_have_their_own_numbers() -> None:
    """The sign of such a view is a bit of its own, which TVM's importer does not read."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch._neg_view(torch.full((4,), 2.0)))
            self.k = torch._neg_view(torch.full((4,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w + self.k

    exported = torch.export.export(Model(), (torch.ones(2, 4),))
    mod = from_exported_program(exported)
    (result,) = evaluate(mod["main"], [np.ones((2, 4))])
    np.testing.assert_array_equal(result, np.full((2, 4), -5.0))


class ViewedAttention(torch.nn.Module):
    """Views attention's result by the layout of its kernel, as GPT-2 of transformers does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        out = scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return out.transpose(1, 2).view(-1, x.shape[-1])


def test_attention_is_viewed_by_the_layout_of_its_kernel() -> None:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    exported = torch.export.export(ViewedAttention(), (x,))
    (found,) = evaluate(from_exported_program(exported)["main"], [x.numpy()])
    np.testing.assert_allclose(found, ViewedAttention()(x), rtol=1e-5, atol=1e-6)
    targets = [node.target for node in exported.graph.nodes]
    assert torch.ops.aten.view.default in targets, "the program is as it was"


def test_sizes_and_weights_are_those_of_the_file(tmp_path: Path) -> None:
    model = read_model(write_program(tmp_path / "model.pt2"))
    (ids, x), (hidden, total) = model.signature.inputs, model.signature.outputs
    batch, seq = ids.shape
    assert x == TensorSpec("x", (batch, seq, WIDTH), "float32")
    assert (hidden.name, hidden.shape) == ("output_0", (batch, seq, WIDE))
    assert (total.name, total.shape) == ("output_1", (batch, seq))
    assert model.signature.sizes == {batch: (2, 8), seq: (0, 16)}
    assert list(model.weights) == ["table.weight", "linear.weight", "linear.bias"]
    np.testing.assert_array_equal(model.weights["linear.weight"], weights()["w"].T)
    assert 'mode="fast"' not in model.mod.script()


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_file_cut_short(tmp_path: Path, keep: float) -> None:
    file = write_program(tmp_path / "model.pt2")
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelFileError, match=r"model\.pt2 (is empty|cannot be read as a program)"):
        read_model(file)


def test_an_archive_of_something_else(tmp_path: Path, caplog) -> None:
    file = tmp_path / "model.pt2"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(ModelFileError, match=r"model\.pt2 cannot be read as a program of torch"):
        read_model(file)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]  # PyTorch's traceback


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "model.pt2").write_text("x")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "relax_fusion.frontends.torch", raising=False)
    with pytest.raises(MissingPackageError, match=r"pip install 'relax-fusion\[torch\]'"):
        read_model(tmp_path / "model.pt2")


def test_outputs_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads a file must have imported what defines them, as the writing one had."""
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> outputs.BaseModelOutput:
            return outputs.BaseModelOutput(last_hidden_state=x + 1)

    path, imported = tmp_path / "model.pt2", []
    torch.export.save(torch.export.export(Model(), (torch.ones(2),)), path)
    monkeypatch.setattr("relax_fusion.frontends.torch.import_module", imported.append)
    assert [spec.shape for spec in read_model(path).signature.outputs] == [(2,)]
    assert imported == ["transformers.modeling_outputs"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers.modeling_outputs", None)
    with pytest.raises(MissingPackageError, match="pip install transformers"):
        read_model(path)


def test_an_operator_that_is_registered_late_is_written_out() -> None:
    assert decompositions()
    with torch.library._scoped_library("late", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
        assert torch.ops.late.twice.default in decompositions()
