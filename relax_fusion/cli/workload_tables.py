"""The work of a model as a table, as CSV and as JSON; times on devices as bars of text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..estimator import format_seconds
from ..hardware import DeviceSpec
from ..inventory import FunctionCost
from ..report import Item, Product
from ..report.sizes import Extent, value_of
from ..report.tables import table
from .workload_sizes import Points, sizes_text

_BAR = 40
_MARKS = {"memory": "#", "compute": "=", "launch": "."}


@dataclass(frozen=True)
class DeviceCosts:
    """What each function should take on one device.

    Parameters
    ----------
    name : str
        As it was asked for.
    device : DeviceSpec
        The device.
    dtype : str
        Of the model there.
    costs : tuple of FunctionCost
        One for each function and each combination of sizes.
    """

    name: str
    device: DeviceSpec
    dtype: str
    costs: tuple[FunctionCost, ...]

    def to_record(self) -> dict[str, Any]:
        """Return what JSON holds of it."""
        return {
            "name": self.name,
            "label": self.device.label,
            "description": self.device.description,
            "measured": self.device.measured,
            "dtype": self.dtype,
            "functions": [cost.to_record() for cost in self.costs],
        }


def product_cells(item: Item, values: Sequence[Mapping[str, int]]) -> tuple[str, str, str, str]:
    """Return the cells M, N, K and batch of an item, at some values of sizes or in symbols."""
    products = item.products[:1] if item.kind == "attention" else item.products
    if not products:
        return ("?",) * 4
    same = len({(p.m, p.k, p.batch) for p in products}) == 1
    columns = [
        [_span(getattr(p, name), values) for p in products] for name in ("m", "n", "k", "batch")
    ]
    m, n, k, batch = columns
    if same:
        return m[0], " + ".join(n), k[0], batch[0]
    return tuple("; ".join(column) for column in columns)  # type: ignore[return-value]


def product_text(item: Item, values: Sequence[Mapping[str, int]] = ()) -> str:
    """Return the products of an item as ``64 x 256 x 64``, and how many of them there are."""
    m, n, k, batch = product_cells(item, values)
    return f"{m} x {n} x {k}" + (f", {batch} times" if batch != "1" else "")


def _span(extent: Extent, values: Sequence[Mapping[str, int]]) -> str:
    if isinstance(extent, int) or not values:
        return str(extent)
    found = [value_of(extent, each) for each in values]
    known = [n for n in found if n is not None]
    if not known or len(known) < len(found):
        return str(extent)
    low, high = min(known), max(known)
    return str(low) if low == high else f"{low}..{high}"


def quantity(numbers: Sequence[float | None], unit: str) -> str:
    """Return the least and the largest of some numbers with a unit; "?" where one is unknown."""
    known = [n for n in numbers if n is not None]
    if not known or len(known) < len(numbers):
        return "?" if numbers else "-"
    ends = dict.fromkeys(_short(n, unit) for n in (min(known), max(known)))
    return "..".join(ends)


def _short(number: float, unit: str) -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def function_table(items: Sequence[Item], points: Points) -> str:
    """Return one row per item of a function, and their sum."""
    shown = points.values if points.ranges else []
    names = ("calls", "what", "chain", "M", "N", "K", "batch", "dtype", "weights", "where")
    rows: list[tuple[str, ...]] = [(*names, "operations", "bytes")]
    for item in items:
        where = item.kernel if item.status == "fused" else item.status
        rows.append(
            (
                *(str(item.count), item.kind, item.chain, *product_cells(item, shown)),
                *(item.dtype, item.storage, where),
                quantity([item.flops(v) for v in points.values], "flop"),
                quantity([item.bytes(v) for v in points.values], "B"),
            )
        )
    return table(rows)


def function_text(items: Sequence[Item], points: Points) -> str:
    """Return the table of a function below its name, its sums and its sizes."""
    totals = [total(items, values) for values in points.values]
    unknown = sum(i.count for i in items if i.flops(points.values[0]) is None) if totals else 0
    lines = f"{points.function}: {sum(i.count for i in items)} calls a run"
    if totals:
        flops, moved = zip(*totals, strict=True)
        lines += f", {quantity(flops, 'flop')}, {quantity(moved, 'B')}"
    if points.values and any(points.values):
        at = {**points.values[0], **points.ranges}
        lines += f", at {sizes_text(at)}"
    if unknown:
        lines += f"; {unknown} calls of unknown work are not in the sums"
    return f"{lines}\n\n{function_table(items, points)}"


def total(items: Iterable[Item], values: Mapping[str, int]) -> tuple[float, float]:
    """Return the operations and the bytes of one call of a function, as far as they are known."""
    counted = [(i.count, i.flops(values) or 0.0, i.bytes(values) or 0.0) for i in items]
    return sum(n * f for n, f, _ in counted), sum(n * b for n, _, b in counted)


def unfused_text(items: Sequence[Item]) -> str:
    """Return why items are in no kernel of ours, and what is not certain of their numbers."""
    rows: list[tuple[str, ...]] = [
        ("function", "what", "chain", "size", "calls", "first", "because")
    ]
    for item in items:
        if item.status != "fused":
            why = item.reason + (f" ({item.note})" if item.note else "")
            what = (item.function, item.kind, item.chain, product_text(item))
            rows.append((*what, str(item.count), item.where, why))
    return f"In no kernel of ours\n\n{table(rows)}" if len(rows) > 1 else ""


def traffic_text(items: Sequence[Item], points: Points) -> str:
    """Return how often a function was called with which sizes, and what its matmuls met."""
    if not points.calls:
        return f"{points.function}: no call was recorded"
    rows: list[tuple[str, ...]] = [("calls", "sizes", "M of its matmuls", "operations of a call")]
    for values, calls in zip(points.values, points.calls, strict=True):
        found = {value_of(p.m, values) for i in items if i.kind != "attention" for p in i.products}
        known = sorted(n for n in found if n is not None)
        flops, _ = total(items, values)
        met = ", ".join(map(str, known))
        rows.append((str(calls), sizes_text(values), met, _short(flops, "flop")))
    return f"{points.function}: {sum(points.calls)} calls recorded\n\n{table(rows)}"


def csv_text(items: Sequence[Item], points: Mapping[str, Points]) -> str:
    """Return one row per item and combination of sizes."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        (
            *("function", "kind", "chain", "status", "count", "calls", "batch", "m", "n", "k"),
            *("dtype", "weights", "sizes", "flops", "bytes", "kernel", "reason", "note"),
        )
    )
    for item in items:
        at = points[item.function]
        for number, values in enumerate(at.values):
            m, n, k, batch = _numbers(item.products, values)
            sizes = " ".join(f"{name}={value}" for name, value in values.items())
            calls = at.calls[number] if at.calls else ""
            writer.writerow(
                (
                    *(item.function, item.kind, item.chain, item.status, item.count, calls),
                    *(batch, m, n, k, item.dtype, item.storage, sizes),
                    *(_number(item.flops(values)), _number(item.bytes(values))),
                    *(item.kernel, item.reason, item.note),
                )
            )
    return stream.getvalue()


