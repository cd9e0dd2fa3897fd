"""The page of a report in a browser: no errors, no requests; search, folds, keys, narrow."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest

from relax_fusion.report.html import page_data
from relax_fusion.report.html.render import render

from .browser_support import driver, press, requests, resize, type_in
from .page_support import report_for

__all__ = ["driver"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report_for("h200").to_html(), encoding="utf-8")
    return path


@pytest.fixture
def shown(driver: Any, page: Path) -> Any:
    driver.get_log("performance")
    resize(driver, 1400)
    driver.get(page.as_uri())
    return driver


def test_no_errors_and_no_requests(shown: Any, page: Path) -> None:
    assert shown.get_log("browser") == []
    assert requests(shown) == [page.as_uri()]
    assert "<script>" in shown.title  # the model's name is text


def test_search_leaves_what_has_the_words(shown: Any) -> None:
    visible = "return [...document.querySelectorAll('.item')].filter(i => i.offsetParent).length"
    every = shown.execute_script(visible)
    type_in(shown, "search", "softmax axis")
    some = shown.execute_script(visible)
    assert 0 < some < every
    assert shown.find_element("id", "found").text.startswith(f"{some} of ")
    type_in(shown, "search", "no such word")
    assert shown.execute_script(visible) == 0
    type_in(shown, "search", "")
    assert shown.execute_script(visible) == every


def test_folds_open_and_close_and_links_open_them(shown: Any) -> None:
    count = "return document.querySelectorAll('main details[open]').length"
    shown.find_element("id", "open-all").click()
    every = shown.execute_script(count)
    assert every == shown.execute_script("return document.querySelectorAll('main details').length")
    shown.find_element("id", "close-all").click()
    assert shown.execute_script(count) == 0
    shown.execute_script("location.hash = '#k1'")
    shown.execute_async_script("setTimeout(arguments[0], 100)")
    assert shown.execute_script("return document.getElementById('k1').open")


def test_the_keyboard(shown: Any) -> None:
    press(shown, "/")
    active = "return document.activeElement.id"
    assert shown.execute_script(active) == "search"
    press(shown, "k1\ue00c")  # Escape clears and leaves the field
    assert shown.execute_script(active) == ""
    press(shown, "e")
    assert shown.execute_script("return !document.querySelector('main details:not([open])')")
    press(shown, "c")
    press(shown, "j")
    press(shown, "j")
    at = "return [...document.querySelectorAll('.item')].findIndex(i => i.matches('.at'))"
    assert shown.execute_script(at) == 1
    press(shown, "k")
    assert shown.execute_script(at) == 0


def test_enter_in_the_search_goes_to_what_was_found(shown: Any) -> None:
    shown.find_element("id", "close-all").click()
    press(shown, "/")
    press(shown, "softmax axis\ue007")
    at = shown.execute_script("return document.querySelector('.item.at')")
    assert at is not None and "softmax" in at.text and at.is_displayed()
    assert at == shown.execute_script("return document.querySelector('.item:not(.off)')")
    assert shown.execute_script("return document.activeElement.id") != "search"
    box = at.rect
    top = shown.execute_script("return scrollY")
    assert top <= box["y"] < top + 1000
    type_in(shown, "search", "")


def test_what_was_chosen_at_some_rows(shown: Any) -> None:
    table = "return document.getElementById('chosen-table').textContent"
    type_in(shown, "rows", "1")
    at_one = shown.execute_script(table)
    type_in(shown, "rows", "300")
    assert at_one != shown.execute_script(table)
    ranges = "return [...document.querySelectorAll('#k1 .range.here h4')].map(h => h.textContent)"
    (head,) = shown.execute_script(ranges)
    lower, upper = (head.split()[i] for i in (1, 3))
    assert int(lower) <= 300 and (upper == "more," or int(upper.rstrip(",")) >= 300)
    hint = shown.find_element("css selector", ".rows .hint")
    assert not hint.is_displayed()
    for wrong in ("0", "300.5", ""):
        type_in(shown, "rows", wrong)
        assert hint.is_displayed() and hint.text == "a whole number from 1 on"


def test_plans_that_differ_in_warps_alone_are_told_apart(shown: Any) -> None:
    type_in(shown, "rows", "300")
    cells = "return [...document.querySelectorAll('#chosen-table tbody tr:first-child td')]"
    texts = shown.execute_script(f"{cells}.map(cell => cell.textContent)")
    assert "warps" in texts[1] and texts[-1].count("warps") == 3
    heads = shown.execute_script(f"{cells}.map(cell => cell.dataset.head)")
    assert heads[1] == "plan chosen" and heads[-1].startswith("rejected")


def test_what_was_chosen_is_not_among_the_rejected(driver: Any, tmp_path: Path) -> None:
    """Rows between two prices can be served by a plan that lost at the size of the price."""
    data = page_data(report_for("h200"), inf)
    chain = next(c for c in data["chains"] if len(c["ranges"]) > 1)
    lost = chain["candidates"]["ranges"][-1]["rejected"]
    chain["steps"][-1] |= {name: lost[1][name] for name in ("plan", "how")}
    path = tmp_path / "page.html"
    path.write_text(render(data), encoding="utf-8")
    driver.get(path.as_uri())
    type_in(driver, "rows", "100000")
    script = (
        "const row = [...document.querySelectorAll('#chosen-table tbody tr')]"
        ".find(r => r.querySelector(`a[href='#${arguments[0]}']`));"
        "return [row.cells[1].textContent, [...row.cells[7].children].map(d => d.textContent)]"
    )
    plan, rejected = driver.execute_script(script, chain["id"])
    assert plan.split() == f"{lost[1]['plan']} {lost[1]['how']}".split() and len(rejected) == 3
    assert not any(" ".join(line.split()).endswith(" ".join(plan.split())) for line in rejected)


def test_a_long_name_of_a_chain_takes_two_lines(shown: Any) -> None:
    resize(shown, 420)
    shown.execute_script(
        "document.querySelector('.answer .chip').append(' of a chain of many operators'.repeat(3))"
    )
    assert shown.execute_script("return document.documentElement.scrollWidth") <= 420


@pytest.mark.parametrize("width", [420, 900])
def test_a_narrow_screen_needs_no_scrolling_sideways(shown: Any, width: int) -> None:
    shown.find_element("id", "open-all").click()
    resize(shown, width)
    assert shown.execute_script("return document.documentElement.scrollWidth") <= width


def test_dark_and_light_differ(shown: Any) -> None:
    colours = set()
    for scheme in ("dark", "light"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        colours.add(shown.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
