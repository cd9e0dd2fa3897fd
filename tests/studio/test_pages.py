"""The pages: what they tell of a report, a difference and a dump, and that they load nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from math import inf, nan

import pytest

from relax_fusion import Decision, Decline, Reason, Report
from relax_fusion.report import FunctionGraph, LeftOut, Leftover, Material, Node, Scheduling
from relax_fusion.report.passes import DumpRecord, FunctionChange, PassRecord, PhaseRecord
from relax_fusion.report.text_changes import Hunk
from relax_fusion.studio import report_html
from relax_fusion.studio.diff import diff_html
from relax_fusion.studio.html import Html, joined, tag
from relax_fusion.studio.inspect import dump_html
from relax_fusion.studio.remedies import REMEDIES, remedy_of_leftover
from relax_fusion.studio.report_page import fold_layers

from .page_support import NASTY, report_for, source

FILES = ("debug-phase0.py", "debug-phase1.py")


class Checker(HTMLParser):
    """Collects what a page refers to, its text, and elements that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag != "meta":
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src") and str(value).startswith("#"):
                self.links.append(str(value)[1:])
            elif name in ("href", "src", "srcset", "data", "action"):
                self.outside.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    assert checker.open == [] and checker.scripts == 0
    assert "@import" not in html and "url(" not in html and "default-src 'none'" in html
    assert len(set(checker.ids)) == len(checker.ids) and set(checker.links) <= set(checker.ids)
    return checker


def text_of(html: str) -> str:
    """Return what a page says, on one line, cells and paragraphs apart."""
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", html)).split())


@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_a_page_is_whole_and_loads_nothing(target: str) -> None:
    html = report_html(report_for(target))
    found = checked(html)
    assert {"overview", "chains", "not-fused", "graph", "sources"} <= set(found.ids)
    assert found.outside == [] and len(html) < 3_000_000


def test_each_chain_has_its_times_and_its_floor() -> None:
    report = report_for("h200")
    text = text_of(report_html(report))
    for decision in report.fused:
        assert decision.kernel in text
        for prediction in decision.predictions:
            assert prediction.fused_text in text
    assert "TVMScript" in text and "Triton" in text
    assert all(str(d.workload.graph).splitlines()[0].split()[0] in text for d in report.fused)


def test_what_is_not_fused_has_a_reason_a_cost_and_a_remedy() -> None:
    report = report_for("h200")
    text = text_of(report_html(report))
    assert report.leftovers
    for left in report.leftovers:
        assert left.reason in text and remedy_of_leftover(left.kind, left.reason) in text
    assert all(str(d.decline) in text for d in report.declined)
    kernels = {n.op for g in report.material.after for n in g.nodes if n.is_kernel}
    assert kernels - {d.kernel for d in report.fused} and all(name in text for name in kernels)


def test_declines_that_lose_nothing_come_last() -> None:
    harmless = Decline(Reason.NOT_PROFITABLE, "it does not pay", inf, nan)
    two = [
        Decision("FuseA", "a", "main", "x", decline=harmless),
        Decision("FuseB", "b", "main", "y", decline=Decline(Reason.SHAPE, "it is too wide")),
    ]
    left = [Leftover("main", name, "norm", "") for name in "xy"]
    text = text_of(report_html(Report(two, leftovers=left)))
    assert text.index("it is too wide") < text.index("it does not pay")
    assert REMEDIES[Reason.SHAPE] in text


def test_layers_are_folded_and_kernels_linked() -> None:
    report = report_for("h200")
    html = report_html(report)
    assert "4 times:" in text_of(html)
    names = {d.kernel for d in report.fused}
    assert names and all(re.search(rf'<a href="#k\d+">{name}</a>', html) for name in names)


@pytest.mark.parametrize(
    ("labels", "folded"),
    [
        ("", (0, 0, 1)),
        ("a b c", (0, 0, 1)),
        ("a a", (0, 1, 2)),
        ("t n f n f n f h", (1, 2, 3)),
        ("t a b c a b c x a b", (1, 3, 2)),
    ],
)
def test_fold_layers(labels: str, folded: tuple[int, int, int]) -> None:
    assert fold_layers(labels.split()) == folded


