"""Measured times in the page of a report."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from relax_fusion.errors import PipelineError
from relax_fusion.report.html.measured import with_measured

from .browser_support import driver, requests, resize
from .page_support import NASTY, report_for

__all__ = ["driver"]


def times(seconds: float, **more: Any) -> dict[str, Any]:
    names = ("min_s", "p50_s", "p90_s", "p99_s")
    return {"count": 5, "seconds": [seconds], **dict.fromkeys(names, seconds), **more}


def kernel(name: str, measured: float, predicted: float | None) -> dict[str, Any]:
    is_miss = predicted is not None and abs(measured / predicted - 1) > 0.2
    more = {"launches": 4, "predicted_s": predicted, "plan": "", "is_miss": is_miss}
    more["resolution_s"] = 2e-6
    return times(measured, kernel=name, chain="", **more)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    fused = report_for("h200").fused[0].kernel
    who = {"turns": 6, "is_warm": True, "about": "as it was compiled", "agreement": None}
    verdict = {
        "largest_difference": 1e-3,
        "tolerance": 1e-4,
        "agrees": False,
        "largest_relative_difference": 0.25,
    }
    return {
        "is_interrupted": False,
        "machine": {"cpu": "a processor", "gpu": "a GPU"},
        "versions": {"torch": "2"},
        "sizes": {"prompt": 512},
        "contenders": {
            "relax_fusion": {**who, "steps": {"prefill": times(2e-3, tokens_per_s=256e3)}},
            "torch": {
                **who,
                "about": NASTY,
                "agreement": verdict,
                "steps": {"prefill": times(5e-3, tokens_per_s=102e3, size="seq_len = 512")},
            },
        },
        "failed": {"tvm": "no kernel image"},
        "kernels_are_timed": "one by one",
        "kernels": {"prefill": [kernel(fused, 9e-6, 3e-6), kernel("take", 1e-6, None)]},
    }


@pytest.fixture(scope="module")
def page(record: dict[str, Any]) -> str:
    return with_measured(report_for("h200").to_html(), record)


def test_times_peers_and_kernels(page: str, record: dict[str, Any]) -> None:
    section = page[page.index('<section id="measured">') :].partition("</section>")[0]
    for text in (
        "a GPU",
        "512",
        "2.5 ×",
        "256,000.0",
        "5 ms",
        "DISAGREE",
        "25 %",
        "<td>torch</td><td>seq_len = 512</td>",
        "no kernel image",
    ):
        assert text in section
    fused = record["kernels"]["prefill"][0]["kernel"]
    assert re.search(rf'<a href="#k\d+">{fused}</a>', section)
    assert '<td class="mono">take' in section
    assert ">&lt; 2 µs<" in section and "1 µs" not in section, "take is below the resolution"
    assert section.count("a miss") == 1 and "36 µs" in section, "four runs of 9 us"
    assert NASTY not in section and "Interrupted" not in section
    assert '<a href="#measured">Measured</a>' in page


def test_an_interrupted_run_is_called_one(record: dict[str, Any]) -> None:
    told = deepcopy(record) | {"is_interrupted": True}
    assert "Interrupted" in with_measured(report_for("h200").to_html(), told)


def test_a_page_of_another_version_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(PipelineError, match="has no place for measured times"):
        with_measured("<html></html>", record)


def test_in_a_browser(driver: Any, page: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    driver.get_log("performance")
    driver.get(file.as_uri())
    assert driver.get_log("browser") == [] and requests(driver) == [file.as_uri()]
    driver.find_element("link text", "Measured").click()
    for width in (1400, 390):
        resize(driver, width)
        assert driver.execute_script("return document.body.scrollWidth <= innerWidth")
    bars = "return [...document.querySelectorAll('#measured .bar i')].map(b => b.offsetWidth)"
    ours, torch = driver.execute_script(bars)
    assert 0 < ours < torch
