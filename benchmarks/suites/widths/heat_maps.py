"""The picture of widths: peers' times over ours, rows by models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Entry, drawing
from benchmarks.suite import done
from benchmarks.suites.matmul.models import MODELS
from benchmarks.suites.matmul.report import LABELS
from benchmarks.suites.widths.report import PEERS, mean_of, ratios

LIMIT = 2.0
"""The ratio at which colours end, as at its inverse."""


def heat_map(
    entries: Sequence[Entry], peer: str, models: Sequence[str], rows: Sequence[int]
) -> list[list[float]]:
    """Return, of each number of rows, the mean ratio of each model; NaN where nothing was timed."""

    def value(model: str, m: int) -> float:
        found = ratios([e for e in entries if (e["size"], e["rows"]) == (model, m)], peer)
        return mean_of(list(found.values())) if found else math.nan

    return [[value(model, m) for model in models] for m in rows]


def colour(ratio: float) -> float:
    """Return a ratio as what is coloured: -1 to 1, 0 where both are as fast."""
    return min(1.0, max(-1.0, math.log(max(ratio, 1e-9), LIMIT)))


def plot(record: Entry, path: Path) -> None:
    """Draw a heat map for each peer that was timed: its time over ours, means over cases.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    pyplot = drawing()
    entries = done(record)
    there = {e["size"] for e in entries}
    models = [m for m in dict.fromkeys((*MODELS, *sorted(there))) if m in there]
    rows = sorted({e["rows"] for e in entries})
    peers = [peer for peer in PEERS if ratios(entries, peer)]
    size = (4 + 0.5 * len(models), (1.6 + 0.35 * len(rows)) * max(1, len(peers)))
    shape = {"figsize": size, "squeeze": False, "layout": "constrained"}
    figure, axes = pyplot.subplots(max(1, len(peers)), 1, **shape)
    for axis, peer in zip(axes[:, 0], peers, strict=False):
        _draw(axis, heat_map(entries, peer, models, rows))
        axis.set_xticks(range(len(models)), models, rotation=45, ha="right", fontsize=7)
        axis.set_yticks(range(len(rows)), rows, fontsize=7)
        axis.set(ylabel="rows", title=f"{LABELS[peer]}: its time over ours")
    figure.suptitle(f"{record['gpu']}, {record['dtype']}, {record['date']}; blue: ours is faster")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw(axis: Any, values: list[list[float]]) -> None:
    """Draw one map with its numbers; a cell that was not measured is grey."""
    colours = [[math.nan if math.isnan(v) else colour(v) for v in line] for line in values]
    axis.set_facecolor("lightgrey")
    image = axis.imshow(colours, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    for y, line in enumerate(values):
        for x, v in enumerate(line):
            if not math.isnan(v):
                white = abs(colour(v)) > 0.7
                shade = "white" if white else "black"
                axis.text(x, y, f"{v:.2f}", ha="center", va="center", fontsize=6, color=shade)
    bar = axis.figure.colorbar(image, ax=axis, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.set_ticklabels([f"{LIMIT**t:.2f}" for t in (-1, -0.5, 0, 0.5, 1)], fontsize=7)