def test_what_comes_from_a_model_is_text() -> None:
    report = report_for("h200")
    evil = Decision(
        f"Fuse{NASTY}", NASTY, NASTY, NASTY, decline=Decline(Reason.SHAPE, f"it is {NASTY}")
    )
    fused = [replace(d, spelling=NASTY, function=NASTY, kernel=NASTY) for d in report.fused[:1]]
    graph = FunctionGraph(NASTY, (Node(NASTY, NASTY, (NASTY,), (NASTY,), NASTY, NASTY),))
    material = replace(
        report.material, before=[graph], after=[graph], sources=[source(NASTY, f"</pre>{NASTY}")]
    )
    html = report_html(
        Report(
            [evil, *fused],
            leftovers=[Leftover(NASTY, NASTY, "norm", NASTY)],
            schedules=[Scheduling(NASTY, NASTY)],
            left_out=[LeftOut(NASTY, NASTY, NASTY)],
            device=NASTY,
            material=material,
        )
    )
    assert NASTY not in html and "<script" not in html
    assert html.count("&lt;script&gt;alert") > 10
    checked(html)


def test_text_becomes_html_in_one_place() -> None:
    assert tag("td", "<b>\x1b", class_='"') == '<td class="&quot;">&lt;b&gt;\\u001b</td>'
    assert joined(["<", Html("<br>"), ["&"]], " ") == "&lt; <br> &amp;"


def test_reports_of_little() -> None:
    report = report_for("llvm")
    for some, words in (
        (Report(), "No chain was fused"),
        (Report(report.decisions), "a device that the report does not name"),
        (Report([Decision("FuseGatedFFN", "merged", "main", "y", "kernel")]), "holds no graphs"),
    ):
        html = report_html(some)
        checked(html)
        assert words in text_of(html)


def test_huge_texts_are_cut_and_told() -> None:
    sources = [source(f"f{i}", "x" * 10**6, 5) for i in range(60)]
    html = report_html(Report(material=Material(sources=sources)))
    assert len(html) < 3_000_000
    assert "more characters are left out" in html and "more PrimFuncs" in html


def test_a_text_that_cannot_be_written_loses_no_page() -> None:
    def fail() -> list:
        raise RuntimeError(NASTY)

    html = report_html(Report(material=Material(sources=[replace(source("f", ""), load=fail)])))
    assert "no text: &lt;script" in html


def test_measured_times_stand_beside_predictions() -> None:
    report = report_for("h200")
    first = next(d for d in report.fused if len(d.predictions) > 1)
    times = [replace(p, measured_s=p.fused.seconds * 1.05) for p in first.predictions]
    times[0] = replace(times[0], measured_s=times[0].fused.seconds * 2)
    made = Report([replace(first, predictions=tuple(times))], material=report.material)
    text = text_of(report_html(made))
    assert text.count(", a miss") == 1 and "2.00, a miss" in text and " 1.05 " in text


def test_a_benchmark_is_a_section_of_the_page() -> None:
    report = report_for("h200")
    kernel = report.fused[0].kernel

    def who(seconds: float, agreement: dict[str, object] | None) -> dict[str, object]:
        times = dict.fromkeys(("p50_s", "p90_s", "p99_s"), seconds)
        step = {"size": "1 row", "count": 5, "tokens_per_s": 8.0, **times}
        told = {"about": NASTY, "threads": 2, "is_warm": False, "agreement": agreement}
        return {**told, "steps": {"decode": step}}

    differ = {"largest_relative_difference": 0.25, "largest_difference": 1e-3}
    differ |= {"tolerance": 1e-4, "agrees": False}
    times = {"size": "1 row", "launches": 4, "predicted_s": 1e-5, "resolution_s": 2e-6}
    record = {
        "machine": {"cpu": "a processor", "load_average": 1.5},
        "source": "tiny",
        "dtype": "float16",
        "quantization": None,
        "batch": 2,
        "sizes": {"prompt": 512},
        "is_interrupted": True,
        "contenders": {"relax_fusion": who(1e-3, None), "torch": who(2e-3, differ)},
        "failed": {"tvm": "no compiler"},
        "kernels": {
            "decode": [
                {"kernel": kernel, "p50_s": 3e-5, **times},
                {"kernel": NASTY, "p50_s": 1e-7, **times},
            ]
        },
        "kernels_are_timed": "by a clock",
    }
    html = report_html(report, record)
    checked(html)
    text = text_of(html)
    for words in ("INTERRUPTED", "2.00x", "DISAGREE", "not measured: no compiler", "3.00, a miss"):
        assert words in text
    assert "< 2 us" in text and re.search(rf'<a href="#k\d+">{kernel}</a>', html)


