"""The roofline with every kernel on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from . import numbers
from .svg import Axes, picture, spanning, tag, titled

WIDTH, HEIGHT = 860, 420


def roofline(device: Mapping[str, Any], chains: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Return arithmetic rate over intensity; None where the device or all floors are missing.

    A kernel is a line through its sizes, a mark at each; measured times are hollow squares.
    """
    points = [
        (chain, r)
        for chain in chains
        for r in chain["ranges"]
        if r["fused_s"] and r["intensity"] and r["flops"]
    ]
    if not device["known"] or not points:
        return None
    rates = [each["flops"] for each in device["rates"]]
    peak = max(rates)
    x = spanning([r["intensity"] for _, r in points] + [peak / device["bandwidth"]], 74, 846, 1.5)
    reached = [r["flops"] / r["fused_s"] for _, r in points]
    y = spanning([*reached, peak], HEIGHT - 50, 34, 1.5)
    axes = Axes(
        *(x, y, "arithmetic intensity (flop per byte)", "flop per second, predicted"),
        *(lambda v: f"{v:g}", lambda v: numbers.scaled(v, "").strip()),
    )
    parts = [axes.draw(), *_roofs(device, x, y)]
    for chain in chains:
        own = [(c, r) for c, r in points if c is chain]
        places = [(x(r["intensity"]), y(r["flops"] / r["fused_s"])) for _, r in own]
        if len(places) > 1:
            d = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
            parts.append(tag("path", d=d, class_=f"trace c{chain['colour']}"))
        marks = [_mark(chain, r, at) for (_, r), at in zip(own, places, strict=True)]
        parts.append(tag("a", Markup("").join(marks), href=f"#{chain['id']}"))
        parts += [_measured(r, x(r["intensity"]), y) for _, r in own if r["measured_s"]]
    label = "Roofline: the rate that each kernel is predicted to reach over its intensity"
    return picture(WIDTH, HEIGHT, label, *parts)


def _roofs(device: Mapping[str, Any], x: Any, y: Any) -> list[Markup]:
    """Return the bandwidth's slope and a line for each peak rate."""
    bandwidth, parts = device["bandwidth"], []
    peak = max(each["flops"] for each in device["rates"])
    low = max(x.low, y.low / bandwidth)
    high = min(x.high, peak / bandwidth)
    slope = f"M{x(low):.1f} {y(low * bandwidth):.1f}L{x(high):.1f} {y(high * bandwidth):.1f}"
    parts.append(tag("path", d=slope, class_="roof"))
    for each in device["rates"]:
        first = max(each["flops"] / bandwidth, x.low)
        if first < x.high:
            at = y(each["flops"])
            parts.append(tag("path", d=f"M{x(first):.1f} {at:.1f}H{x.last}", class_="roof"))
            told = f"{each['dtype']} {numbers.scaled(each['flops'], 'flop/s')}"
            parts.append(tag("text", told, x=x.last, y=at - 6, class_="label end"))
    told = f"memory {numbers.scaled(bandwidth, 'B/s')}"
    middle = (low * high) ** 0.5
    place = {"x": x(middle) - 8, "y": y(middle * bandwidth) - 8}
    parts.append(tag("text", told, class_="label end", **place))
    return parts


def _mark(chain: Mapping[str, Any], r: Mapping[str, Any], at: tuple[float, float]) -> Markup:
    told = (
        f"{chain['title']} at {r['size']}: {numbers.seconds(r['fused_s'])}, "
        f"{numbers.scaled(r['flops'] / r['fused_s'], 'flop/s')}, {numbers.percent(r['share'])} of "
        f"the floor's speed, limited by {r['bound']}"
    )
    place = {"cx": at[0], "cy": at[1], "r": 4.0, "data_rows": r["rows"]}
    return titled("circle", told, class_=f"dot c{chain['colour']}", **place)


def _measured(r: Mapping[str, Any], at: float, y: Any) -> Markup:
    told = f"measured at {r['size']}: {numbers.seconds(r['measured_s'])}"
    style = "miss" if r["is_miss"] else "measured"
    top = y(r["flops"] / r["measured_s"]) - 4
    return titled("rect", told, x=at - 4, y=top, width=8, height=8, class_=style)
