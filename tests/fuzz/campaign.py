"""A campaign: seeds in parts, each in a process of its own; what takes too long or dies counts."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from . import compiled, kernels, matches, movements, triton_kernels, writer
from .findings import Failure, Findings
from .processes import in_processes

SIZES = {"graphs": 100, "tir": 20, "triton": 40, "compiled": 60, "groups": 60}
"""Seeds of a part, by what is run: functions at match level, kernels compiled for this processor or
run in Triton's interpreter, and functions compiled by the whole pipeline and by TVM's: of what
models have, and of operators that no pattern takes, which are joined in groups."""

SECONDS, BY_THE_CLOCK = 60, 5
"""Processor time of one seed; a part has as many as it has seeds, up to ten minutes.

It may take so many times as long where others have the processors.
"""

Seeds = Sequence[int]


def parts(kind: str, seeds: Seeds, workers: int) -> Iterator[Findings]:
    """Yield what parts saw as they end; one without a result is done again seed by seed."""
    writer.rewriting()  # parsed once, and not in every process
    size = SIZES[kind]
    every = [seeds[i : i + size] for i in range(0, len(seeds), size)]
    for part, found in _limited(kind, every, min(600, SECONDS * size), workers):
        if not isinstance(found, str):
            yield found
            continue
        for (seed,), alone in _limited(kind, [[s] for s in part], SECONDS, workers):
            failed = Findings(1, failures=[Failure(seed, str(alone))])
            yield failed if isinstance(alone, str) else alone


def _limited(
    kind: str, every: Sequence[Seeds], seconds: int, workers: int
) -> Iterator[tuple[Seeds, Any]]:
    work = partial(_with_limit, explorer(kind), seconds)
    yield from in_processes(work, every, BY_THE_CLOCK * seconds, workers)


def _with_limit(work: Callable[[Seeds], Findings], seconds: int, seeds: Seeds) -> Findings:
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
    return work(seeds)


def explorer(kind: str) -> Callable[[Seeds], Findings]:
    """Return what runs seeds."""
    found: dict[str, Callable[[Seeds], Findings]] = {
        "graphs": matches.explore,
        "tir": kernels.explore,
        "triton": triton_kernels.explore_alone,
        "compiled": compiled.explore,
        "groups": partial(compiled.explore, draw=movements.draw_shuffled),
    }
    return found[kind]
