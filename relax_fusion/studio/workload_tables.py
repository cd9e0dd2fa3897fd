"""The work of a model as a table, as CSV and as JSON, and its time on devices."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..estimator import format_seconds
from ..hardware import DeviceSpec
from ..report import Item, Product, Table
from ..report.costs import FunctionCost
from ..report.sizes import Extent, SizeRange, all_known, sizes_text, times, value_of
from ..report.tables import table


@dataclass(frozen=True)
class DeviceCosts:
    """What each function should take on one device."""

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


@dataclass(frozen=True)
class Points:
    """The values at which one function is counted."""

    function: str
    ranges: Mapping[str, SizeRange]  # values that were given, by the names of sizes
    values: list[dict[str, int]]  # every combination, those of sizes that nobody gave among them


def product_cells(item: Item, values: Sequence[Mapping[str, int]]) -> tuple[str, str, str, str]:
    """Return the cells M, N, K and batch of an item, at some values of sizes or in symbols."""
    products = item.products[:1] if item.kind == "attention" else item.products
    if item.kind == "collective" and item.arrays:
        *rows, width = item.arrays[0].shape
        return _span(times(*rows), values), _span(width, values), "", ""
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
    *sizes, batch = product_cells(item, values)
    return " x ".join(filter(None, sizes)) + (f", {batch} times" if batch not in ("", "1") else "")


def _span(extent: Extent, values: Sequence[Mapping[str, int]]) -> str:
    if isinstance(extent, int) or not values:
        return str(extent)
    known = all_known([value_of(extent, each) for each in values])
    if known is None:
        return str(extent)
    low, high = min(known), max(known)
    return str(low) if low == high else f"{low}..{high}"


def quantity(numbers: Sequence[float | None], unit: str) -> str:
    """Return the least and the largest of some numbers with a unit; "?" where one is unknown."""
    known = all_known(numbers)
    if not known:
        return "-" if known == [] else "?"
    ends = dict.fromkeys(_short(n, unit) for n in (min(known), max(known)))
    return "..".join(ends)


def _short(number: float, unit: str) -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def function_text(items: Sequence[Item], points: Points) -> str:
    """Return a row for each item of a function, below its name, its sums and its sizes."""
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
    return f"{lines}\n\n{table(rows)}"


def total(items: Iterable[Item], values: Mapping[str, int]) -> tuple[float, float]:
    """Return the operations and the bytes of one call of a function, as far as they are known."""
    counted = [(i.count, i.flops(values) or 0.0, i.bytes(values) or 0.0) for i in items]
    return sum(n * f for n, f, _ in counted), sum(n * b for n, _, b in counted)


def unfused_table(items: Sequence[Item]) -> Table:
    """Return why items are in no kernel of ours, and what is not certain of their numbers."""
    rows: list[tuple[str, ...]] = [
        ("function", "what", "chain", "size", "calls", "first", "because")
    ]
    for item in items:
        if item.status != "fused":
            why = item.reason + (f" ({item.note})" if item.note else "")
            what = (item.function, item.kind, item.chain, product_text(item))
            rows.append((*what, str(item.count), item.where, why))
    return Table("In no kernel of ours", rows)


def csv_text(items: Sequence[Item], points: Sequence[Points]) -> str:
    """Return one row per item and combination of sizes."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        (
            *("function", "kind", "chain", "status", "count", "batch", "m", "n", "k"),
            *("dtype", "weights", "sizes", "flops", "bytes", "kernel", "reason", "note"),
        )
    )
    at = {each.function: each.values for each in points}
    for item in items:
        for values in at[item.function]:
            m, n, k, batch = _numbers(item.products, values)
            sizes = " ".join(f"{name}={value}" for name, value in values.items())
            writer.writerow(
                (
                    *(item.function, item.kind, item.chain, item.status, item.count),
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
    for values in points.values:
        flops, moved = total(items, values)
        at.append({"sizes": values, "flops": flops, "bytes": moved})
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


def devices_table(devices: Sequence[DeviceCosts]) -> Table:
    """Return a row for each function, its first and last sizes, and each device."""
    head = ("function", "sizes", "device", "dtype", "time", "limited by", "not priced")
    rows: list[tuple[str, ...]] = [head]
    for function in dict.fromkeys(cost.function for each in devices for cost in each.costs):
        own = [[cost for cost in each.costs if cost.function == function] for each in devices]
        for place in dict.fromkeys((0, len(own[0]) - 1)):
            for each, costs in zip(devices, own, strict=True):
                cost = costs[place]
                name = each.name + ("" if each.device.measured else " *")
                told = format_seconds(cost.seconds) if cost.seconds else "?"
                share = f"{cost.limit} {cost.shares[cost.limit]:.0%}" if cost.limit else ""
                calls = f"{cost.unpriced} calls" if cost.unpriced else ""
                sizes = sizes_text(cost.values)
                rows.append((function, sizes, name, each.dtype, told, share, calls))
    title = (
        "Predicted time of the chains and matmuls above; norms by themselves, lookups and copies "
        "are not in it. Other combinations of sizes are in --json"
    )
    return Table(title, rows)
