"""Tables of widths."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.recording import markdown_table
from benchmarks.report import Entry, cell, problems, ratio, two_digits, us
from benchmarks.suite import done
from benchmarks.suites.matmul.report import LABELS, error_cell, name_of

PEERS = ("cublas", "eager", "compile")


def markdown(record: Entry) -> str:
    """Return the tables of a record."""
    entries = done(record)
    parts = [_head(record), f"## All\n\n{summary(record)}"]
    for title, field in (("rows", "rows"), ("case", "case"), ("model", "size")):
        parts.append(f"## By {title}\n\n{_means(entries, title, field)}")
    parts.append(f"## Times, us\n\n{_times(entries)}")
    return "\n\n".join([*parts, problems(record["cases"], name_of, error_cell)]).rstrip()


def _head(record: Entry) -> str:
    seeds = ", ".join(map(str, sorted({e["seed"] for e in record["cases"]})))
    return (
        f"{record['gpu']}; {record['dtype']}, {len(record['cases'])} chains, drawn by seed "
        f"{seeds}. Ours is compiled once for all rows, with weights as parameters; "
        "cuBLAS computes the matmul alone, without norm, bias, activation and residual. Medians of "
        "CUDA graph replays, all contenders of a line in turn, L2 flushed by reading before each, "
        "launch included. Ratios: their time over ours, above 1 ours is faster; means are "
        "geometric. Ours may err twice as much as eager against float64, and one rounding step."
    )


def ratios(entries: Sequence[Entry], peer: str) -> dict[str, float]:
    """Return a peer's time over ours by the names of those entries in which both were timed.

    A wrong result has no speed: it is as 0.
    """
    found = {name_of(e): (ratio(e, peer), "ours" in e["wrong"]) for e in entries}
    return {name: 0.0 if wrong else r for name, (r, wrong) in found.items() if r is not None}


def mean_of(values: Sequence[float]) -> float:
    return geometric_mean(values) if min(values) > 0 else 0.0


def mean_and_worst(entries: Sequence[Entry], peer: str) -> tuple[str, str]:
    """Return the mean ratio and the worst, with its name."""
    found = ratios(entries, peer)
    if not found:
        return "", ""
    worst = min(found, key=found.__getitem__)
    return two_digits(mean_of(list(found.values()))), f"{found[worst]:.2f} ({worst})"


def summary(record: Entry) -> str:
    """Return means and worst of all."""
    lines = []
    for peer in PEERS:
        found = ratios(done(record), peer)
        if found:
            mean, worst = mean_and_worst(done(record), peer)
            slower = sum(r < 1 for r in found.values())
            of = f"{slower} of {len(found)} slower"
            lines.append(f"- {LABELS[peer]}: mean {mean}, worst {worst}, {of}")
    return "\n".join(lines) or "nothing was compared"


def _means(entries: Sequence[Entry], title: str, field: str) -> str:
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry[field], []).append(entry)
    peers = [peer for peer in PEERS if ratios(entries, peer)]
    of_peers = (name for peer in peers for name in (f"vs {LABELS[peer]}", "worst"))
    rows = [(title, "chains", *of_peers)]
    for value in sorted(groups):
        cells = (text for peer in peers for text in mean_and_worst(groups[value], peer))
        rows.append((str(value), str(len(groups[value])), *cells))
    return markdown_table(rows)


def _times(entries: Sequence[Entry]) -> str:
    peers = [f"vs {LABELS[peer]}" for peer in PEERS]
    rows = [("model", "case", "rows", "floor", *(LABELS[n] for n in ("ours", *PEERS)), *peers)]
    rows[0] = (*rows[0], "kernels of ours")
    for e in entries:
        times = (us(e["us"].get(n)) + " WRONG" * (n in e["wrong"]) for n in ("ours", *PEERS))
        found = (two_digits(ratio(e, peer)) for peer in PEERS)
        kernels = cell("; ".join(e["kernels"].get("ours", ())))
        names = (e["size"], e["case"], str(e["rows"]), us(e["floor_us"]))
        rows.append((*names, *times, *found, kernels))
    return markdown_table(rows)
