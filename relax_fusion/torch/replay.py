"""CUDA graphs of whole pieces: one launch in the place of all launches of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..validation import reason
from .messages import LOG

MOST_GRAPHS = 16
"""The number of graphs that one piece captures at most; further sizes are launched as usual."""

Run: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Launches a piece on the current stream and returns its results."""


@dataclass(frozen=True)
class _Captured:
    """A graph, the memory that it reads inputs from, by their place, and that of its results."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[int, torch.Tensor]
    results: list[torch.Tensor]


class Replay:
    """Captures the calls of a piece, and replays those that were captured.

    The first call with some sizes launches the piece, the second captures it.  Weights and caches
    are read and written where they are: other addresses need another graph.

    `written` inputs are written where they are; `used` results are returned.
    """

    def __init__(self, run: Run, written: Sequence[int], used: frozenset[int]):
        self._run = run
        self._written = frozenset(written)
        self._used = used
        self._seen: dict[tuple[object, ...], _Captured | None] = {}
        self._off = False

    def __call__(
        self, passed: Sequence[torch.Tensor], variable: int, version: int
    ) -> Sequence[torch.Tensor | None]:
        """Return the results, as tensors of the caller's; None for those that nobody uses.

        Weights come last in `passed`; `version` is another number where one has other memory.
        """
        if self._off or torch.cuda.is_current_stream_capturing():
            return self._run(passed)
        given = enumerate(passed[:variable])
        key = (version, *(t.data_ptr() if n in self._written else t.shape for n, t in given))
        if key not in self._seen:
            if len(self._seen) < MOST_GRAPHS:
                self._seen[key] = None
            return self._run(passed)
        captured = self._seen[key]
        if captured is None:
            try:
                captured = self._seen[key] = self._capture(passed, variable)
            except RuntimeError as err:  # of the CUDA runtime, by PyTorch or TVM
                self._off = True
                LOG.warning("a piece cannot be captured as a CUDA graph: %s", reason(err))
                return self._run(passed)
        for n, kept in captured.inputs.items():
            kept.copy_(passed[n])
        captured.graph.replay()
        results = enumerate(captured.results)
        return [result.clone() if n in self._used else None for n, result in results]

    def _capture(self, passed: Sequence[torch.Tensor], variable: int) -> _Captured:
        kept = {n: passed[n].clone() for n in range(variable) if n not in self._written}
        inputs = [kept.get(n, tensor) for n, tensor in enumerate(passed)]
        before = {n: passed[n].clone() for n in self._written}
        # leaves memory for all that the captured call allocates in TVM's pool
        spare = [self._run(inputs), self._run(inputs)]
        torch.cuda.synchronize()
        spare.clear()
        for n, value in before.items():
            passed[n].copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = self._run(inputs)
        return _Captured(graph, kept, results)
