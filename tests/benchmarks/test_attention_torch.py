"""`benchmarks.suites.attention.peers` on the CPU: the reference and the peers say the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention

from benchmarks.suites.attention import peers
from benchmarks.suites.attention.cases import Case
from benchmarks.suites.attention.peers import Problem

SIZES = {"heads": (4, 2), "lengths": (24, 24), "head_dim": 16, "batch": 2}
PLAIN = Case("plain", "test", **SIZES)
MASKS = [
    PLAIN,
    Case("causal", "test", **SIZES, causal=True),
    Case("bias", "test", **SIZES, mask="bias"),
    *(Case(mask, "test", **SIZES, causal=True, mask=mask) for mask in ("alibi", "softcap")),
    Case("window", "test", **SIZES, causal=True, mask="window"),
    Case("where", "test", **SIZES, mask="where"),
]


def problem(case: Case, layout: str = "bsnh", dtype: str = "float32") -> Problem:
    return Problem(case, dtype, layout, "cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A window that hides something, and a softcap that is felt."""
    monkeypatch.setattr(peers, "WINDOW", 5)
    monkeypatch.setattr(peers, "SOFTCAP", 1.5)


def additive(made: Problem) -> torch.Tensor | None:
    """Return the mask of a problem as SDPA takes it, made another way than the reference does."""
    case, (queries, keys) = made.case, made.case.lengths
    i, j = torch.meshgrid(torch.arange(queries), torch.arange(keys), indexing="ij")
    if case.mask in ("bias", "where"):
        return made.operands["bias" if case.mask == "bias" else "mask"]
    shown = (j <= i) & (j > i - (5 if case.mask == "window" else keys))
    hidden = torch.zeros(1, case.heads[0], queries, keys).masked_fill(~shown, -torch.inf)
    if case.mask == "alibi":
        hidden += made.operands["slopes"][None, :, None, None] * (j - i)
    return hidden if case.causal else None


@pytest.mark.parametrize("layout", ["bsnh", "bnsh"])
@pytest.mark.parametrize("case", [c for c in MASKS if c.mask != "softcap"], ids=lambda c: c.name)
def test_the_reference_is_that_of_sdpa(case, layout) -> None:
    made = problem(case, layout)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *made.qkv, additive(made), enable_gqa=True
    )
    torch.testing.assert_close(made.reference().float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in MASKS if c.mask != "where"], ids=lambda c: c.name)
def test_flex_attention_computes_the_reference(case, monkeypatch) -> None:
    # Not compiled, but with its own masks, which is where the two could differ
    monkeypatch.setattr(peers, "under_compile", lambda function, *_, **__: function)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    made = problem(case)
    torch.testing.assert_close(made.flex()(), made.reference().float(), rtol=1e-4, atol=1e-5)


def test_long_sequences_are_sampled_and_computed_in_parts(monkeypatch) -> None:
    case = Case("causal", "test", (4, 2), (24, 24), 16, causal=True)
    whole = problem(case).reference()
    monkeypatch.setattr(peers, "SAMPLED_ROWS", 7)
    monkeypatch.setattr(peers, "SCORES_AT_ONCE", 2 * 4 * 24)
    made = problem(case)
    rows = made.rows()
    assert rows[0] == 0 and rows[-1] == 23 and len(set(rows.tolist())) == 7
    torch.testing.assert_close(made.reference(), whole[:, :, rows])
    torch.testing.assert_close(made.sampled(whole), whole[:, :, rows])
