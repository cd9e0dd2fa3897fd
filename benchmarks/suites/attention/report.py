"""Tables and picture of `suite` records.  Plain Python; matplotlib for the picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.recording import markdown_table
from benchmarks.report import (
    Entry,
    Point,
    Verdict,
    bandwidth_part,
    draw_rooflines,
    point,
    problems,
    ratio,
    targets_table,
    two_digits,
    us,
    what_happened,
)
from benchmarks.report import verdicts as verdicts_of
from benchmarks.suites.attention.cases import (
    CASES,
    CONTENDERS,
    GROUP_TARGETS,
    GROUPS,
    SDPA,
    targets,
)
from benchmarks.targets import PEAK_TFLOPS

LABELS = {
    "ours": "ours",
    "flash": "flash",
    "cudnn": "cuDNN",
    "flex": "FlexAttention",
    "compile": "torch.compile",
}
RATIOS = ("sdpa", "flash", "cudnn", "flex")
RATIO_LABELS = {**LABELS, "sdpa": "best SDPA"}
MARKERS = {"ours": "o", "flash": "+", "cudnn": "x", "flex": "1"}


def name_of(entry: Entry) -> str:
    return entry["case"]


def with_best(entry: Entry) -> Entry:
    """Return an entry in which the faster back end of SDPA is a contender, ``"sdpa"``."""
    times = [entry["us"][n] for n in SDPA if n in entry["us"]]
    return {**entry, "us": {**entry["us"], "sdpa": min(times)}} if times else entry


def measured(record: dict[str, Any]) -> list[Entry]:
    """Return the entries that have times, in the order of the cases."""
    order = {name: i for i, name in enumerate(CASES)}
    found = [with_best(e) for e in record["cases"] if "error" not in e and e["case"] in order]
    return sorted(found, key=lambda e: order[e["case"]])


def geometric_mean(entries: list[Entry], against: str) -> tuple[float, int]:
    """Return the mean ratio of the entries that have it, and how many those are."""
    ratios = [
        0.0 if "ours" in e["wrong"] else r for e in entries if (r := ratio(e, against)) is not None
    ]
    if not ratios:
        return math.nan, 0
    if not all(ratios):
        return 0.0, len(ratios)
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)), len(ratios)


def verdicts(entries: list[Entry]) -> list[Verdict]:
    """Return everything that groups and single cases are to reach and that was timed."""
    found: list[Verdict] = []
    for group, target in GROUP_TARGETS.items():
        mean, count = geometric_mean([e for e in entries if e["group"] == group], target.against)
        if count:
            cases = sum(case.group == group for case in CASES.values())
            what = f"vs {RATIO_LABELS[target.against]}, geometric mean of {count} of {cases}"
            found.append((group, what, target.least, mean))
    for e in entries:
        found += verdicts_of(e, name_of(e), targets(CASES[e["case"]]), RATIO_LABELS)
    return found


def line(entry: Entry) -> str:
    """Return an entry in one line."""
    if "error" in entry:
        return f"{name_of(entry)}: FAILED {entry['error']}"
    e = with_best(entry)
    times = " ".join(f"{n} {us(e['us'][n])}" for n in CONTENDERS if n in e["us"])
    ratios = " ".join(f"/{n} {r:.2f}" for n in ("sdpa", "flex") if (r := ratio(e, n)) is not None)
    text = f"{name_of(e)}: {times} | " + (f"{ratios} | " if ratios else "")
    text += f"floor {us(e['floor_us'])} err"
    text += "".join(f" {n} {_errors(e, n)}" for n in (*CONTENDERS, "eager") if n in e["errors"])
    return text + what_happened(e)


def _errors(entry: Entry, contender: str) -> str:
    return "/".join(f"{error:.1e}" for error in entry["errors"][contender])


def markdown(record: dict[str, Any]) -> str:
    """Return the tables of a record."""
    entries = measured(record)
    parts = [_head(record), _times(entries), targets_table(verdicts(entries)), _means(entries)]
    parts += [_numbers(entries), _plans(entries)]
    parts.append(problems(record["cases"], name_of, _wrong))
    return "\n\n".join(part for part in parts if part)


def _wrong(entry: Entry, contender: str) -> str:
    allowed = "/".join(f"{a:.1e}" for a in entry["allowed_errors"])
    return f"error {_errors(entry, contender)}, allowed {allowed}"


def _head(record: dict[str, Any]) -> str:
    runs = record.get("runs", ())
    speeds = ", ".join(f"{run['copy_tb_s']:.2f}" for run in runs)
    several = f" {len(runs)} runs, a case in one of them; copies at {speeds} TB/s." if runs else ""
    return (
        f"{record['gpu']}; {record['dtype']}, tensors {record['layout']}, sizes {record['sizes']} "
        "in ours. Medians of CUDA graph replays in us, all contenders of a line in turn, L2 "
        "flushed by reading before each, launch included. Ratios: their time over ours, above 1 "
        "ours is faster; best SDPA is the faster of flash and cuDNN. Heads of k and v are not "
        "expanded for anybody. floor: the larger of bytes over the bandwidth of a copy "
        f"({record['copy_tb_s']:.2f} TB/s; reading alone, as a sum does, is done at "
        f"{record['read_tb_s']:.2f}) and operations on visible pairs over {PEAK_TFLOPS:.0f} "
        f"TFLOP/s.{several}"
    )


def _times(entries: list[Entry]) -> str:
    names = [n for n in LABELS if any(n in e["us"] for e in entries)]
    head = ("case", "floor", *(LABELS[n] for n in names))
    rows = [(*head, *(f"vs {RATIO_LABELS[n]}" for n in RATIOS), "part of floor", "of copy")]
    for e in entries:
        mine = e["us"].get("ours")
        rows.append(
            (
                *(name_of(e), us(e["floor_us"])),
                *(us(e["us"].get(n)) + (" WRONG" if n in e["wrong"] else "") for n in names),
                *(two_digits(ratio(e, n)) for n in RATIOS),
                two_digits(None if mine is None else e["floor_us"] / mine),
                two_digits(bandwidth_part(e, launch=False)),
            )
        )
    return markdown_table(rows)


def _means(entries: list[Entry]) -> str:
    rows = [("group", *(f"vs {RATIO_LABELS[n]}" for n in RATIOS))]
    for group in GROUPS:
        of_group = [e for e in entries if e["group"] == group]
        means = [geometric_mean(of_group, n) for n in RATIOS]
        if any(count for _, count in means):
            rows.append((group, *(f"{m:.2f} ({count})" if count else "" for m, count in means)))
    return f"## Geometric means, of so many cases\n\n{markdown_table(rows)}"


def _numbers(entries: list[Entry]) -> str:
    names = [n for n in (*LABELS, "eager") if any(n in e["errors"] for e in entries)]
    labels = {**LABELS, "eager": "separate operators"}
    rows = [("case", *(labels[n] for n in names), "allowed")]
    for e in entries:
        allowed = "/".join(f"{a:.1e}" for a in e["allowed_errors"])
        rows.append(
            (name_of(e), *(_errors(e, n) if n in e["errors"] else "" for n in names), allowed)
        )
    what = "Largest error against float64 over the largest value / mean error over mean magnitude"
    return f"## Errors\n\n{what}.\n\n{markdown_table(rows)}"


def _plans(entries: list[Entry]) -> str:
    rows = [("case", "plan of ours"), *((name_of(e), e["plan"]) for e in entries if e["plan"])]
    return f"## Plans\n\n{markdown_table(rows)}" if len(rows) > 1 else ""


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the roofline of all cases, a colour for each group.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    entries, points = measured(record), list[Point]()
    for e in entries:
        for name, marker in MARKERS.items():
            if name in e["us"]:
                colour = f"C{GROUPS.index(e['group'])}"
                points.append(point(e, name, marker, colour, f"{e['group']}, {LABELS[name]}"))
    draw_rooflines(record, path, {"attention": (entries, points)} if entries else {})
