"""Running a compiled decoder for its times and its logits, and comparing two such runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..models import ExportedModel


@dataclass(frozen=True)
class Plan:
    """How long to run: prompt tokens, steps after them, and how often the prompt is repeated.

    ``warm`` runs one token first: the first call starts the threads and touches the weights.
    """

    prompt: int
    decode_steps: int
    prefill_runs: int
    warm: bool = True


@dataclass(frozen=True)
class Run:
    """What one compiled model did.

    Parameters
    ----------
    logits : tuple of numpy.ndarray
        After the prompt and after each step.
    prefill_s, decode_s : tuple of float
        Seconds of each prompt and of each step.
    compile_s : float
        Seconds that compiling took.
    """

    logits: tuple[np.ndarray, ...]
    prefill_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    compile_s: float = 0.0

    @property
    def prefill(self) -> float:
        """Median seconds of the prompt."""
        return statistics.median(self.prefill_s)

    @property
    def decode(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.decode_s)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call returns, and how many seconds it took."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


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


def measure(generator: Session, vocab_size: int, plan: Plan) -> Run:
    """Run a prompt and some steps, feeding fixed tokens so that two runs can be compared."""
    ids = tokens(plan.prompt + plan.decode_steps, vocab_size)
    if plan.warm:
        generator.decode(ids[:1])
    logits, prefill_s, decode_s = [], [], []
    for _ in range(plan.prefill_runs):
        generator.reset()
        last, taken = timed(lambda: generator.prefill(ids[None, : plan.prompt]))
        prefill_s.append(taken)
    logits.append(last)
    for token in ids[plan.prompt :, None]:
        step, taken = timed(partial(generator.decode, token))
        logits.append(step)
        decode_s.append(taken)
    return Run(tuple(logits), tuple(prefill_s), tuple(decode_s))


MOST_EXPLAINED = 0.5
"""Part of the largest logit that rounding may explain."""


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
