"""The pages of a dump and of a difference in a browser: requests, folds, search, narrow, print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_fusion.report.html.diff_page import diff_html
from relax_fusion.report.html.dump_page import dump_html

from .browser_support import driver, press, requests, resize, type_in
from .test_diff_page import SOURCES, found
from .test_dump_page import FILES, record

__all__ = ["driver"]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "index.html"
    path.write_text(dump_html(record(), FILES, "report.html"), encoding="utf-8")
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


def test_nothing_is_open_until_it_is_asked_for(shown: Any) -> None:
    opened = "return document.querySelectorAll('main details[open]').length"
    assert shown.execute_script(opened) == 0
    shown.execute_script("location.hash = '#phase1-1'")  # a row of a fold
    shown.execute_async_script("setTimeout(arguments[0], 100)")
    assert shown.execute_script(opened) == 1
    press(shown, "e")
    every = shown.execute_script("return document.querySelectorAll('main details').length")
    assert shown.execute_script(opened) == every
    text = "return document.querySelector('.diff ins').innerText"
    assert "<script>" in shown.execute_script(text)  # what the model says is text
    press(shown, "c")
    assert shown.execute_script(opened) == 0


def test_search_finds_text_in_folds(shown: Any) -> None:
    visible = "return [...document.querySelectorAll('.item')].filter(i => i.offsetParent).length"
    assert shown.execute_script(visible) == 4
    for words, count in (("new(y)", 1), ("quiet", 2), ("quiet2", 1), ("nothing at all", 0)):
        type_in(shown, "search", words)
        assert shown.execute_script(visible) == count, words


def test_print_opens_graphs_and_not_kernels(shown: Any) -> None:
    shown.execute_script("dispatchEvent(new Event('beforeprint'))")
    closed = "return [...document.querySelectorAll('details:not([open])')].length"
    texts = "return [...document.querySelectorAll('.texts:not([open])')].length"
    assert shown.execute_script(closed) == shown.execute_script(texts) > 0
    shown.execute_script("dispatchEvent(new Event('afterprint'))")
    assert shown.execute_script("return document.querySelector('details[open]')") is None


@pytest.mark.parametrize("width", [420, 900])
def test_a_narrow_screen_needs_no_scrolling_sideways(shown: Any, width: int) -> None:
    shown.find_element("id", "open-all").click()
    resize(shown, width)
    assert shown.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.fixture
def compared(driver: Any, tmp_path: Path) -> Any:
    path = tmp_path / "diff.html"
    path.write_text(diff_html(("a", "b"), found(), SOURCES), encoding="utf-8")
    resize(driver, 1400)
    driver.get_log("performance")
    driver.get(path.as_uri())
    assert requests(driver) == [path.as_uri()]
    return driver


def test_the_page_of_a_difference(compared: Any) -> None:
    assert compared.get_log("browser") == []
    press(compared, "e")
    lines = "return [...document.querySelectorAll('#kernels .diff')].map(d => d.innerText)"
    assert compared.execute_script(lines)[0].splitlines()[:3] == [" a", "-b", "+c"]
    type_in(compared, "search", "went")
    visible = "return [...document.querySelectorAll('.item')].filter(i => i.offsetParent).length"
    assert compared.execute_script(visible) == 1
    type_in(compared, "search", "")
    for width in (420, 900):
        resize(compared, width)
        assert compared.execute_script("return document.documentElement.scrollWidth") <= width


def test_on_paper_sizes_are_as_large_as_the_text_beside_them(compared: Any) -> None:
    sizes = (
        "return [...document.querySelector('td.mono').parentNode.cells]"
        ".map(cell => getComputedStyle(cell).fontSize)"
    )
    compared.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert len(set(compared.execute_script(sizes))) == 1
    compared.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_on_paper_lines_are_whole_and_headings_stand_before_what_they_head(compared: Any) -> None:
    press(compared, "e")
    resize(compared, 700)
    compared.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    compared.execute_script(
        "document.querySelector('.diff ins').textContent = 'a word of a long line '.repeat(40)"
    )
    cut = "return [...document.querySelectorAll('pre')].filter(p => p.scrollWidth > p.clientWidth)"
    assert compared.execute_script(cut) == []
    breaks = "return [...document.querySelectorAll('h2')].map(h => getComputedStyle(h).breakAfter)"
    assert set(compared.execute_script(breaks)) == {"avoid"}
    compared.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_on_paper_what_a_phase_took_stands_before_its_first_pass(shown: Any) -> None:
    shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    told = shown.execute_script(
        "return getComputedStyle(document.querySelector('h2 + p')).breakAfter"
    )
    assert told == "avoid"
    shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
