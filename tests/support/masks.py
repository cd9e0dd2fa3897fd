"""The mask of a matched attention, compared with the graph's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from relax_fusion.matching.pattern import Match

from .typed import Typed

HIDDEN = -5e3
"""Numbers below are masks in these tests: what else is added is much closer to zero."""


def assert_same_mask(match: Match, typed: Typed, scores: relax.Expr) -> None:
    """Compare what a workload does to scores of zero with what the graph does.

    Parameters
    ----------
    match : Match
        An attention without soft-cap, slopes and sinks.
    typed : Typed
        Values of its block, zeros for the product of queries and keys.
    scores : relax.Expr
        What goes into its softmax.
    """
    want = np.asarray(typed(scores)).astype("float64")
    got = np.broadcast_to(_scores(match, typed, want.shape), want.shape)
    if np.isnan(want).any() or np.isnan(got).any():
        return  # numbers of no use, or a bias as large as masks are
    seen = want > HIDDEN
    np.testing.assert_array_equal(got > HIDDEN, seen)
    np.testing.assert_allclose(got[seen], want[seen], rtol=1e-3)


def _scores(match: Match, typed: Typed, shape: tuple[int, ...]) -> np.ndarray:
    """Return what a workload makes of scores of zero: minus infinity where it hides a key."""
    work: Any = match.workload
    args = iter(match.args[3:])
    scores = np.zeros(shape)
    if work.bias_dims is not None:
        bias = _operand(next(args).expr, work.bias_dims, typed, shape).astype("float64")
        if work.bias_op == "add":
            scores = scores + np.where(bias > -HIDDEN, np.nan, bias)
        else:
            scores = np.minimum(scores, bias)
    if work.mask_dims is not None:
        seen = _operand(next(args).expr, work.mask_dims, typed, shape)
        scores = np.where(seen, scores, -np.inf)
    if work.lengths is not None:
        lengths = np.asarray(typed(next(args).expr)).reshape((-1, 1, 1, 1)) + work.lengths.more
        scores = np.where(np.arange(shape[-1]) < lengths, scores, -np.inf)
        if work.causal == "bottom_right":
            row, column = np.indices(shape[-2:])
            from_last = column - row - lengths + shape[-2]
            seen = (from_last <= 0) & (from_last > -(work.window or shape[-1]))
            return np.where(seen, scores, -np.inf)
    return np.where(in_sight(work.causal, work.window, shape[-2:]), scores, -np.inf)


def in_sight(causal: str, window: int | None, size: tuple[int, ...]) -> np.ndarray:
    """Return which keys a query sees, as `relax_fusion.workload.Attention` says it."""
    row, column = np.indices(size)
    corner = size[1] - size[0] if causal == "bottom_right" else 0
    seen = np.ones(size, bool) if causal == "none" else column - row <= corner
    return seen if window is None else seen & (column - row > corner - window)


def _operand(
    expr: relax.Expr, dims: tuple[bool, ...], typed: Typed, shape: tuple[int, ...]
) -> np.ndarray:
    sizes = [size if has else 1 for size, has in zip(shape, dims, strict=True)]
    return np.asarray(typed(expr)).reshape(sizes)
