"""What `bench` measured, as a section of a page, and how it stands beside what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..estimator import format_seconds
from .html import Html, fold, link, rows_of, tag

MISS = 0.2
"""A measured time is marked where it differs from the predicted one by more than this part."""


def measured_parts(record: Mapping[str, Any], links: Mapping[str, str]) -> list[Html]:
    """Return who took how long, and the kernels beside what was predicted of them."""
    machine, contenders = record["machine"], record["contenders"]
    sizes = ", ".join(f"{name} {size}" for name, size in record["sizes"].items())
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    parts = [tag("p", f"{machine.get('gpu', machine['cpu'])}; {sizes}; {versions}.")]
    if record["is_interrupted"]:
        parts.append(tag("p", "Interrupted: these are the times until then.", class_="bad"))
    head = ("step", "who", "size", "p50", "p90", "p99", "times", "of relax_fusion", "results")
    rows: list[tuple[str, ...]] = [head]
    steps = dict.fromkeys(step for each in contenders.values() for step in each["steps"])
    for step in steps:
        own = next(iter(contenders.values()))["steps"].get(step)
        for who, each in contenders.items():
            if (it := each["steps"].get(step)) is not None:
                times = (format_seconds(it[f"p{percent}_s"]) for percent in (50, 90, 99))
                ratio = f"{it['p50_s'] / own['p50_s']:.2f}x" if own and own["p50_s"] else ""
                told = (str(it["count"]), ratio, _agreement(each["agreement"]))
                rows.append((step, who, it["size"], *times, *told))
    parts.append(rows_of(rows))
    what = [(who, each["about"]) for who, each in contenders.items()]
    what += [(who, f"not measured: {why}") for who, why in record["failed"].items()]
    parts.append(rows_of([("who", "what runs"), *what]))
    for step, kernels in record["kernels"].items():
        rows = [("kernel", "size", "runs", "predicted", "measured", "measured/predicted")]
        rows += [_kernel(each, links) for each in kernels]
        parts.append(fold(f"Kernels of {step}", rows_of(rows)))
    return [*parts, tag("p", f"Kernels are timed so: {record['kernels_are_timed']}.")]


def _agreement(found: Mapping[str, Any] | None) -> str:
    if found is None or found["agrees"] is None:
        return ""
    return "agree" if found["agrees"] else tag("span", "DISAGREE", class_="bad")


def _kernel(each: Mapping[str, Any], links: Mapping[str, str]) -> tuple[str, ...]:
    name, predicted, taken = each["kernel"], each["predicted_s"], each["p50_s"]
    shown = link(name, f"#{links[name]}") if name in links else name
    told = "" if predicted is None else format_seconds(predicted)
    least = each["resolution_s"]
    times = beside(taken, predicted) if taken >= least else (f"< {format_seconds(least)}", "")
    return (shown, each["size"], str(each["launches"]), told, *times)


def beside(measured: float | None, predicted: float | None) -> tuple[str, str]:
    """Return a measured time, and its ratio to the predicted one, marked where it is a miss."""
    if measured is None or not predicted:
        return "" if measured is None else format_seconds(measured), ""
    ratio = f"{measured / predicted:.2f}"
    is_miss = abs(measured / predicted - 1) > MISS
    marked = tag("span", f"{ratio}, a miss", class_="bad") if is_miss else ratio
    return format_seconds(measured), marked
