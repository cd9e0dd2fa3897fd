"""How unevenly rows go to experts: as a run counted it, and as prices and tuning take it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from ..errors import PipelineError
from ..files import read_file
from ..validation import Count, Natural, check, read_json

MOST_SKEW = 8.0
"""With it, the first expert has 0.996 of all rows of which each goes to one."""


@lru_cache(maxsize=256)
def likelihoods(experts: int, chosen: int, skew: float) -> tuple[float, ...]:
    """Return how likely a row goes to each of some experts, of which it goes to `chosen`.

    The expert of rank r is wanted in proportion to ``(r + 1) ** -skew``.  One that every row goes
    to leaves the rest to others.
    """
    weights = [(rank + 1) ** -skew for rank in range(experts)]
    for sure in range(min(chosen, experts)):
        factor = (chosen - sure) / sum(weights[sure:])
        if weights[sure] * factor <= 1:
            return (*(1.0,) * sure, *(w * factor for w in weights[sure:]))
    return (*(1.0,) * chosen, *(0.0,) * (experts - chosen))


@dataclass(frozen=True)
class ExpertLoad:
    """Rows that a run gave to each expert, as ``relax-fusion workloads --record`` writes it."""

    chosen: Count
    """Experts of each row."""
    counts: tuple[tuple[Natural, ...], ...]
    """Rows of each expert, for each layer."""

    def __post_init__(self) -> None:
        """Refuse counts of no run.

        Raises `PipelineError` if there are none, layers have different experts, or a layer has
        other rows than all experts together.
        """
        check(self, PipelineError, "expert load")
        sizes = [len(layer) for layer in self.counts]
        if len(set(sizes)) != 1 or not sizes[0]:
            told = "there must be a layer, and each must have as many experts, one at least"
            raise PipelineError(f"expert load: layers have {sizes} experts; {told}")
        for number, layer in enumerate(self.counts):
            rows, rest = divmod(sum(layer), self.chosen)
            if rest or not rows or max(layer) > rows:
                raise PipelineError(
                    f"expert load: counts of layer {number} are {sum(layer)} in all, {max(layer)} "
                    f"at most; no rows have those if each goes to {self.chosen} experts"
                )

    @property
    def experts(self) -> int:
        """How many there are."""
        return len(self.counts[0])

    @cached_property
    def alike(self) -> float:
        """How likely two choices of a layer are of one expert, in the mean of the layers."""
        found = [sum(n * (n - 1) for n in c) / (sum(c) * max(sum(c) - 1, 1)) for c in self.counts]
        return sum(found) / len(found)

    @cached_property
    def skew(self) -> float:
        """The skew of `likelihoods`, in tenths, at which choices are as likely alike."""

        def alike(skew: float) -> float:
            shares = likelihoods(self.experts, self.chosen, skew)
            return sum(share * share for share in shares) / self.chosen**2

        if self.experts <= self.chosen:
            return 0.0
        steps = (n / 10 for n in itertools.count())
        return next(s for s in steps if s >= MOST_SKEW or alike(s + 0.05) >= self.alike)


def read_expert_load(path: Path) -> ExpertLoad:
    """Read what ``relax-fusion workloads --record`` wrote.

    Raises `PipelineError` if there is no such file, or it is of another kind.
    """
    try:
        text = read_file(path)
    except OSError as err:
        raise PipelineError(f"{path} cannot be read: {err.strerror}") from err
    load: ExpertLoad = read_json(ExpertLoad, text, PipelineError, str(path))
    return load
