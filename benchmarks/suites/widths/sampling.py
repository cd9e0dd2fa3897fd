"""Which chains of which models are measured at how many rows: a part of all, drawn by a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from benchmarks.suites.matmul.cases import Chain
from benchmarks.suites.matmul.models import MODELS

CASES = ("qkv", "gate_up", "up", "out", "down", "plain")
ROWS = (1, 5, 16, 48, 64, 192, 256, 512, 777, 1024, 3000, 4096, 8192)

Item = tuple[Chain, int]
"""A chain, and its rows."""


@dataclass(frozen=True)
class Grid:
    """All that could be measured: cases of models at rows."""

    models: Sequence[str]
    cases: Sequence[str]
    rows: Sequence[int]

    @property
    def items(self) -> list[Item]:
        """Those that there are: a model has a gate in its FFN, or has not."""
        chains = [
            Chain(case, model)
            for model in self.models
            for case in self.cases
            if case != ("gate_up" if MODELS[model].biases else "up")
        ]
        return [(chain, rows) for chain in chains for rows in self.rows]

    @property
    def cells(self) -> int:
        """Of a heat map, rows by models."""
        return len({(chain.size, rows) for chain, rows in self.items})

    def sample(self, seed: int, count: int | None = None) -> list[Item]:
        """Return some of the items, the rows of a chain together, chains in random order.

        Parameters
        ----------
        seed : int
            Of what is drawn.
        count : int, optional
            How many; all, if there are no more.  None: as many as `cells`, one for each.  Fewer are
            among those that more would be.
        """
        left, drawn = self.items, Counter[Hashable]()
        random.Random(seed).shuffle(left)
        found: dict[Chain, list[int]] = {}
        for _ in range(min(len(left), self.cells if count is None else count)):
            chain, rows = item = min(left, key=lambda i: [drawn[s] for s in strata(i)])
            left.remove(item)
            drawn.update(strata(item))
            found.setdefault(chain, []).append(rows)
        return [(chain, rows) for chain, some in found.items() for rows in sorted(some)]


def strata(item: Item) -> list[Hashable]:
    """Return what an item counts for; of each the rarest is drawn next, the first ones above all.

    The matmul in front of an activation is one case, with a gate or without.
    """
    chain, rows = item
    case = "gate_up" if chain.case == "up" else chain.case
    cell, whole = (chain.size, rows), (chain.size, case)
    return [cell, rows, case, (case, rows), whole, chain.size]
