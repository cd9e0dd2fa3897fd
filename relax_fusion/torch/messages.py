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
from .record import GraphRecord

if TYPE_CHECKING:
    from ..report import Report

LOG = logging.getLogger("relax_fusion.torch")
"""The logger of this package: levels INFO for graphs and pieces, DEBUG for errors behind them."""


def tell(key: str, options: TorchOptions, record: GraphRecord, how: str) -> None:
    """Tell how a graph was cut, and what was fused in its pieces, and write that to the report.

    The log gets the first line of each text; a dry run prints all of it.
    """
    name, left = f"graph {key[:8]}", record.left
    done = "chosen" if options.dryrun else "compiled"
    texts = [f"{name}: {_count(len(record.verdicts), 'piece')} {done}"]
    texts += [f"{name}: {_count(len(left), 'operator')} left to PyTorch"] if left else []
    texts += [f"  {count} x {each}" for each, count in Counter(left).most_common()]
    texts += [f"  fused_{n}: {told}" for n, told in enumerate(record.verdicts)]
    texts.append(f"{name}: {how}")
    for text in texts:
        if options.dryrun:
            print(text)  # what was asked for, whatever the level of the log
        else:
            LOG.info("%s", text.partition("\n")[0])
    if options.report is not None:
        try:
            with locked(Path(options.report)) as descriptor:
                os.write(descriptor, ("\n".join(texts) + "\n").encode())
        except OSError as err:
            why = f"option report: {options.report} cannot be written: {err.strerror or err}"
            raise PipelineError(why) from err


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
