"""A decoder that is spread over workers: `ParallelGenerator`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..hardware.target import usable_cores
from ..parallel import Worker, Workers
from ..validation import shown
from .export import ExportedModel
from .runner import check_exported
from .session import Generator
from .threads import use_all_cores, use_threads
from .weights import load_weights, random_weights

_GENERATOR = "generator"


class ParallelGenerator:
    """A compiled decoder on several workers, which is called as a `Generator`.

    Each worker has a part of the weights and caches, and runs the same library: they meet in the
    sums and in the logits.  It is a context manager, at whose end the workers end.

    Parameters
    ----------
    workers : Workers
        As many as the model was exported for.
    library : str or Path
        The library of the compiled module, by ``export_library``.
    exported : ExportedModel
        The model that was compiled.
    weights : str, Path, int or callable
        The directory of a checkpoint, of which each worker reads its own parts; a seed of
        `random_weights`; or a function that returns the arrays of a worker, given its number.
    batch : int, optional
        Number of sequences, where the module was exported with a symbolic batch.

    Raises
    ------
    InputError
        If the model was exported for another number of workers.
    WorkerError
        If a worker cannot load its part.
    """

    def __init__(
        self,
        workers: Workers,
        library: str | Path,
        exported: ExportedModel,
        weights: str | Path | int | Callable[[int], Iterable[np.ndarray]],
        batch: int | None = None,
    ) -> None:
        check_exported(exported)
        if not isinstance(workers, Workers):
            raise InputError(f"workers is {shown(workers)}; must be Workers")
        if exported.shards != workers.count:
            raise InputError(
                f"the model was exported for {exported.shards} worker(s), and there are "
                f"{workers.count}"
            )
        self.exported, self.workers = exported, workers
        self.batch = batch or (exported.batch if isinstance(exported.batch, int) else 1)
        described = replace(exported, mod=None)
        workers.call(_start, str(library), described, weights, batch)

    def reset(self) -> None:
        """Forget the context, as `Generator.reset`."""
        self._call("reset")

    def prefill(self, ids: Any) -> np.ndarray:
        """Append tokens to the context, as `Generator.prefill`."""
        return self._call("prefill", ids)

    def decode(self, ids: Any) -> np.ndarray:
        """Append one token to each sequence, as `Generator.decode`."""
        return self._call("decode", ids)

    def generate(self, ids: Any, max_new_tokens: int) -> np.ndarray:
        """Forget the context, then extend `ids` greedily, as `Generator.generate`."""
        return self._call("generate", ids, max_new_tokens)

    def close(self) -> None:
        """End the workers."""
        self.workers.close()

    def __enter__(self) -> ParallelGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, *args: Any) -> Any:
        value = self.workers.call(_run, name, args)[0]
        if isinstance(value, InputError):
            raise value
        return value


def _start(
    worker: Worker, library: str, exported: ExportedModel, weights: Any, batch: int | None
) -> None:
    """Load the library and a worker's part of the weights, and keep what runs them."""
    import tvm

    arrays: Iterable[np.ndarray]
    if callable(weights):
        arrays = weights(worker.rank)
    elif isinstance(weights, int):
        arrays = random_weights(exported, weights, worker.rank)
    else:
        arrays = load_weights(weights, exported, worker.rank)
    if worker.device == "cpu":  # whose processors the workers share
        use_all_cores()
        use_threads(max(1, usable_cores() // worker.count))
    compiled = tvm.runtime.load_module(library)
    part = replace(exported, shards=1)  # which is all that this worker knows of
    worker.kept[_GENERATOR] = Generator(compiled, part, arrays, worker.tvm_device, batch)


def _run(worker: Worker, name: str, args: tuple[Any, ...]) -> Any:
    """Call a generator; what it refuses, all workers refuse before they have done anything."""
    try:
        value = getattr(worker.kept[_GENERATOR], name)(*args)
    except InputError as err:
        return err
    return value if worker.rank == 0 else None