def test_every_reason_has_a_remedy() -> None:
    assert set(REMEDIES) == set(Reason)
    off = remedy_of_leftover("attention", "FuseAttentionChain is switched off")
    assert "--disable FuseAttentionChain" in off
    assert "that the reason names" in remedy_of_leftover("attention", "the pass did not see it")


# --- what differs, and what a dump holds -------------------------------------------------------


def test_the_page_of_a_difference() -> None:
    chain = {"function": "main", "chain": NASTY, "sizes": "1 x 2 x 3"}
    found = {
        "equal": False,
        "both": {"source": "tiny"},
        "facts": {"dtype": {"a": "float16", "b": NASTY}},
        "lost": [{**chain, "count": 2, "seconds": {"1 row": 1e-6, "8 rows": 2e-6}}],
        "replaced": [],
        "gained": [],
        "left": [{"function": "main", "kind": "norm", "reason": "why", "a": 0, "b": 2}],
        "plans": [{**chain, "range": "rows <= 16", "a": "1x2x3", "b": "4x5x6"}],
        "times": [{**chain, "size": "1 row", "fused_s": {"a": 1e-6, "b": 2e-6}}],
        "calls": [],
        "files": {"lib.so": {"a": 1000, "b": None}},
        "kernels": {"known": True, "changed": ["k"], "new": ["n"], "gone": []},
    }
    texts = [{"k": source("k", f"same\n{word}").texts} for word in ("old", NASTY)]
    html = diff_html((NASTY, "b.json"), found, (texts[0], texts[1]))
    checked(html)
    text = text_of(html)
    assert NASTY not in html and "<del>-old</del>" in html and f"+{NASTY}" in unescape(html)
    for words in ("1 us at 1 row, 2 us at 8 rows", "4x5x6", "2.00", "1,000 -", "dtype differs"):
        assert words in text
    assert "Its text is in neither report." in text


def change(name: str, kind: str = "kernel", operand: str = "x") -> FunctionChange:
    lines = (f" def {name}():", "-    old", f"+    new({operand})")
    return FunctionChange(name, kind, "changed", 3, 3, (Hunk(1, 1, lines, 2),))


def record() -> DumpRecord:
    """Two phases: passes with and without changes, kernels that changed alike, a nasty name."""
    quiet = [PassRecord(f"Quiet{i}", 0.001, 1, 0, 30, 4) for i in range(3)]
    graph = change("main", "graph", NASTY)
    kernels = (change("add"), change("add1"), change("mul", operand="y"))
    gone = (FunctionChange("f", "kernel", "removed", 7, 0),)
    fusing = PassRecord("Fuse", 0.5, 1, 3, 40, 3, (graph, *kernels))
    removing = PassRecord("Remove", 0.25, 1, 1, 24, 3, gone)
    return DumpRecord(
        (
            PhaseRecord(FILES[0], "annotating", 0.002, tuple(quiet[:2])),
            PhaseRecord(FILES[1], "fusing", 0.751, (fusing, quiet[2], removing)),
        ),
        {"target": NASTY},
    )


def test_the_page_of_a_dump() -> None:
    html = dump_html(record(), FILES)
    assert set(checked(html).outside) == set(FILES)
    text = text_of(html)
    assert NASTY not in html and NASTY in unescape(html)
    assert "main, 3 kernels changed" in text and "1 kernel removed" in text
    assert "Quiet0, Quiet1" in text and html.count("new(x)") == 1
    assert "In the same way: add1" in text and "raised an error" not in text
    failed = dump_html(replace(record(), failed="Fuse"), ())
    assert "The pass Fuse raised an error" in text_of(failed)
    beside = (*FILES[:1], "passes.json", "report.html")
    assert set(checked(dump_html(record(), beside)).outside) == set(beside)


def test_a_dump_of_nothing_has_a_page() -> None:
    nothing = DumpRecord((PhaseRecord("a.py", "doing", 0.0),))
    assert "No pass ran" in text_of(dump_html(nothing, ()))
    checked(dump_html(DumpRecord(()), ()))
