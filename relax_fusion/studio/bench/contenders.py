"""Who is measured: what `compile` made, TVM's default and torch, all timed in the same way."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...cli.argument_types import PEERS
from ...cli.build import build_default, load_library
from ...cli.call import Call
from ...cli.console import CliError
from ...cli.run import spread_generator
from ...hardware.target import make_target
from ...models import Generator
from ...models.threads import use_threads
from ...timing import timed
from ..measure import Session, Turn, decoded
from .subject import Subject

OURS = "relax_fusion"
TVM, TORCH, COMPILED, GRAPHS = PEERS

CALLS, LONGEST = 10, 1.0
"""A turn has this many calls, or ends when so many seconds are over."""


class Contender:
    """Somebody who is measured, one of `OURS` and `PEERS`.

    Results can be compared with ours where weights are the same; `use_threads` is for CPUs.
    """

    threads = 0
    """The threads that it runs in; 0 leaves that to its library."""

    def __init__(
        self,
        name: str,
        about: str,
        subject: Subject,
        runs: Any,
        same_weights: bool = True,
        use_threads: Callable[[int], None] = use_threads,
    ) -> None:
        self.use_threads = use_threads
        self.name, self.about, self.same_weights = name, about, same_weights
        self.runs, self.results = runs, list[np.ndarray]()
        self._turn = _decoding(subject) if subject.is_decoder else _calling(subject)

    def set_threads(self) -> None:
        """Have what runs it run in its number of threads."""
        if self.threads:
            self.use_threads(self.threads)

    def turn(self, _number: int = 0) -> list[Turn]:
        """Run it once, and return how long its steps took."""
        self.set_threads()
        seconds, self.results = self._turn(self.runs)
        return [seconds]


Run = Callable[[Any], tuple[Turn, list[np.ndarray]]]


def _decoding(subject: Subject) -> Run:
    """Return what feeds a prompt and some tokens."""
    ids = np.tile(subject.ids(), (subject.batch, 1))

    def run(session: Session) -> tuple[Turn, list[np.ndarray]]:
        session.reset()
        session.decode(ids[:, 0])  # wakes threads that slept meanwhile
        return decoded(session, ids, subject.sizes["prompt"])

    return run


def _calling(subject: Subject) -> Run:
    """Return what calls a model several times, a `Call` or what has the same methods."""

    def run(call: Any) -> tuple[Turn, list[np.ndarray]]:
        taken: list[float] = []
        while len(taken) <= CALLS and sum(taken) < LONGEST:
            result, seconds = timed(call)
            taken.append(seconds)
        taken = taken[1:] or taken  # the first wakes threads that slept meanwhile
        return {subject.function: taken}, call.arrays(result)

    return run


def installed(kind: str) -> list[str]:
    """Return the peers that are measured by default, as far as packages go.

    torch.compile takes a minute for a small model on a CPU, and is measured there if asked for.
    """
    if find_spec("torch") is None:
        return [TVM]
    return [TVM, TORCH, *([COMPILED, GRAPHS] if kind != "cpu" else [])]


def ours(subject: Subject) -> Contender:
    """Load what `compile` made."""
    about = f"relax_fusion {subject.manifest.versions.relax_fusion}, as it was compiled"
    library = load_library(subject.directory, subject.manifest)
    if subject.manifest.shards > 1:
        assert subject.exported is not None, "decoders are built from configurations"
        about += f", on {subject.manifest.shards} workers"
        given = subject.directory, subject.manifest, subject.exported
        return Contender(OURS, about, subject, spread_generator(*given, 0))
    return Contender(OURS, about, subject, _runs(library, subject))


def tvm_default(subject: Subject) -> Contender:
    """Compile the same module with TVM's own pipeline."""
    model = subject.exported or subject.imported
    if model is None:
        raise CliError(f"{subject.directory} has no module; give the file that it was made of")
    executable = build_default(model, make_target(subject.manifest.target))
    version = subject.manifest.versions.tvm
    about = f"the same module and weights by the default pipeline of TVM {version}"
    return Contender(TVM, about, subject, _runs(executable, subject))


def _runs(compiled: object, subject: Subject) -> Generator | Call:
    """Return what runs a library or an executable on the device, with the weights."""
    if not subject.is_decoder:
        given = subject.manifest, subject.device, subject.inputs(), subject.weights()
        return Call(compiled, *given)
    exported = subject.exported
    assert exported is not None, "decoders are built from configurations"
    return Generator(compiled, exported, subject.weights(), subject.device)
