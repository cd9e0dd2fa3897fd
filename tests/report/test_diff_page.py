"""The page of a difference: its data, and its text without a browser."""

from __future__ import annotations

from html import unescape
from typing import Any

from relax_fusion.report import Text
from relax_fusion.report.html.diff_page import diff_data, diff_html

from .page_support import NASTY

KEY = {"function": "decode", "chain": f"FuseAll: {NASTY}", "sizes": "1 x 8 x 8"}


LISTS = ("lost", "gained", "left", "plans", "times", "calls")


def found(**changes: Any) -> dict[str, Any]:
    """Return what ``diff --json`` writes."""
    time = {"size": "1 row", "fused_s": {"a": 1e-6, "b": 2e-6}}
    time |= {"measured_s": {"a": None, "b": 3e-6}}
    return {
        "equal": False,
        "both": {"source": "gpt2", "dtype": "float16"},
        "facts": {"target": {"a": "h200", "b": None}},
        "lost": [{**KEY, "count": 2, "seconds": {"1 row": 1e-6, "4 rows": 2e-6, "8 rows": 3e-6}}],
        "replaced": [],
        "gained": [{**KEY, "count": 1, "seconds": {}}],
        "left": [{"function": "decode", "kind": "norm", "a": 0, "b": 2, "reason": "switched off"}],
        "plans": [{**KEY, "range": "1 to 8", "a": "4x8x8", "b": None}],
        "times": [{**KEY, **time}],
        "calls": [{"function": "decode", "rows": 1, "a": 4e-6, "b": 5e-6}],
        "files": {"lib.so": {"a": 1234567, "b": None}},
        "kernels": {"known": True, "new": ["come"], "gone": ["went"], "changed": ["stays", "bare"]},
        **changes,
    }


def equal() -> dict[str, Any]:
    nothing: dict[str, Any] = {name: [] for name in LISTS}
    kernels = {"known": False, "new": [], "gone": [], "changed": []}
    return found(equal=True, facts={}, files={}, kernels=kernels, **nothing)


def source(*lines: str) -> tuple[Text, ...]:
    return (Text("kernel", "CUDA C++", "\n".join(lines)),)


SOURCES = (
    {"stays": source("a", "b", NASTY), "went": source("old")},
    {"stays": source("a", "c", NASTY), "come": source("new")},
)


def test_a_kernel_in_one_alone_is_not_compared_with_another_of_its_name() -> None:
    sources = ({"come": source("another kernel")}, SOURCES[1])
    kernels = {k["name"]: k for k in diff_data(("A", "B"), found(), sources)["kernels"]}
    (part,) = kernels["come"]["parts"]
    assert part["is_whole"] and "another kernel" not in str(part["hunks"])


def test_chains_tell_their_times_at_the_first_and_the_last_size() -> None:
    chains = diff_data(("A", "B"), found(), SOURCES)["found"]
    assert chains["lost"][0]["predicted"] == "1 µs at 1 row, 3 µs at 8 rows"
    assert chains["gained"][0]["predicted"] == "-"
    assert "<td>1 µs at 1 row, 3 µs at 8 rows</td>" in diff_html(("A", "B"), found(), SOURCES)


def test_whole_calls_come_first() -> None:
    page = diff_html(("A", "B"), found(), SOURCES)
    row = '<td class="n">4 µs</td><td class="n">5 µs</td><td class="n miss-text">+25 %</td>'
    assert row in page and page.index(row) < page.index('id="chains"')


def test_kernels_have_their_differences_and_whole_texts() -> None:
    kernels = {k["name"]: k for k in diff_data(("A", "B"), found(), SOURCES)["kernels"]}
    assert list(kernels) == ["stays", "bare", "come", "went"]
    runs = {
        name: [h["runs"] for p in k["parts"] for h in p["hunks"]] for name, k in kernels.items()
    }
    assert runs["stays"] == [
        [("span", " a"), ("del", "-b"), ("ins", "+c"), ("span", f" {NASTY}")],
    ]
    assert runs["come"] == [[("ins", "+new")]] and runs["went"] == [[("del", "-old")]]
    assert runs["bare"] == []
    assert "Its text is in neither report." in diff_html(("A", "B"), found(), SOURCES)


def test_times_say_how_much_slower() -> None:
    (of,) = diff_data(("A", "B"), found(), SOURCES)["times"]
    (time,) = of["rows"]
    assert (time["told"]["predicted"]["slower"], time["told"]["predicted"]["is_worse"]) == (
        *("2.0 ×", True),
    )
    assert (time["told"]["measured"]["slower"], time["told"]["measured"]["is_worse"]) == ("", False)


def test_everything_that_differs_is_on_the_page() -> None:
    text = unescape(diff_html(("old.cpu", "new.cpu"), found(), SOURCES))
    for words in (
        *(
            "old.cpu",
            "new.cpu",
            "gpt2, float16",
            "h200",
            "chains of A that are no kernels in B",
            "switched off",
        ),
        *("1 to 8", "4x8x8", "1 µs", "2 µs", "3 µs", "1,234,567", "in B only", "in A only"),
    ):
        assert words in text, words
    assert "They are equal" not in text
    assert NASTY not in diff_html(("a", "b"), found(), SOURCES)


def test_equal_compilations() -> None:
    text = diff_html(("a", "b"), equal(), ({}, {}))
    assert "They are equal in all that was compared." in text
    assert text.count('class="empty"') == 7 and "Code of kernels was not compared" in text


def test_rows_of_one_chain_stand_together() -> None:
    rows = [{**KEY, "function": f, "range": r, "a": "x", "b": "y"} for r in "12" for f in "pq"]
    groups = diff_data(("A", "B"), found(plans=rows), SOURCES)["plans"]
    assert [(g["function"], [row["range"] for row in g["rows"]]) for g in groups] == [
        ("p", ["1", "2"]),
        ("q", ["1", "2"]),
    ]
