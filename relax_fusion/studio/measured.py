"""What `bench` measured, as tables and sentences, which its text and a page show."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum
from typing import Any

from ..estimator import format_seconds
from ..report import Table
from .html import link

MISS = 0.2
"""A measured time is a miss where it differs from the predicted one by more than this part."""

_TITLES = {"prefill": "time to first token", "decode": "each token after it"}
_INTERRUPTED = "INTERRUPTED: these are the times until then."


def measured_parts(
    record: Mapping[str, Any], links: Mapping[str, str] | None = None
) -> list[Table | str]:
    """Return what ``bench --json`` wrote; `links` are places of a page that tell of kernels."""
    machine, contenders = record["machine"], record["contenders"]
    sizes = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in record["sizes"].items())
    stored = record["quantization"] or record["dtype"]
    batch = f", batch {record['batch']}" if record["batch"] else ""
    where = machine.get("gpu", machine["cpu"])
    heading = f"{record['source']}, {stored}{batch}, on {where}{': ' * bool(sizes)}{sizes}"
    parts: list[Table | str] = [f"{heading}; load average before {machine['load_average']:.1f}"]
    parts += [_INTERRUPTED] if record["is_interrupted"] else []
    steps = dict.fromkeys(step for each in contenders.values() for step in each["steps"])
    parts += [_step(step, contenders) for step in steps]
    parts.append("\n".join([*map(_about, contenders, contenders.values()), *_failures(record)]))
    first: Mapping[str, Any] = next(iter(contenders.values()), {"steps": {}})
    for step, kernels in record["kernels"].items():
        called = first["steps"].get(step, {"p50_s": None})["p50_s"]
        parts.append(_kernels(step, kernels, called, links or {}))
    if record["kernels"]:
        parts.append(f"Kernels are timed so: {record['kernels_are_timed']}.")
    return parts


def _step(step: str, contenders: Mapping[str, Any]) -> Table:
    """Return the times of everybody in one step, ours first."""
    head = (_TITLES.get(step, step), "threads", "size", "p50", "p90", "p99", "tokens/s", "times")
    rows: list[tuple[str, ...]] = [(*head, "of relax_fusion")]
    own = next(iter(contenders.values()))["steps"].get(step)
    for who, each in contenders.items():
        it = each["steps"].get(step)
        if it is None or own is None:
            continue
        times = (format_seconds(it[f"p{percent}_s"]) for percent in (50, 90, 99))
        rate = "" if it["tokens_per_s"] is None else f"{it['tokens_per_s']:,.1f}"
        told = (str(each["threads"] or ""), it["size"], *times, rate, str(it["count"]))
        rows.append((who, *told, f"{it['p50_s'] / own['p50_s']:.2f}x"))
    return Table("", rows)


def _about(who: str, each: Mapping[str, Any]) -> str:
    """Return what exactly ran, and whether its results are ours."""
    once = "" if each["is_warm"] else "; one turn, not warmed up"
    return f"{who}: {each['about']}{once}{_agreement(each['agreement'])}"


def _failures(record: Mapping[str, Any]) -> list[str]:
    return [f"{who}: not measured: {why}" for who, why in record["failed"].items()]


def _agreement(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    worst = found["largest_relative_difference"]
    if worst is None:
        return "; results have other shapes, and are not compared"
    if found["tolerance"] is None:
        return f"; results differ by {worst:.1e} of the largest"
    verdict = "agree" if found["agrees"] else "DISAGREE"
    return (
        f"; results {verdict}: they differ by {found['largest_difference']:.1e}, which is "
        f"{worst:.1e} of the largest; rounding can explain {found['tolerance']:.1e}"
    )


def _kernels(
    step: str, kernels: list[Mapping[str, Any]], called: float | None, links: Mapping[str, str]
) -> Table:
    """Return kernels, and what a call of `called` seconds spends outside of them."""
    rows: list[tuple[str, ...]] = [
        ("kernel", "size", "runs", "measured", "in a call", "predicted", "measured/predicted")
    ]
    known = []
    for each in kernels:
        name, taken, least = each["kernel"], each["p50_s"], each["resolution_s"]
        predicted, runs = each["predicted_s"], each["launches"]
        shown = link(name, f"#{links[name]}") if name in links else name
        cells = (shown, each["size"], str(runs))
        told = "" if predicted is None else format_seconds(predicted)
        if taken < least:
            rows.append((*cells, f"< {format_seconds(least)}", "", told, ""))
            continue
        times = (format_seconds(taken), format_seconds(runs * taken), told)
        rows.append((*cells, *times, ratio_text(taken, predicted)))
        known += [(runs * taken, runs * predicted)] if predicted else []
    total = fsum(each["launches"] * each["p50_s"] for each in kernels)
    rows.append(("all", "", "", "", format_seconds(total), "", ""))
    if called is not None and called > total:
        rows.append(("outside kernels", "", "", "", format_seconds(called - total), "", ""))
    if known:
        both = [fsum(column) for column in zip(*known, strict=True)]
        sums = (*map(format_seconds, both), f"{both[0] / both[1]:.2f}")
        rows.append(("all with a prediction", "", "", "", *sums))
    return Table(f"Kernels of {step}", rows)


def ratio_text(measured: float | None, predicted: float | None) -> str:
    """Return a measured time over the predicted one, and whether that is a miss."""
    if not measured or not predicted:
        return ""
    ratio = measured / predicted
    return f"{ratio:.2f}" + (", a miss" if abs(ratio - 1) > MISS else "")
