"""What the reports of benchmarks against peers share: ratios, verdicts, problems, roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.recording import markdown_table
from benchmarks.targets import PEAK_TFLOPS, Target, verdict
from relax_fusion.estimator.tile_plan import TilePlan

Entry = dict[str, Any]
Verdict = tuple[str, str, float, float]
"""Case, what is to be reached, the least of it, and what was measured."""

Point = tuple[float, float, str, str, str]
"""Of a roofline: operations per byte, TFLOP/s, marker, colour, label."""


def ratio(entry: Entry, against: str, subject: str = "ours") -> float | None:
    """Return how many times as fast as `against` ours is; None if one of them was not timed."""
    times = entry["us"]
    if subject not in times or against not in times:
        return None
    return times[against] / times[subject]


def bandwidth_part(entry: Entry, *, launch: bool) -> float | None:
    """Return the part of copy bandwidth that ours reaches, the launch included in its time or not.

    What launching takes is the time of a graph with one tiny kernel.
    """
    if "ours" not in entry["us"]:
        return None
    time_us = entry["us"]["ours"] - (0.0 if launch else entry["launch_us"])
    return entry["bytes"] / time_us / 1e6 / entry["copy_tb_s"]


def verdicts(
    entry: Entry, name: str, targets: Iterable[Target], labels: Mapping[str, str]
) -> list[Verdict]:
    """Return everything that an entry is to reach and that was timed.

    A wrong result has no speed: it measures 0.
    """
    found = []
    for target in targets:
        if target.against == "copy":
            measured, what = bandwidth_part(entry, launch=False), "part of copy bandwidth"
        else:
            measured = ratio(entry, target.against, target.subject)
            whose = "" if target.subject == "ours" else f"{labels[target.subject]} "
            what = f"{whose}vs {labels[target.against]}"
        if measured is not None:
            measured = 0.0 if target.subject in entry["wrong"] else measured
            found.append((name, what, target.least, measured))
    return found


def targets_table(found: Sequence[Verdict]) -> str:
    """Return the table of what was to be reached."""
    rows = [("case", "target", "least", "measured", "verdict")]
    for name, what, least, measured in found:
        rows.append((name, what, f"{least:g}", f"{measured:.3f}", verdict(least, measured)))
    reached = sum(row[-1] == "reached" for row in rows)
    return f"## Targets: {reached} of {len(found)} reached\n\n{markdown_table(rows)}"


def us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def cell(text: str) -> str:
    """Return `text` as the cell of a table."""
    return " ".join(text.replace("|", "/").split())


_COMMON = tuple(f.name for f in fields(TilePlan))
"""Fields that every plan has."""


def plan_words(plan: Any) -> str:
    """Return a plan in a few short words; of its own fields, those that are not usual."""
    text = f"{plan.family} {plan.block_m}x{plan.block_n}x{plan.block_k}"
    text += f" w{plan.num_warps} s{plan.num_stages}"
    own = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in _COMMON}
    text += f" k/{plan.split_k}" if plan.split_k > 1 else ""
    usual = {f.name: f.default for f in fields(plan)}
    numbers = {name: n for name, n in own.items() if isinstance(n, int) and n != usual[name]}
    return " ".join([text, *(f"{name}={n}" for name, n in numbers.items())])


def what_happened(entry: Entry) -> str:
    """Return what a line says of results that are wrong or missing."""
    text = "".join(f" WRONG {n}" for n in entry.get("wrong", ()))
    failed = entry.get("failed", {}).items()
    text += "".join(f" FAILED {n}: {why[:100]}" for n, why in failed)
    return text + "".join(f" NO GRAPH {n}" for n in entry.get("no_graph", ()))


def summary(found: Sequence[Verdict], most: int = 40) -> str:
    """Return how many targets were reached, and `most` of the others, one a line, worst first."""
    missed = [v for v in found if v[3] < v[2]]
    lines = [f"{len(found) - len(missed)} of {len(found)} targets reached"]
    for name, what, least, measured in sorted(missed, key=lambda v: v[3] / v[2])[:most]:
        lines.append(f"  {name} {what}: {measured:.3f} of {least:g}, {verdict(least, measured)}")
    if len(missed) > most:
        lines.append(f"  and {len(missed) - most} more, in the Markdown file")
    return "\n".join(lines)


def problems(
    entries: Sequence[Entry], name_of: Callable[[Entry], str], error_cell: Callable[..., str]
) -> str:
    """Return the table of what was wrong, failed, or was timed without a graph."""
    rows = [("case", "contender", "what happened")]
    for e in entries:
        name = name_of(e)
        if "error" in e:
            rows.append((name, "all", cell(e["error"])))
            continue
        rows += [(name, n, error_cell(e, n)) for n in e.get("wrong", ())]
        rows += [(name, n, cell(why)) for n, why in e.get("failed", {}).items()]
        graphs = e.get("no_graph", {}).items()
        rows += [(name, n, "timed without a graph: " + cell(why)) for n, why in graphs]
    return f"## Problems\n\n{markdown_table(rows)}" if len(rows) > 1 else ""


def drawing() -> Any:
    """Return matplotlib's pyplot, for files in SVG.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "relax_fusion"  # the same picture from the same record
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    return pyplot


def draw_rooflines(
    record: dict[str, Any], path: Path, charts: Mapping[str, tuple[list[Entry], list[Point]]]
) -> None:
    """Draw a roofline for each of `charts`: TFLOP/s over operations per byte.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    pyplot = drawing()
    count = max(1, len(charts))
    figure, axes = pyplot.subplots(1, count, figsize=(6 * count, 5), sharey=True, squeeze=False)
    for axis, (title, (entries, points)) in zip(axes[0], charts.items(), strict=False):
        _roofs(axis, entries)
        _points(axis, points)
        axis.set(xscale="log", yscale="log", title=title)
        axis.set(xlabel="operations per byte of least traffic", ylabel="TFLOP/s")
        axis.grid(True, which="major", lw=0.3)
        axis.legend(fontsize=7, loc="lower right")
    figure.suptitle(f"{record['gpu']}, {record['dtype']}, {record['date']}")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _roofs(axis: Any, entries: Sequence[Entry]) -> None:
    """Draw what bandwidth and compute allow."""
    copy = max(e["copy_tb_s"] for e in entries)
    ends = [f([e["flops"] / e["bytes"] for e in entries]) for f in (min, max)]
    ridge = PEAK_TFLOPS / copy
    xs = [ends[0] / 2, ridge, max(2 * ends[1], 2 * ridge)]
    axis.plot(xs, [min(PEAK_TFLOPS, x * copy) for x in xs], color="black", lw=1)
    middle = (xs[0] * ridge) ** 0.5
    place = (middle, middle * copy * 1.3)
    axis.annotate(f"copy, {copy:.2f} TB/s", place, ha="right", fontsize=8)
    axis.annotate(f"{PEAK_TFLOPS:.0f} TFLOP/s", (ridge, PEAK_TFLOPS * 1.1), fontsize=8)


def _points(axis: Any, points: Sequence[Point]) -> None:
    seen = set()
    for x, y, marker, colour, label in points:
        shown = None if label in seen else label
        axis.plot(x, y, marker, color=colour, fillstyle="none", label=shown)
        seen.add(label)


def point(entry: Entry, contender: str, marker: str, colour: str, label: str) -> Point:
    """Return where a contender stands in the roofline."""
    speed = entry["flops"] / entry["us"][contender] / 1e6
    return entry["flops"] / entry["bytes"], speed, marker, colour, label
