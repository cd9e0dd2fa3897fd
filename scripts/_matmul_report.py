"""Tables and picture of `bench_matmul` records.  Plain Python; matplotlib only for the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _matmul_cases import CONTENDERS, PEAK_TFLOPS, targets
from _record import markdown_table

Entry = dict[str, Any]

LABELS = {
    "ours": "ours",
    "unfused": "ours unfused",
    "eager": "eager",
    "compile": "torch.compile",
    "cublas": "cuBLAS, bare",
    "tvm": "TVM as it comes",
}
RATIOS = ("compile", "cublas", "tvm", "unfused")
COLOURS = {"qkv": "C0", "gate_up": "C1", "ffn": "C2", "out": "C3", "down": "C4"}
MARKERS = {"ours": "o", "compile": "x", "cublas": "+"}


def ratio(entry: Entry, against: str) -> float | None:
    """Return how many times as fast as `against` ours is; None if one of them was not timed."""
    times = entry["us"]
    if "ours" not in times or against not in times:
        return None
    return times[against] / times["ours"]


def bandwidth_part(entry: Entry, *, launch: bool) -> float | None:
    """Return the part of copy bandwidth that ours reaches, the launch included in its time or not.

    What launching takes is the time of a graph with one tiny kernel.
    """
    if "ours" not in entry["us"]:
        return None
    time_us = entry["us"]["ours"] - (0.0 if launch else entry["launch_us"])
    return entry["bytes"] / time_us / 1e6 / entry["copy_tb_s"]


def verdicts(entry: Entry) -> list[tuple[str, float, float]]:
    """Return (what, target, measured) for everything that an entry is to reach and was timed.

    A wrong result has no speed: it measures 0.
    """
    found = []
    for target in targets(entry["case"], entry["rows"]):
        if target.against == "copy":
            measured, what = bandwidth_part(entry, launch=False), "part of copy bandwidth"
        else:
            measured, what = ratio(entry, target.against), f"vs {LABELS[target.against]}"
        if measured is not None:
            found.append((what, target.least, 0.0 if "ours" in entry["wrong"] else measured))
    return found


def verdict(least: float, measured: float) -> str:
    """Say whether a target was reached, or by what part it was missed."""
    if measured >= least:
        return "reached"
    return f"missed by {100 * (1 - measured / least):.1f} %"


def line(entry: Entry) -> str:
    """Return an entry in one line."""
    name = f"{entry['size']} {entry['case']} {entry['rows']}"
    if "error" in entry:
        return f"{name}: FAILED {entry['error']}"
    times = " ".join(f"{n} {_us(entry['us'][n])}" for n in CONTENDERS if n in entry["us"])
    found = [(n, ratio(entry, n)) for n in RATIOS]
    ratios = " ".join(f"/{n} {r:.2f}" for n, r in found if r is not None)
    text = f"{name}: {times} | {ratios} | floor {_us(entry['floor_us'])}"
    if "ours" in entry["errors"]:
        text += f" err {entry['errors']['ours']:.1e}/{entry['errors']['eager']:.1e}"
    text += "".join(f" WRONG {n}" for n in entry["wrong"])
    text += "".join(f" FAILED {n}: {why[:100]}" for n, why in entry["failed"].items())
    return text + "".join(f" NO GRAPH {n}" for n in entry["no_graph"])


def markdown(record: dict[str, Any]) -> str:
    """Return the tables of a record."""
    entries = [e for e in record["cases"] if "error" not in e]
    parts = [_head(record), _times(entries), _targets(entries), _one_row(entries)]
    return "\n\n".join([*parts, _problems(record["cases"])]).rstrip()


def summary(record: dict[str, Any], most: int = 40) -> str:
    """Return how many targets were reached, and `most` of the others, one a line, worst first."""
    all_of_them = [(e, *v) for e in record["cases"] if "error" not in e for v in verdicts(e)]
    missed = [m for m in all_of_them if m[3] < m[2]]
    lines = [f"{len(all_of_them) - len(missed)} of {len(all_of_them)} targets reached"]
    for entry, what, least, measured in sorted(missed, key=lambda m: m[3] / m[2])[:most]:
        name = f"{entry['size']} {entry['case']} {entry['rows']}"
        lines.append(f"  {name} {what}: {measured:.3f} of {least:g}, {verdict(least, measured)}")
    if len(missed) > most:
        lines.append(f"  and {len(missed) - most} more, in the Markdown file")
    return "\n".join(lines)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _head(record: dict[str, Any]) -> str:
    return (
        f"{record['gpu']}; {record['dtype']}, rows {record['rows']} in ours (TVM as it comes is "
        "compiled for each number of rows). Medians of CUDA graph replays in us, all contenders of "
        "a line in turn, L2 flushed by reading before each, launch included. Ratios: their time "
        "over ours, above 1 ours is faster. floor: the larger of bytes over the bandwidth of a "
        f"copy and operations over {PEAK_TFLOPS:.0f} TFLOP/s. Errors: largest against float64 over "
        "the largest value; ours may err twice as much as eager and one rounding step."
    )


def _times(entries: list[Entry]) -> str:
    head = ("size", "case", "rows", "floor", *LABELS.values())
    rows = [(*head, *(f"vs {LABELS[n]}" for n in RATIOS), "part of floor", "error, eager's")]
    for e in entries:
        errors = [f"{e['errors'][n]:.1e}" for n in ("ours", "eager") if n in e["errors"]]
        part = e["floor_us"] / e["us"]["ours"] if "ours" in e["us"] else None
        rows.append(
            (
                *(e["size"], e["case"], str(e["rows"]), _us(e["floor_us"])),
                *(_us(e["us"].get(n)) + (" WRONG" if n in e["wrong"] else "") for n in LABELS),
                *(_ratio(ratio(e, n)) for n in RATIOS),
                *(_ratio(part), ", ".join(errors)),
            )
        )
    return markdown_table(rows)


def _targets(entries: list[Entry]) -> str:
    rows = [("size", "case", "rows", "target", "least", "measured", "verdict")]
    for e in entries:
        for what, least, measured in verdicts(e):
            place = (e["size"], e["case"], str(e["rows"]))
            numbers = (f"{least:g}", f"{measured:.3f}", verdict(least, measured))
            rows.append((*place, what, *numbers))
    reached = sum(row[-1] == "reached" for row in rows)
    return f"## Targets: {reached} of {len(rows) - 1} reached\n\n{markdown_table(rows)}"


def _one_row(entries: list[Entry]) -> str:
    rows = [("size", "case", "copy, TB/s", "launch, us", "part, launch off", "part, launch in")]
    for e in (e for e in entries if e["rows"] == 1 and "ours" in e["us"]):
        parts = [bandwidth_part(e, launch=launch) for launch in (False, True)]
        speeds = (f"{e['copy_tb_s']:.2f}", f"{e['launch_us']:.2f}")
        rows.append((e["size"], e["case"], *speeds, *(f"{p:.3f}" for p in parts if p is not None)))
    return f"## Part of copy bandwidth at one row\n\n{markdown_table(rows)}"


def _problems(entries: list[Entry]) -> str:
    rows = [("size", "case", "rows", "contender", "what happened")]
    for e in entries:
        place = (e["size"], e["case"], str(e["rows"]))
        if "error" in e:
            rows.append((*place, "all", _cell(e["error"])))
            continue
        limit = f"allowed {e['allowed_error']:.1e}"
        rows += [(*place, n, f"error {e['errors'][n]:.2e}, {limit}") for n in e["wrong"]]
        rows += [(*place, n, _cell(why)) for n, why in e["failed"].items()]
        rows += [
            (*place, n, "timed without a graph: " + _cell(w)) for n, w in e["no_graph"].items()
        ]
    return f"## Problems\n\n{markdown_table(rows)}" if len(rows) > 1 else ""


def _cell(text: str) -> str:
    """Return `text` as the cell of a table."""
    return " ".join(text.replace("|", "/").split())


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the roofline: TFLOP/s over operations per byte, ours beside the peers.

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

    entries = [e for e in record["cases"] if "error" not in e]
    sizes = list(dict.fromkeys(e["size"] for e in entries))
    figure, axes = pyplot.subplots(
        1, max(1, len(sizes)), figsize=(6 * max(1, len(sizes)), 5), sharey=True, squeeze=False
    )
    for axis, size in zip(axes[0], sizes, strict=False):
        _roofline(axis, size, [e for e in entries if e["size"] == size])
    figure.suptitle(f"{record['gpu']}, {record['dtype']}, {record['date']}")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _roofline(axis: Any, size: str, entries: list[Entry]) -> None:
    """Draw the roofs and the points of one size."""
    copy = max(e["copy_tb_s"] for e in entries)
    ends = [f([e["flops"] / e["bytes"] for e in entries]) for f in (min, max)]
    ridge = PEAK_TFLOPS / copy
    xs = [ends[0] / 2, ridge, max(2 * ends[1], 2 * ridge)]
    axis.plot(xs, [min(PEAK_TFLOPS, x * copy) for x in xs], color="black", lw=1)
    middle = (xs[0] * ridge) ** 0.5
    place = (middle, middle * copy * 1.3)
    axis.annotate(f"copy, {copy:.2f} TB/s", place, ha="right", fontsize=8)
    axis.annotate(f"{PEAK_TFLOPS:.0f} TFLOP/s", (ridge, PEAK_TFLOPS * 1.1), fontsize=8)
    seen = set()
    for e in entries:
        for name, marker in MARKERS.items():
            if name not in e["us"]:
                continue
            label = f"{e['case']}, {LABELS[name]}"
            axis.plot(
                e["flops"] / e["bytes"],
                e["flops"] / e["us"][name] / 1e6,
                marker,
                color=COLOURS[e["case"]],
                fillstyle="none",
                label=None if label in seen else label,
            )
            seen.add(label)
    axis.set(xscale="log", yscale="log", title=size)
    axis.set(xlabel="operations per byte of least traffic", ylabel="TFLOP/s")
    axis.grid(True, which="major", lw=0.3)
    axis.legend(fontsize=7, loc="lower right")
