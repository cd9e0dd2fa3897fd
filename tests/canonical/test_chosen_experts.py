"""Experts that all rows are given to: only those that a row has scores for are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from torch import Tensor
from torch.export import Dim

from relax_fusion.canonical import ChooseExperts
from relax_fusion.frontends.torch import from_exported_program

from ..support.quick import machine, quickly

EXPERTS, CHOSEN, WIDTH, INNER = 6, 2, 12, 8


class Experts(torch.nn.Module):
    """Experts of all rows; what a subclass makes of scores and of products is to vary."""

    def __init__(self, chosen: int = CHOSEN) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        shapes = {
            "router": (EXPERTS, WIDTH),
            "gate_up": (EXPERTS, WIDTH, 2 * INNER),
            "down": (EXPERTS, INNER, WIDTH),
            "gate_up_bias": (EXPERTS, 2 * INNER),
            "down_bias": (EXPERTS, WIDTH),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=gen)))
        self.chosen = chosen


class ScaledBefore(Experts):
    """As in Llama 4: what experts are given is multiplied by sigmoids of scores, or by 0."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router.T
        best, ids = logits.topk(self.chosen, 1)
        scores = torch.full_like(logits, float("-inf")).scatter(1, ids, best).sigmoid()
        given = x.repeat(EXPERTS, 1) * scores.T.reshape(-1, 1)
        gate, up = (given.view(EXPERTS, -1, WIDTH) @ self.gate_up).chunk(2, -1)
        made = (up * torch.nn.functional.silu(gate)) @ self.down
        return made.reshape(EXPERTS, -1, WIDTH).sum(0)


class ScaledBehind(Experts):
    """As in gpt-oss before transformers 5: biases, clamped neighbours, shares of what is made."""

    def forward(self, x: Tensor) -> Tensor:
        best, ids = (x @ self.router.T).topk(self.chosen, -1)
        scores = torch.zeros(x.shape[0], EXPERTS).scatter(1, ids, best.softmax(-1))
        rows = x.repeat(EXPERTS, 1).view(EXPERTS, -1, WIDTH)
        made = torch.bmm(rows, self.gate_up) + self.gate_up_bias[:, None]
        gate, up = made[..., ::2].clamp(max=7.0), made[..., 1::2].clamp(-7.0, 7.0)
        act = (up + 1) * (gate * torch.sigmoid(1.7 * gate))
        made = torch.bmm(act, self.down) + self.down_bias[:, None]
        made = made.view(EXPERTS, 1, -1, WIDTH)
        return (made * scores.T.view(EXPERTS, 1, -1)[..., None]).sum(dim=0)[0]


class Spread(Experts):
    """Rows that are spread over experts by multiplying, weights that lie transposed."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router.T
        best, ids = logits.topk(self.chosen, -1)
        scores = torch.full_like(logits, float("-inf")).scatter(1, ids, best).softmax(-1)
        made = x[None] @ self.gate_up.flip(2).transpose(1, 2).contiguous().transpose(1, 2)
        gate, up = made.split(INNER, -1)
        made = (gate.relu() * up) @ self.down
        return (made * scores.T[:, :, None]).sum(0)


class BiasBefore(Experts):
    """Experts that make something of rows of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router.T
        best, ids = logits.topk(self.chosen, 1)
        scores = torch.zeros_like(logits).scatter(1, ids, best)
        given = x[None] * scores.T[:, :, None]
        return (given @ self.gate_up + self.gate_up_bias[:, None]).sum(0)


class OtherNumbers(Experts):
    """Scores of experts that no choice names."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router.T
        best, ids = logits.topk(self.chosen, 1)
        scores = torch.zeros_like(logits).scatter(1, (ids + 1) % EXPERTS, best)
        return ((x[None] @ self.gate_up) * scores.T[:, :, None]).sum(0)


class Decoded(Experts):
    """Weights that are computed of others."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router.T
        best, ids = logits.topk(self.chosen, 1)
        scores = torch.zeros_like(logits).scatter(1, ids, best)
        weight = self.gate_up.round() * self.gate_up_bias[:, None]
        return ((x[None] @ weight) * scores.T[:, :, None]).sum(0)


class SomeScore(OtherNumbers):
    """Experts that were not chosen have a score, too."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router.T
        best, ids = logits.topk(self.chosen, 1)
        scores = torch.zeros_like(logits).scatter(1, ids, best).sigmoid()
        return ((x[None] @ self.gate_up) * scores.T[:, :, None]).sum(0)


class OneEach(OtherNumbers):
    """As many rows as experts: each is given to the expert of its own number."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router.T
        best, ids = logits.topk(self.chosen, 1)
        scores = torch.zeros_like(logits).scatter(1, ids, best)
        return ((x[:, None] @ self.gate_up) * scores.T[:, :, None]).sum(0)


class NoNumber(OtherNumbers):
    """What the others have is no number."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.router.T
        best, ids = logits.topk(self.chosen, 1)
        scores = torch.zeros_like(logits).scatter(1, ids, best)
        made = (x[None] @ self.gate_up) * scores.T[:, :, None]
        return (made / made).sum(0)


class BiasOfOtherRows(OtherNumbers):
    """A row for each expert that is added along an axis of as many parts of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        best, ids = (x @ self.router.T).topk(self.chosen, 1)
        scores = torch.zeros(x.shape[0], EXPERTS).scatter(1, ids, best)
        made = (x[None] @ self.gate_up).view(2, EXPERTS, -1, 2 * INNER)
        made = (made + self.gate_up_bias[:, None]).view(EXPERTS, -1, 2 * INNER)
        return (made * scores.T[:, :, None]).sum(0)


def imported(model: Experts, rows: int | None = EXPERTS) -> tvm.IRModule:
    """Import a graph for so many rows, None for any number."""
    sizes = ({0: Dim("rows", min=2, max=64)},) if rows is None else None
    given = (torch.randn(rows or EXPERTS, WIDTH),)
    return from_exported_program(torch.export.export(model, given, dynamic_shapes=sizes))


@pytest.mark.parametrize("kind", [ScaledBefore, ScaledBehind, Spread])
@pytest.mark.parametrize(("chosen", "rows"), [(1, 7), (1, None), (CHOSEN, None), (CHOSEN, 1)])
def test_only_what_is_chosen_is_computed(
    kind: type[Experts], chosen: int, rows: int | None
) -> None:
    model = kind(chosen)
    mod = imported(model, rows)
    after = ChooseExperts()(mod)
    tvm.relax.analysis.well_formed(after)
    text = after["main"].script()
    assert "scatter_elements" not in text and text.count("R.take(") >= 2
    x = torch.randn(rows or 9, WIDTH)
    found = machine(quickly(after))["main"](tvm.runtime.tensor(x.numpy()))[0].numpy()
    with torch.no_grad():
        wanted = model(x).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        *((kind, 2) for kind in (BiasBefore, OtherNumbers, SomeScore, OneEach, NoNumber, Decoded)),
        (BiasOfOtherRows, 2),
        (ScaledBefore, EXPERTS),
    ],
)
def test_all_are_computed_where_all_count(kind: type[Experts], chosen: int) -> None:
    mod = imported(kind(chosen))
    assert ChooseExperts()(mod).same_as(mod)
