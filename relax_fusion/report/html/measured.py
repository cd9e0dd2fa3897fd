"""What `bench` measured of a compiled model, put into the page of its report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape
from typing import Any

from ...errors import PipelineError
from . import numbers
from .page import made_page

LINK, SECTION = "<!-- measured: link -->", "<!-- measured: section -->"
"""What stands in a page where something can be put."""

_TITLES = {"prefill": "Time to first token", "decode": "Each token after it"}
_CHAINS = re.compile(r'id="(\w+)" data-kernel="([^"]*)"')


def has_place(page: str) -> bool:
    """Tell whether measured times can be put into a page: another version's may have no place."""
    return LINK in page and SECTION in page


def with_measured(page: str, record: Mapping[str, Any]) -> str:
    """Return the page of a report with a section of what was measured.

    Parameters
    ----------
    page : str
        What `Report.to_html` returned.
    record : mapping
        What ``bench --json`` writes.

    Raises
    ------
    PipelineError
        If the page has no place for it: another version made it.
    """
    if not has_place(page):
        raise PipelineError("the page has no place for measured times; compile the model again")
    chains = {unescape(kernel): name for name, kernel in _CHAINS.findall(page)}
    section = made_page("measured.html", (), data=_data(record), chains=chains)
    return page.replace(LINK, '<a href="#measured">Measured</a>', 1).replace(SECTION, section, 1)


def _data(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the section shows: by step who took how long, and the kernels."""
    contenders: Mapping[str, Any] = record["contenders"]
    steps = dict.fromkeys(step for each in contenders.values() for step in each["steps"])
    return {
        **{name: record[name] for name in ("is_interrupted", "machine", "sizes", "failed")},
        "versions": ", ".join(f"{name} {it}" for name, it in record["versions"].items()),
        "steps": [_step(name, contenders) for name in steps],
        "contenders": contenders,
        "how": record["kernels_are_timed"],
        "kernels": [
            {"step": step, "kernels": [_kernel(each) for each in found]}
            for step, found in record["kernels"].items()
        ],
    }


def _step(step: str, contenders: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        {"who": who, **it["steps"][step]} for who, it in contenders.items() if step in it["steps"]
    ]
    slowest = max(row["p50_s"] for row in rows)
    for row in rows:
        row["share"] = row["p50_s"] / slowest if slowest else 0.0
        row["ratio"] = numbers.gain(row["p50_s"], rows[0]["p50_s"])
    return {"title": _TITLES.get(step, f"A call of {step}"), "rows": rows}


def _kernel(each: Mapping[str, Any]) -> dict[str, Any]:
    least = each["resolution_s"]
    return {
        **each,
        "in_call_s": each["launches"] * each["p50_s"],
        "under_s": least if each["p50_s"] < least else None,
    }
