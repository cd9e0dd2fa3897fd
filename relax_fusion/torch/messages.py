"""What users are told of a graph: in the log, in a report, or by an error."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PipelineError, RelaxFusionError
from ..files import locked
from .options import TorchOptions

if TYPE_CHECKING:
    from ..report import Report

LOG = logging.getLogger("relax_fusion.torch")
"""The logger of this package: levels INFO for graphs and pieces, DEBUG for errors behind them."""


class Told:
    """Tells of one graph."""

    def __init__(self, key: str, options: TorchOptions):
        self._name = f"graph {key[:8]}"
        self._options = options
        self._lines: list[str] = []

    def pieces(self, verdicts: Sequence[str], left: Sequence[str]) -> None:
        """Tell how a graph was cut, and what was fused in its pieces."""
        done = "chosen" if self._options.dryrun else "compiled"
        self._tell(f"{self._name}: {_count(len(verdicts), 'piece')} {done}")
        if left:
            self._tell(f"{self._name}: {_count(len(left), 'operator')} left to PyTorch")
        for each, count in Counter(left).most_common():
            self._tell(f"  {count} x {each}")
        for n, told in enumerate(verdicts):
            self._tell(f"  fused_{n}: {told}")

    def ready(self, seconds: float, *, cached: bool) -> None:
        """Tell that a graph can be called, and write the report."""
        how = "taken from the cache" if cached else "compiled"
        if self._options.dryrun:
            how = "looked at (dryrun), and will run in PyTorch,"
        self._tell(f"{self._name}: {how} in {seconds:.1f} s")
        if self._options.report is not None:
            path = Path(self._options.report)
            try:
                with locked(path) as descriptor:
                    os.write(descriptor, ("\n".join(self._lines) + "\n").encode())
            except OSError as err:
                text = f"option report: {path} cannot be written: {err.strerror or err}"
                raise PipelineError(text) from err

    def _tell(self, text: str) -> None:
        """Keep a text for the report, and log its first line; print all of it in a dry run."""
        if self._options.dryrun:
            print(text)  # what was asked for, whatever the level of the log
        else:
            LOG.info("%s", text.partition("\n")[0])
        self._lines.append(text)


def verdict(report: Report) -> str:
    """Return what a report of a graph has of one of its pieces; its first line is for the log."""
    fused = Counter(each.pattern for each in report.fused)
    text = ", ".join(f"{count} x {name}" for name, count in fused.items())
    return f"{text or 'nothing was fused'}\n\n{report.text()}\n"


def check_strict(options: TorchOptions, left: Sequence[str]) -> None:
    """Raise a `RelaxFusionError` if nothing may be left to PyTorch, and something is."""
    if options.strict and left:
        why = Counter(left).most_common(5)
        first = "; ".join(f"{count} x {each}" for each, count in why)
        many = _count(len(left), "operator")
        raise RelaxFusionError(f"strict=True, and {many} would be left to PyTorch: {first}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
