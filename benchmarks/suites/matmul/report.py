"""Tables and picture of matmuls.  Plain Python; matplotlib only for the picture."""

from __future__ import annotations

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
from benchmarks.suites.matmul.cases import CONTENDERS, quantized_targets, targets
from benchmarks.targets import PEAK_TFLOPS

LABELS = {
    "ours": "ours",
    "unfused": "ours unfused",
    "separate": "ours, separate weights",
    "tir": "ours by TIR",
    "triton": "ours without TIR",
    "eager": "eager",
    "compile": "torch.compile",
    "cublas": "cuBLAS, bare",
    "tvm": "TVM as it comes",
    "mlc": "as MLC-LLM",
}
RATIOS = ("compile", "cublas", "tvm", "unfused", "separate", "tir", "triton", "mlc")
COLOURS = {"qkv": "C0", "qkv_rope": "C5", "gate_up": "C1", "ffn": "C2", "out": "C3", "down": "C4"}
MARKERS = {"ours": "o", "compile": "x", "cublas": "+"}


def verdicts(entry: Entry) -> list[Verdict]:
    """Return everything that an entry is to reach and that was timed."""
    wanted = targets(entry["case"], entry["rows"])
    if "mlc" in entry.get("us", {}):
        wanted = quantized_targets(entry["rows"])
    return verdicts_of(entry, name_of(entry), wanted, LABELS)


def name_of(entry: Entry) -> str:
    return f"{entry['size']} {entry['case']} {entry['rows']}"


def line(entry: Entry) -> str:
    """Return an entry in one line."""
    name = name_of(entry)
    if "error" in entry:
        return f"{name}: FAILED {entry['error']}"
    times = " ".join(f"{n} {us(entry['us'][n])}" for n in CONTENDERS if n in entry["us"])
    found = [(n, ratio(entry, n)) for n in RATIOS]
    ratios = " ".join(f"/{n} {r:.2f}" for n, r in found if r is not None)
    text = f"{name}: {times} | {ratios} | floor {us(entry['floor_us'])}"
    if "ours" in entry["errors"]:
        text += f" err {entry['errors']['ours']:.1e}/{entry['errors']['eager']:.1e}"
    return text + what_happened(entry)


def markdown(record: dict[str, Any], found: list[Verdict]) -> str:
    """Return the tables of a record."""
    entries = [e for e in record["cases"] if "error" not in e]
    notes = [record["note"]] if record.get("note") else []
    parts = [_head(record), *notes, _times(entries), targets_table(found), _one_row(entries)]
    return "\n\n".join([*parts, problems(record["cases"], name_of, error_cell)]).rstrip()


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
                *(e["size"], e["case"], str(e["rows"]), us(e["floor_us"])),
                *(us(e["us"].get(n)) + (" WRONG" if n in e["wrong"] else "") for n in LABELS),
                *(two_digits(ratio(e, n)) for n in RATIOS),
                *(two_digits(part), ", ".join(errors)),
            )
        )
    return markdown_table(rows)


def _one_row(entries: list[Entry]) -> str:
    rows = [("size", "case", "copy, TB/s", "launch, us", "part, launch off", "part, launch in")]
    for e in (e for e in entries if e["rows"] == 1 and "ours" in e["us"]):
        parts = [bandwidth_part(e, launch=launch) for launch in (False, True)]
        speeds = (f"{e['copy_tb_s']:.2f}", f"{e['launch_us']:.2f}")
        rows.append((e["size"], e["case"], *speeds, *(f"{p:.3f}" for p in parts if p is not None)))
    return f"## Part of copy bandwidth at one row\n\n{markdown_table(rows)}"


def error_cell(entry: Entry, contender: str) -> str:
    allowed = f"allowed {entry['allowed_error']:.1e}"
    return f"error {entry['errors'][contender]:.2e}, {allowed}"


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the roofline of each size: TFLOP/s over operations per byte, ours beside the peers.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    charts: dict[str, tuple[list[Entry], list[Point]]] = {}
    for e in (e for e in record["cases"] if "error" not in e):
        entries, points = charts.setdefault(e["size"], ([], []))
        entries.append(e)
        for name, marker in MARKERS.items():
            if name in e["us"]:
                label = f"{e['case']}, {LABELS[name]}"
                points.append(point(e, name, marker, COLOURS[e["case"]], label))
    draw_rooflines(record, path, charts)
