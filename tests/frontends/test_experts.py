"""Mixtures of experts as transformers 5 exports them: rows sorted by expert, and put back."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import tvm
from torch.export import Dim

from relax_fusion.frontends.torch import from_exported_program

from ..support.quick import machine, quickly
from ..support.slow import quick_if

pytest.importorskip("transformers.integrations.moe")
EXPERTS, CHOSEN, WIDTH, WIDE = 5, 2, 12, 8


class Experts(torch.nn.Module):
    """A linear layer of each expert, with what is between sorting and putting back to vary."""

    def __init__(self, swapped: bool = True, between: str = "", bins: int = EXPERTS) -> None:
        super().__init__()
        shape = (EXPERTS, WIDE, WIDTH) if swapped else (EXPERTS, WIDTH, WIDE)
        gen = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(shape, generator=gen))
        self.bias = torch.nn.Parameter(torch.randn((EXPERTS, WIDE), generator=gen))
        self.swapped, self.between, self.bins = swapped, between, bins

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = scores.topk(CHOSEN).indices if self.between != "given" else scores.long()
        flat = ids.reshape(-1)
        ordered, perm = torch.sort(flat)
        counts = torch.histc(ordered.float(), bins=self.bins, min=0, max=self.bins - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        ends = ends if self.bins == EXPERTS else ends[:EXPERTS]
        weight = self.weight.transpose(-2, -1) if self.swapped else self.weight
        rows = x[perm // CHOSEN]
        y = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
        y = y + self.bias[ordered.clamp(max=EXPERTS - 1) if self.between == "given" else ordered]
        if self.between == "rows":
            y = y - y.cumsum(0)
        if self.between == "number":
            y = y * perm[:, None]
        back = torch.empty_like(perm)
        back[perm] = torch.arange(perm.size(0))
        y = y[back] if self.between != "sorted" else y
        return y.view(*ids.shape, WIDE).sum(1)


def example(rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, and scores of the experts of each; the last one has no rows."""
    gen = torch.Generator().manual_seed(1)
    scores = torch.rand((rows, EXPERTS), generator=gen)
    scores[:, -1] = -1
    return torch.randn((rows, WIDTH), generator=gen), scores


def computed(mod: tvm.IRModule, *args: torch.Tensor) -> np.ndarray:
    """Return what a module returns."""
    built = machine(quickly(mod))
    return built["main"](*(tvm.runtime.tensor(a.numpy()) for a in args))[0].numpy()


def imported(
    model: torch.nn.Module, dynamic: bool = False, ids: torch.Tensor | None = None
) -> tuple[str, float]:
    """Return what is imported, as text, and its largest relative error."""
    args = example() if ids is None else (example(len(ids))[0], ids)
    sizes = ({0: Dim("rows", min=2, max=64)},) * 2 if dynamic else None
    program = torch.export.export(model, args, dynamic_shapes=sizes, strict=False)
    mod = from_exported_program(program)
    args = example(9) if dynamic else args
    found = computed(mod, *args)
    with torch.no_grad():
        wanted = model(*args).numpy()
    return mod.script(), float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(
    ("dynamic", "swapped", "between"),
    quick_if(  # of the last, what makes all pairs of values
        lambda case: (case[0] == case[1]) == (case[2] == ""),
        product((False, True), (False, True), ("", "number")),
    ),
)
def test_rows_are_not_sorted(dynamic: bool, swapped: bool, between: str) -> None:
    text, error = imported(Experts(swapped, between), dynamic)
    assert error < 2e-6
    assert "argsort" not in text and "scatter" not in text
    assert text.count("R.take(") == 2, "a weight and a bias of each row"
    assert text.count("R.matmul(") == 1


@pytest.mark.parametrize("between", ["rows", "sorted"])
def test_rows_that_mix_stay_sorted(between: str) -> None:
    text, error = imported(Experts(between=between))
    assert error < 2e-6
    assert "argsort" in text


def test_experts_that_may_be_none_of_them_stay_sorted() -> None:
    """Rows of an expert that there is none of are zero."""
    given = torch.tensor([[0, 3], [5, 2], [4, 1]])
    text, error = imported(Experts(between="given"), ids=given)
    assert error < 2e-6
    assert "argsort" in text


def test_groups_of_other_bounds_stay_sorted() -> None:
    text, error = imported(Experts(bins=EXPERTS + 1))
    assert error < 2e-6
    assert "argsort" in text


def test_rows_behind_the_last_group_are_zero() -> None:
    class Grouped(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch.ops.transformers.grouped_mm_fallback(x, w, ends)

    gen = torch.Generator().manual_seed(2)
    x, w = torch.randn((9, 4), generator=gen), torch.randn((3, 4, 6), generator=gen)
    args = x, w, torch.tensor([2, 2, 7], dtype=torch.int32)
    mod = from_exported_program(torch.export.export(Grouped(), args))
    found = computed(mod, *args)
    np.testing.assert_allclose(found, Grouped()(*args), rtol=1e-5, atol=1e-6)
    assert not found[7:].any() and found[:7].any(1).all()


@pytest.mark.parametrize(("bins", "least", "most"), [(5, 0, 4), (4, -1.0, 3.0), (1, 0, 2)])
def test_histograms(bins: int, least: float, most: float) -> None:
    class Histogram(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(x, bins=bins, min=least, max=most)

    x = torch.tensor([-2.0, -1.0, 0.0, 0.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, float("nan")])
    mod = from_exported_program(torch.export.export(Histogram(), (x,)))
    found = computed(mod, x)
    np.testing.assert_array_equal(found, Histogram()(x))


def test_histograms_of_their_own_range_are_refused() -> None:
    class Histogram(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(x, bins=4)

    with pytest.raises(ValueError, match="histc from 0 to 0"):
        from_exported_program(torch.export.export(Histogram(), (torch.ones(3),)))