def _numbers(products: Sequence[Product], values: Mapping[str, int]) -> tuple[str, ...]:
    names = ("m", "n", "k", "batch")
    return tuple(";".join(_span(getattr(p, name), [values]) for p in products) for name in names)


def _number(count: float | None) -> str:
    return "" if count is None else str(int(count))


def function_record(items: Sequence[Item], points: Points) -> dict[str, Any]:
    """Return what JSON holds of a function: its items, with their numbers at every size."""
    at = []
    for number, values in enumerate(points.values):
        flops, moved = total(items, values)
        point: dict[str, Any] = {"sizes": values, "flops": flops, "bytes": moved}
        at.append(point | ({"calls": points.calls[number]} if points.calls else {}))
    return {
        "function": points.function,
        "at": at,
        "items": [
            {
                **item.to_record(),
                "at": [
                    {"sizes": v, "flops": item.flops(v), "bytes": item.bytes(v)}
                    for v in points.values
                ],
            }
            for item in items
        ],
    }


def devices_text(devices: Sequence[DeviceCosts]) -> str:
    """Return a bar for each device, below each function and its sizes."""
    found: dict[tuple[str, str], list[tuple[DeviceCosts, FunctionCost]]] = {}
    for each in devices:
        for cost in each.costs:
            found.setdefault((cost.function, sizes_text(cost.values)), []).append((each, cost))
    legend = ", ".join(f"{mark} {name}" for name, mark in _MARKS.items())
    parts = [
        "Predicted time of the chains and matmuls above; norms by themselves, lookups and copies "
        f"are not in it. Limited by: {legend}"
    ]
    ends = {at for function in dict.fromkeys(f for f, _ in found) for at in _ends(function, found)}
    for (function, sizes), costs in found.items():
        if (function, sizes) not in ends:
            continue
        parts.append(f"{function}{f', {sizes}' if sizes else ''}\n\n{_bars(costs)}")
    if len(ends) < len(found):
        parts.append(f"{len(found) - len(ends)} more combinations of sizes are in --json")
    if any(not each.device.measured for each in devices):
        parts.append("* prices were not compared with times of kernels on this device")
    return "\n\n".join(parts)


def _ends(function: str, found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the first and the last combination of sizes of a function."""
    own = [at for at in found if at[0] == function]
    return [own[0], own[-1]]


def _bars(costs: Sequence[tuple[DeviceCosts, FunctionCost]]) -> str:
    longest = max(cost.seconds for _, cost in costs) or 1.0
    rows: list[tuple[str, ...]] = [("device", "dtype", "sizes", "time", "limit", "")]
    for each, cost in costs:
        name = each.name + ("" if each.device.measured else " *")
        share = f"{cost.limit} {cost.shares[cost.limit]:.0%}" if cost.limit else ""
        told = format_seconds(cost.seconds) if cost.seconds else "?"
        unknown = f"  ({cost.unpriced} calls not priced)" if cost.unpriced else ""
        sizes = sizes_text(cost.values)
        rows.append((name, each.dtype, sizes, told, share, _bar(cost, longest) + unknown))
    return table(rows)


def _bar(cost: FunctionCost, longest: float) -> str:
    """Return marks for the parts of the time, as long together as the time is."""
    length = max(1, round(_BAR * cost.seconds / longest)) if cost.seconds else 0
    marks, done, shares = "", 0.0, cost.shares
    for name, mark in _MARKS.items():
        done += shares[name]
        marks += mark * (round(length * done) - len(marks))
    return marks
