"""The graph of a stretch of a function, drawn as a column with arcs for what is read later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from . import numbers
from .svg import picture, tag

STEP = 22
"""Height of a row."""

WIDTH, GUTTER = 540, 64


def column(nodes: Sequence[Mapping[str, Any]], label: str) -> Markup:
    """Return a row for each binding: a mark in its kernel's colour, the operator, its type.

    Arcs to the left go from a result to what reads it; one that begins above comes from an earlier
    stretch.
    """
    rows = {node["name"]: i for i, node in enumerate(nodes)}
    height = STEP * len(nodes) + 14
    parts = [_arcs(nodes, rows)]
    parts += [_row(node, i) for i, node in enumerate(nodes)]
    return picture(WIDTH, height, label, *parts)


def _middle(row: int) -> float:
    return 7 + STEP * row + STEP / 2


def _arcs(nodes: Sequence[Mapping[str, Any]], rows: Mapping[str, int]) -> Markup:
    """Return the edges: straight ones between neighbours, arcs between others."""
    parts = []
    for i, node in enumerate(nodes):
        y = _middle(i)
        for name in node["reads"]:
            source = rows.get(name)
            if source == i - 1:
                parts.append(tag("path", d=f"M{GUTTER} {y - STEP + 5:.0f}V{y - 5:.0f}", class_="e"))
            elif source is not None:
                first, reach = _middle(source), min(GUTTER - 8, 10 + 3 * (i - source))
                d = f"M{GUTTER - 5} {first:.0f}C{GUTTER - 5 - reach} {first:.0f} "
                d += f"{GUTTER - 5 - reach} {y:.0f} {GUTTER - 6} {y:.0f}"
                parts.append(tag("path", d=d, class_="e arc"))
            else:
                d = f"M{GUTTER - 24} {y - 9:.0f}C{GUTTER - 22} {y - 2:.0f} "
                d += f"{GUTTER - 16} {y:.0f} {GUTTER - 6} {y:.0f}"
                parts.append(tag("path", d=d, class_="e stub"))
    return Markup("").join(parts)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _row(node: Mapping[str, Any], i: int) -> Markup:
    y = _middle(i)
    colour = "none" if node["colour"] is None else f"c{node['colour']}"
    told = f"{node['name']} = {node['op']}({', '.join([*node['reads'], *node['weights']])})"
    shown = f"{told}\n{node['type']}\n{numbers.scaled(node['bytes'], 'B')} read and written"
    kind = _cut(node["type"], 34)
    what = _cut(node["op"], 66 - len(kind))
    mark = {
        "x": GUTTER - 5,
        "y": y - 5,
        "width": 10,
        "height": 10,
        "rx": 2 if colour != "none" else 5,
    }
    weight = " strong" if node["is_kernel"] or node["colour"] is not None else ""
    parts = [
        tag("title", shown),
        tag("rect", x=GUTTER - 8, y=y - STEP / 2, width=WIDTH - GUTTER, height=STEP, class_="hit"),
        tag("rect", class_=f"node {colour}", **mark),
        tag("text", what, x=GUTTER + 14, y=y + 4, class_=f"op{weight}"),
        tag("text", kind, x=WIDTH - 4, y=y + 4, class_="type end"),
    ]
    body = Markup("").join(parts)
    if node["kernel"]:
        return tag("a", body, href=f"#{node['kernel']}")
    return tag("g", body)
