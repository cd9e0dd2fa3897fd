"""The pictures of one chain: its candidates, its times over rows, its plans over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from . import numbers
from .svg import Axes, Scale, picture, spanning, tag, titled

WIDTH = 560
LEFT, RIGHT = 74, 540


def families_of(ranges: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return a colour for each family of plans, the same in all ranges."""
    names = dict.fromkeys(p["family"] for each in ranges for p in each["points"])
    return {name: i % 8 for i, name in enumerate(names)}


def scatter(
    each: Mapping[str, Any], refused: Sequence[Mapping[str, Any]], colours: Mapping[str, int]
) -> Markup:
    """Return predicted time by tile area for one range; what cannot run stands in a strip above."""
    points = [p for p in each["points"] if p["seconds"] and p["area"]]
    chosen = each["chosen"]
    known = [chosen] if chosen["seconds"] and chosen["area"] else []
    areas = [float(p["area"]) for p in (*points, *known)]
    areas += [float(a) for rule in refused for a in rule["areas"]]
    top, bottom = (58 if refused else 26), 222
    x = spanning(areas, LEFT, RIGHT, 1.4)
    y = spanning([p["seconds"] for p in (*points, *known)], bottom, top, 1.2)
    axes = Axes(
        *(x, y, "tile: rows × columns (elements)", "predicted time"),
        *(lambda v: numbers.count(int(v)), numbers.seconds, x.powers_of_two(8)),
    )
    parts = [axes.draw(), *_strip(refused, x)]
    for p in points:
        told = f"{p['plan']}: {numbers.seconds(p['seconds'])}, " + (
            f"{numbers.slower(p['seconds'], chosen['seconds'])} against the chosen plan"
        )
        place = {"cx": x(p["area"]), "cy": y(p["seconds"]), "r": 3.2}
        parts.append(titled("circle", told, class_=f"dot c{colours.get(p['family'], 7)}", **place))
    for p in known:
        told = f"chosen: {p['plan']}, {numbers.seconds(p['seconds'])}"
        parts.append(
            titled("circle", told, class_="chosen", cx=x(p["area"]), cy=y(p["seconds"]), r=6.0)
        )
    label = f"Predicted time by tile for {each['span']} rows, priced at {each['size']}"
    return picture(WIDTH, 262, label, *parts)


def _strip(refused: Sequence[Mapping[str, Any]], x: Scale) -> list[Markup]:
    """Return a strip of crosses for plans that cannot run."""
    if not refused:
        return []
    total = sum(rule["count"] for rule in refused)
    parts = [
        tag("rect", x=LEFT, y=18, width=RIGHT - LEFT, height=18, class_="strip"),
        tag("text", f"pruned: {total}", x=LEFT - 6, y=31, class_="tick end"),
    ]
    for rule in refused:
        places = sorted({round(x(area)) for area in rule["areas"]})
        crosses = "".join(f"M{p - 3} 24l6 6m0 -6l-6 6" for p in places)
        told = f"{numbers.times(rule['count'], 'plan')} of {rule['family']} pruned: {rule['rule']}"
        parts.append(titled("path", told, d=crosses, class_="pruned"))
    return parts


def times_over_rows(ranges: Sequence[Mapping[str, Any]], unit: str) -> Markup | None:
    """Return fused, unfused and floor over rows; None where there are fewer than two sizes."""
    known = [r for r in ranges if r["fused_s"]]
    if len(known) < 2:
        return None
    names = ("fused_s", "unfused_s", "floor_s", "measured_s")
    every = [r[name] for r in known for name in names if r[name]]
    x = Scale(1.0, float(known[-1]["rows"]), LEFT, RIGHT)
    y = spanning(every, 222, 26, 1.2)
    label = "queries" if unit == "query" else "rows"
    parts = [Axes(x, y, label, "time", _rows, numbers.seconds, x.powers_of_two(9)).draw()]
    for name, style in (("floor_s", "floor"), ("unfused_s", "unfused"), ("fused_s", "fused")):
        parts.append(tag("path", d=_line(known, name, x, y), class_=f"line {style}"))
    for r in known:
        told = (
            f"{r['size']}: fused {numbers.seconds(r['fused_s'])} ({r['plan']}), unfused "
            f"{numbers.seconds(r['unfused_s'])}, floor {numbers.seconds(r['floor_s'])}"
        )
        place = {"cx": x(r["rows"]), "cy": y(r["fused_s"])}
        parts.append(titled("circle", told, r=3.0, class_="point fused", **place))
        if r["measured_s"]:
            told = f"{r['size']}: measured {numbers.seconds(r['measured_s'])}"
            style = "miss" if r["is_miss"] else "measured"
            at = {"x": x(r["rows"]) - 3.5, "y": y(r["measured_s"]) - 3.5}
            parts.append(titled("rect", told, width=7, height=7, class_=style, **at))
    return picture(WIDTH, 262, f"Predicted time over {label}, fused, unfused and floor", *parts)


def _line(ranges: Sequence[Mapping[str, Any]], name: str, x: Scale, y: Scale) -> str:
    """Return the path through the points that there are."""
    places = [(x(r["rows"]), y(r[name])) for r in ranges if r[name]]
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places) if places else "M0 0"


def plans_over_rows(steps: Sequence[Mapping[str, Any]], most: int, unit: str) -> Markup | None:
    """Return which plan serves which rows as steps; None for a single plan."""
    if len(steps) < 2:
        return None
    plans = list(dict.fromkeys(s["plan"] for s in steps))
    names = list(dict.fromkeys(s["family"] for s in steps))
    left, height = 190, 16
    bottom = 26 + height * len(plans)
    x = Scale(1.0, float(max(most, (steps[-1]["lower"] or 1) * 2)), left, RIGHT)
    label = "queries" if unit == "query" else "rows"
    parts = []
    for value in x.powers_of_two(8):
        at = x(value)
        parts.append(tag("path", d=f"M{at:.1f} 20V{bottom}", class_="grid"))
        parts.append(tag("text", _rows(value), x=at, y=bottom + 14, class_="tick mid"))
    middle = (left + RIGHT) / 2
    parts.append(tag("text", label, x=middle, y=bottom + 31, class_="label mid"))
    for i, plan in enumerate(plans):
        shown = plan if len(plan) < 31 else plan[:29] + "…"
        row = tag("text", Markup(tag("title", plan)) + shown, x=left - 8, y=33 + height * i)
        parts.append(Markup(str(row).replace("<text", '<text class="tick end"', 1)))
    before: tuple[float, float] | None = None
    for s in steps:
        y = 29.0 + height * plans.index(s["plan"])
        first, last = x(s["lower"]), x(s["upper"] + 1 if s["upper"] else x.high)
        if before is not None:
            d = f"M{first:.1f} {before[1]:.1f}V{y:.1f}"
            parts.append(tag("path", d=d, class_="rise"))
        told = f"{s['span']} {label}: {s['plan']}"
        place = {"x": first, "y": y - 4, "width": max(2.0, last - first), "height": 8}
        parts.append(titled("rect", told, class_=f"step c{names.index(s['family']) % 8}", **place))
        before = (last, y)
    return picture(WIDTH, bottom + 40, f"The plan that serves each number of {label}", *parts)


def _rows(value: float) -> str:
    return numbers.count(int(value))
