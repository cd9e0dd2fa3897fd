"""Steps of a model that are compiled for workers, and the workers that run them."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import tvm
from tvm import relax

from benchmarks.suites.decode import step as steps
from relax_fusion import make_target, models
from relax_fusion.parallel import Workers


@dataclass(frozen=True)
class Library:
    """A compiled step of a model for a number of workers.

    Parameters
    ----------
    args : Namespace
        Of the suite.
    step : str
        ``"decode"`` or ``"prefill"``.
    contender : str
        One of `OURS`.
    folder : Path
        Where it is.
    """

    args: Namespace
    step: str
    contender: str
    folder: Path

    @property
    def name(self) -> str:
        args = self.args
        sizes = args.model, args.layers, args.vocab, args.batch, self.total, self.shards
        words = (self.step, *self.contender.split(), *map(str, sizes), args.target, *args.without)
        return "-".join(words)

    @property
    def shards(self) -> int:
        """The number of workers."""
        return 1 if self.contender == "one GPU" else self.args.workers

    @property
    def total(self) -> int:
        """Tokens in the caches after the step."""
        return self.args.context + 1 if self.step == "decode" else self.args.tokens

    @cached_property
    def exported(self) -> models.ExportedModel:
        return steps.export_model(self.args, self.args.layers, self.step, self.total, self.shards)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.so"


def built(library: Library) -> Path:
    """Return the file of a library, compiled if it is not there."""
    if not library.path.exists():
        library.folder.mkdir(parents=True, exist_ok=True)
        target = make_target(library.args.target)
        options = {
            "disable": tuple(library.args.without),
            "use_cuda_graph": library.contender != "no graph",
        }
        pipeline = relax.get_pipeline("relax_fusion", target=target, **options)
        made = tvm.compile(library.exported.mod, target, relax_pipeline=pipeline)
        made.export_library(str(library.path))
    return library.path


@contextmanager
def started(
    count: int, device: Literal["cpu", "cuda"], limit: float, own: bool = True
) -> Iterator[Workers]:
    """Have workers, which are ended after some seconds whatever they do."""
    with Workers(count, device=device, own_all_reduce=own) as workers:
        late = threading.Event()

        def end() -> None:
            late.set()
            workers.close()

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            yield workers
        except Exception as err:
            if late.is_set():
                raise TimeoutError(f"workers took longer than {limit:g} s") from err
            raise
        finally:
            timer.cancel()
