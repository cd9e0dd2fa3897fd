"""A campaign: seeds in parts, each in a process of its own; what takes too long or dies counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import compiled, kernels, matches, triton_kernels
from .processes import in_processes

GRAPHS, LIBRARY, LAUNCHES = 100, 20, 40
"""Functions, compiled kernels or functions, and interpreted kernels of a part."""

SECONDS = 60
"""Limit of one seed; a part has as many as it has seeds, up to ten minutes."""

Seeds = Sequence[int]


def graphs(seeds: Seeds, workers: int) -> Iterator[tuple[Seeds, matches.Findings]]:
    """Check functions at match level; yield what each part saw."""

    def failed(seed: int, what: str) -> matches.Findings:
        return matches.Findings(1, failures=[matches.Failure(seed, what)])

    yield from _parts(matches.explore, seeds, GRAPHS, workers, failed)


def workloads(seeds: Seeds, workers: int, backend: str) -> Iterator[tuple[Seeds, kernels.Findings]]:
    """Run kernels on this processor ("tir") or in Triton's interpreter ("triton")."""
    tir = backend == "tir"
    work = kernels.explore if tir else _interpreted

    def failed(seed: int, what: str) -> kernels.Findings:
        return kernels.Findings(1, failures=[f"seed {seed}: {what}"])

    yield from _parts(work, seeds, LIBRARY if tir else LAUNCHES, workers, failed)


def functions(seeds: Seeds, workers: int) -> Iterator[tuple[Seeds, compiled.Findings]]:
    """Compile functions by the whole pipeline and by TVM's, and compare what they compute."""

    def failed(seed: int, what: str) -> compiled.Findings:
        return compiled.Findings(1, failures=[f"seed {seed}: {what}"])

    yield from _parts(compiled.explore, seeds, LIBRARY, workers, failed)


def _interpreted(seeds: Seeds) -> kernels.Findings:
    from ..support.interpreted import Interpreter

    interpreter = Interpreter()
    try:
        return triton_kernels.explore(seeds, interpreter)
    finally:
        interpreter.close()


def _parts(
    work: Callable[[Seeds], Any],
    seeds: Seeds,
    size: int,
    workers: int,
    failed: Callable[[int, str], Any],
) -> Iterator[tuple[Seeds, Any]]:
    """Yield parts as they end; a part without a result is done again seed by seed."""
    parts = [seeds[i : i + size] for i in range(0, len(seeds), size)]
    for part, found in in_processes(work, parts, min(600, SECONDS * size), workers):
        if not isinstance(found, str):
            yield part, found
            continue
        for (seed,), alone in in_processes(work, [[s] for s in part], SECONDS, workers):
            yield [seed], failed(seed, alone) if isinstance(alone, str) else alone
