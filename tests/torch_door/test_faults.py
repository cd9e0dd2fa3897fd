"""An operator that cannot be compiled: it is found, named and left, and the rest is compiled."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")

from relax_fusion.torch import pieces  # noqa: E402


@pytest.fixture(autouse=True)
def fresh(quick_to_compile, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, "relax_fusion.torch")
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def failing(monkeypatch):
    """Let compiling fail where all of some operators are; return how often it was tried."""
    tried, build = [], pieces.build

    def of(*names):
        def fails(mod, *args, **kwargs):
            tried.append(mod)
            if all(f"R.{name}(" in mod.script() for name in names):
                raise RuntimeError("no such kernel\nand a page of frames")
            return build(mod, *args, **kwargs)

        monkeypatch.setattr(pieces, "build", fails)
        return tried

    return of


def model(x):
    for _ in range(2):
        x = torch.tanh(torch.relu(x @ x) - 1) @ x
        x = torch.sigmoid(x * 2) @ x
    values, places = x.topk(3)
    return values + places


def agree(model=model, **options):
    x = torch.randn(8, 8) / 4
    with torch.no_grad():
        fast = torch.compile(model, backend="relax_fusion", options=options)
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["tanh"], "2 x aten.tanh.default"),
        (["topk"], "1 x aten.topk.default"),
        (["tanh", "sigmoid"], "2 x aten.sigmoid.default"),  # which fails beside the other only
    ],
)
def test_the_rest_is_compiled(failing, caplog, names, left):
    tried = failing(*names)
    with pytest.warns(RuntimeWarning, match=rf"{left} stays in PyTorch.*: RuntimeError: no s") as w:
        agree()
    assert w[0].filename == __file__
    assert len(tried) < 16
    assert f"{left} cannot be compiled: RuntimeError: no such kernel\n" in caplog.text
    assert "pieces compiled" in caplog.text or names == ["topk"]
    tried.clear()
    caplog.clear()
    torch._dynamo.reset()
    agree()  # what was found is kept with the graph
    assert not tried and left in caplog.text and "taken from the cache" in caplog.text


def test_an_operator_that_cannot_be_imported_is_found(monkeypatch, caplog):
    imported = pieces.import_graph

    def fails(module, *args):
        if any(node.target is torch.ops.aten.tanh.default for node in module.graph.nodes):
            raise pieces.Refusal("a size has no form")
        return imported(module, *args)

    monkeypatch.setattr(pieces, "import_graph", fails)
    with pytest.warns(RuntimeWarning, match=r"2 x aten\.tanh\.default stays"):
        agree()
    assert "3 pieces compiled" in caplog.text


def test_strict_names_it(failing):
    failing("tanh")
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(Exception, match=r"strict=True, .* 2 x aten\.tanh\.default cannot be comp"),
    ):
        agree(strict=True)


def test_where_nothing_can_be_compiled_everything_is_left(failing, caplog):
    tried = failing()
    with pytest.warns(RuntimeWarning) as told:
        agree(lambda x: x.tanh().sigmoid().relu().exp().cos().sin().abs().log1p().neg())
    assert len(told) == pieces.MOST_ROUNDS + 1 and "a piece stays in PyTorch" in str(told[-1])
    assert "0 pieces compiled" in caplog.text and len(tried) < 30
