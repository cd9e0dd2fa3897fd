"""A campaign: draw programs with hypothesis, check them in batches, count what happened."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from relax_fusion.passes import PATTERNS

from .check import Findings, Setup, isolate
from .graph import Graph
from .strategies import graphs

BATCH = 12
"""Programs per compilation: what takes time is the number of modules, not their size."""


def draw(count: int, seed: int) -> list[Graph]:
    """Return `count` programs, the same ones for the same seed."""
    drawn: list[Graph] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(graphs())
    def collect(graph: Graph) -> None:
        if len(drawn) < count:
            drawn.append(graph)

    collect()
    return drawn


def setups(seed: int) -> Iterator[Setup]:
    """Return the setups in turn: the pipeline, then passes alone, in other orders, after TVM's."""
    names = tuple(PATTERNS)
    orders = list(itertools.permutations(names))
    for i in itertools.count(seed):
        turn = i // 5
        yield (
            Setup(tvm_unfused=turn % 2 == 0, bounded=True),
            Setup(
                passes=names,
                whole=False,
                nt_first=True,
                tvm_unfused=True,
                always=True,
                bounded=turn % 2 == 0,
            ),
            Setup(tvm_unfused=turn % 2 == 1),
            Setup(passes=orders[i * 7 % len(orders)], whole=False),
            Setup(passes=(names[turn % len(names)],), whole=False),
        )[i % 5]


def run(count: int, seed: int, progress: Callable[[Findings], None] | None = None) -> Findings:
    """Draw and check `count` programs."""
    drawn = draw(count, seed)
    total = Findings()
    for start, setup in zip(range(0, len(drawn), BATCH), setups(seed), strict=False):
        total.add(isolate(drawn[start : start + BATCH], setup))
        if progress is not None:
            progress(total)
    return total
