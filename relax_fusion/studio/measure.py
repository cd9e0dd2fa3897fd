"""Feeding a decoder for its times and its logits, and comparing two such runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..models import ExportedModel
from ..timing import timed


def tokens(count: int, vocab_size: int) -> np.ndarray:
    """Return `count` token numbers, the same in every run, spread over the vocabulary."""
    return (np.arange(1, count + 1, dtype=np.int64) * 7919 % vocab_size).astype(np.int32)


class Session(Protocol):
    """A decoder with its context, as `Generator` is one."""

    def reset(self) -> None:
        """Forget the context."""

    def prefill(self, ids: Any) -> np.ndarray:
        """Append tokens; the logits of the last one, on the host."""

    def decode(self, ids: Any) -> np.ndarray:
        """Append a token to each sequence; its logits."""


Turn = Mapping[str, Sequence[float]]
"""Seconds by step: of the prompt and of each token after it, or of each call."""


def decoded(session: Session, ids: np.ndarray, prompt: int) -> tuple[Turn, list[np.ndarray]]:
    """Feed a prompt and some tokens, each timed until its logits are on the host.

    The tokens ``[batch, count]`` are given, so that runs can be compared; the first `prompt` of
    them are the prompt.  The session's context is forgotten before.

    Returns
    -------
    tuple
        Seconds of the prompt ("prefill") and of each token after it ("decode"), and the logits
        after the prompt and after the last token.
    """
    session.reset()
    logits, prefill = timed(lambda: session.prefill(ids[:, :prompt]))
    results, decode = [logits], []
    for column in ids.T[prompt:]:
        logits, taken = timed(partial(session.decode, column))
        decode.append(taken)
        results[1:] = [logits]
    return {"prefill": [prefill], "decode": decode}, results


MOST_EXPLAINED = 0.5
"""Rounding may explain a difference of this part of the largest logit."""


def compare(
    one: Sequence[np.ndarray], two: Sequence[np.ndarray], exported: ExportedModel
) -> tuple[float, float]:
    """Return the largest difference of two runs' logits, and what rounding alone can explain.

    A sum of ``k`` products, in any order, errs by about ``sqrt(k)`` roundings of its size.  The
    logits come out of a chain of such sums: in each layer the projection to q, k and v, the scores,
    their mean of the values, the output projection, the two steps of the FFN and the norms; then
    the head.  Each is about as large as its inputs, because a norm resets the scale.  Errors of
    different sums have nothing to do with each other: their squares add, and those of both runs.

    In 16 bits that can come to more than the logits; results that are unrelated differ by 1.4
    times the largest.  So no more is explained than `MOST_EXPLAINED` of it.
    """
    config = exported.config
    longest = max(config.hidden_size, config.intermediate_size)
    sums = 7 * config.num_layers + 1
    rounding = float(ml_dtypes.finfo(exported.dtype).eps) / 2
    pairs = list(zip(one, two, strict=False))
    largest = max(float(np.abs(a).max()) for a, _ in pairs)
    tolerance = min(MOST_EXPLAINED, (2 * sums * longest) ** 0.5 * rounding) * largest
    worst = float(np.max([np.abs(a - b).max() for a, b in pairs]))
    return worst, tolerance
