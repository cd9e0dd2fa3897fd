"""CUDA graphs of whole pieces: one launch in the place of all launches of a call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..frontends.imported import reason

_LOG = logging.getLogger("relax_fusion.torch")

MOST_GRAPHS = 16
"""The number of graphs that one piece captures at most; further sizes are launched as usual."""

Run: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Launches a piece on the current stream and returns its results."""


@dataclass(frozen=True)
class _Captured:
    """A graph, the memory that it reads its inputs from, and the memory of its results."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    results: list[torch.Tensor]


class Replay:
    """Captures the calls of a piece, and replays those that were captured.

    The first call with some sizes launches the piece, the second captures it.  Weights and caches
    are read and written where they are: other addresses need another graph.

    Parameters
    ----------
    run : callable
        Launches the piece.
    fixed : frozenset of int
        Which inputs are read or written where they are.
    """

    def __init__(self, run: Run, fixed: frozenset[int]):
        self._run = run
        self._fixed = fixed
        self._seen: dict[tuple[object, ...], _Captured | None] = {}
        self._off = False

    def __call__(self, passed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results, as tensors of the caller's."""
        if self._off or torch.cuda.is_current_stream_capturing():
            return self._run(passed)
        key = tuple(
            tensor.data_ptr() if n in self._fixed else tuple(tensor.shape)
            for n, tensor in enumerate(passed)
        )
        if key not in self._seen:
            if len(self._seen) < MOST_GRAPHS:
                self._seen[key] = None
            return self._run(passed)
        captured = self._seen[key]
        if captured is None:
            try:
                captured = self._seen[key] = self._capture(passed)
            except RuntimeError as err:  # of the CUDA runtime, by PyTorch or TVM
                self._off = True
                _LOG.warning("a piece cannot be captured as a CUDA graph: %s", reason(err))
                return self._run(passed)
        for n, (kept, tensor) in enumerate(zip(captured.inputs, passed, strict=True)):
            if n not in self._fixed:
                kept.copy_(tensor)
        captured.graph.replay()
        return [result.clone() for result in captured.results]

    def _capture(self, passed: Sequence[torch.Tensor]) -> _Captured:
        inputs = [t if n in self._fixed else t.clone() for n, t in enumerate(passed)]
        # leaves memory for all that the captured call allocates in TVM's pool
        spare = [self._run(inputs), self._run(inputs)]
        torch.cuda.synchronize()
        spare.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = self._run(inputs)
        return _Captured(graph, inputs, results)
