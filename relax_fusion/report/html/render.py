"""From the data of a report to its page: pictures, and what the script is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ...validation import json_text
from . import charts, numbers
from .data import page_data
from .functions import LIMITS
from .page import made_page
from .roofline import roofline

if TYPE_CHECKING:
    from ..report import Report


def to_html(report: Report, seconds: float | None = None) -> str:
    """Return the page of a report, as `Report.to_html` says."""
    return render(page_data(report, seconds))


def render(data: dict[str, Any]) -> str:
    """Return the page for data as `page_data` returns them."""
    return made_page(
        "page.html",
        ("base.js", "page.js"),
        data=data,
        chain_of={chain["id"]: chain for chain in data["chains"]},
        plots={chain["id"]: _plots(chain) for chain in data["chains"]},
        roofline=roofline(data["device"], data["chains"]),
        choices=_choices(data),
    )


def _plots(chain: dict[str, Any]) -> dict[str, Any]:
    """Return the pictures of one chain."""
    found, ranges = chain["candidates"], chain["ranges"]
    colours = charts.families_of(found["ranges"])
    most = max((r["rows"] for r in ranges), default=1)
    return {
        "colours": colours,
        "scatter": [charts.scatter(each, found["refused"], colours) for each in found["ranges"]],
        "times": charts.times_over_rows(ranges, chain["unit"]),
        "plans": charts.plans_over_rows(chain["steps"], most, chain["unit"]),
    }


def _choices(data: dict[str, Any]) -> Markup:
    """Return what the script needs to answer what was chosen at some rows, as JSON in a page."""
    found = []
    for chain in data["chains"]:
        found.append(
            {
                "id": chain["id"],
                "title": chain["title"],
                "unit": chain["unit"],
                "in": ", ".join(call["function"] for call in chain["calls"]),
                "fixed": chain["fixed"],
                "steps": [[s["upper"], s["span"], s["plan"], s["how"]] for s in chain["steps"]],
                "ranges": [_choice(chain, r) for r in chain["ranges"]],
            }
        )
    return Markup(json.dumps(json.loads(json_text(found))).replace("<", "\\u003c"))


def _choice(chain: dict[str, Any], r: dict[str, Any]) -> dict[str, Any]:
    """Return the prices in one range of rows, and the fastest plans that were rejected."""
    compared = (c for c in chain["candidates"]["ranges"] if c["upper"] == r["upper"])
    rejected: list[dict[str, Any]] = next(compared, {"rejected": []})["rejected"]
    time = r["fused_s"]
    return {
        "upper": r["upper"],
        "size": r["size"],
        "plan": r["plan"],
        "how": r["how"],
        "time": numbers.seconds(r["fused_s"]),
        "floor": numbers.percent(r["share"]),
        "bound": LIMITS.get(r["bound"], r["bound"]),
        "rejected": [
            [o["plan"], o["how"], numbers.seconds(o["seconds"]), numbers.slower(o["seconds"], time)]
            for o in rejected[:4]  # three, beside the plan that serves some rows of the range
        ],
    }
