"""The page of a report: its data, and what stands in it, without a browser."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from math import inf, nan

import pytest

from relax_fusion import Decision, Decline, Reason, Report
from relax_fusion.estimator import AttentionSize
from relax_fusion.estimator.registry import candidates
from relax_fusion.estimator.survey import survey
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.report import FunctionGraph, Leftover, Material, Node
from relax_fusion.report.html import numbers, page_data
from relax_fusion.report.html.charts import plans_over_rows
from relax_fusion.report.html.kernels import full_text, kernels_of
from relax_fusion.report.html.layers import fold
from relax_fusion.report.html.remedies import REMEDIES, remedy_of_leftover
from relax_fusion.report.html.svg import Scale, tag
from relax_fusion.workload import Attention, DynamicDim

from .page_support import NASTY, report_for, source

VOID = {"meta", "link", "input", "br", "img"}


class Checker(HTMLParser):
    """Collects what a page refers to, and elements that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src") and str(value).startswith("#"):
                self.links.append(str(value)[1:])
            elif name in ("href", "src", "srcset", "data", "action") and value != "data:,":
                self.outside.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"{tag} at {self.getpos()}")


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    assert checker.wrong == [] and checker.open == []
    assert checker.outside == [] and "@import" not in html and "url(" not in html
    assert len(set(checker.ids)) == len(checker.ids)
    assert set(checker.links) <= set(checker.ids)
    return checker


@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_a_page_is_whole_and_loads_nothing(target: str) -> None:
    html = report_for(target).to_html()
    sections = "overview chosen findings roofline graph chains not-fused sources about"
    assert set(sections.split()) <= set(checked(html).ids)
    assert len(html.encode()) < 3_000_000


def test_data_are_json() -> None:
    data = page_data(report_for("h200"))
    assert json.loads(json.dumps(data, allow_nan=False)) == json.loads(json.dumps(data))


def test_the_three_questions_are_answered() -> None:
    report = report_for("h200")
    data, html = page_data(report), report.to_html()
    left = {x["kind"]: x for x in data["leftovers"]}
    assert left["softmax"]["remedy"] and left["softmax"]["seconds"] > 0
    worst = data["answers"]["slowest"][0]
    assert 0 < worst["share"] < 1 and worst["floor_s"] < worst["seconds"]
    chain = next(c for c in data["chains"] if c["pattern"] == "FuseGatedFFN")
    at_300 = next(r for r in chain["candidates"]["ranges"] if (r["upper"] or inf) >= 300)
    work = next(d.workload for d in report.fused if d.pattern == "FuseGatedFFN")
    assert at_300["chosen"]["seconds"] and len(at_300["rejected"]) == 5
    assert at_300["compared"] + at_300["unfit"] == len(
        list(candidates(work, report.material.spec, data["backend"]))
    )
    assert at_300["chosen"]["plan"] in html and at_300["rejected"][0]["plan"] in html


def test_what_costs_most_and_is_not_fused() -> None:
    report = report_for("h200")
    every = page_data(report)
    told = every["answers"]["not_fused"]
    costs = [x["seconds"] or 0.0 for x in every["leftovers"]]
    costs += [d["seconds"] or 0.0 for d in every["declines"] if d["is_loss"]]
    assert told["seconds"] == max(costs) > 0 and told["remedy"]
    fused = replace(report.fused[0], decline=Decline(Reason.SHAPE, "it is taken"), pattern="FuseX")
    taken = page_data(Report([*report.fused, fused], material=report.material))
    assert taken["declines"] == [] and taken["counts"]["declined"] == 0  # another took it
    others = {o["kernel"]: o["result"] for f in taken["functions"] for o in f["others"]}
    assert others and all(re.fullmatch(r"\w+ \[.*\]", result) for result in others.values())
    assert taken["answers"]["not_fused"]["what"] in others
    assert page_data(Report())["answers"]["not_fused"] is None


def test_a_decline_costs_what_all_its_members_cost() -> None:
    report = report_for("h200")
    refusal = Decline(Reason.SHAPE, "too wide")
    nodes = report.material.before[0].nodes
    small, large = (min(nodes, key=lambda n: n.moved), max(nodes, key=lambda n: n.moved))
    pair = [Decision("FuseX", "x", "main", n.name, decline=refusal) for n in (small, large)]
    told = [
        page_data(Report(some, material=report.material))["declines"][0]
        for some in (pair, pair[::-1])
    ]
    alone = [page_data(Report([d], material=report.material))["declines"][0] for d in pair]
    assert told[0]["count"] == 2 and told[0]["cost"] == told[1]["cost"]
    assert told[0]["seconds"] == told[1]["seconds"] == sum(a["seconds"] for a in alone)
    assert " each" not in told[0]["cost"]


def test_steps_of_plans_meet() -> None:
    steps = [
        {"lower": a, "upper": b, "span": "", "plan": p, "family": "f"}
        for a, b, p in ((1, 1, "p"), (2, 512, "q"), (513, None, "p"))
    ]
    drawn = re.findall(
        r'<rect[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"', str(plans_over_rows(steps, 4096, "row"))
    )
    ends = [(float(x), float(x) + float(width)) for x, width in drawn]
    assert len(ends) == 3
    assert all(abs(a[1] - b[0]) < 0.2 for a, b in pairwise(ends))


def test_what_was_compared_is_what_was_chosen_among() -> None:
    report = report_for("llvm")
    decision = next(d for d in report.fused if len(d.predictions) > 1)
    found = survey(decision.workload, report.material.spec, "tir")
    assert [r.upper for r in found.rivals] == [p.upper for p in decision.predictions]
    for rivals, prediction in zip(found.rivals, decision.predictions, strict=True):
        assert rivals.ranked[0][1] == pytest.approx(prediction.least.seconds)
        assert [s for _, s in rivals.ranked] == sorted(s for _, s in rivals.ranked)
    assert all(rule.plans and rule.rule for rule in found.refused)


def test_layers_are_folded_and_kernels_linked() -> None:
    (layers,) = page_data(report_for("h200"))["layers"]
    (before,) = [s for s in layers["before"] if s["repeats"] == 4]
    (after,) = [s for s in layers["after"] if s["repeats"] == 4]
    assert [n["op"] for n in before["nodes"]] == ["rms_norm", "matmul", "silu", "matmul", "add"]
    assert len(after["nodes"]) == 2 and all(n["kernel"] for n in after["nodes"])
    assert {n["kernel"] for n in before["nodes"]} == {n["kernel"] for n in after["nodes"]}


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
def test_fold(labels: str, folded: tuple[int, int, int]) -> None:
    assert fold(labels.split()) == folded


def test_findings() -> None:
    data = page_data(report_for("h200"))
    found = {f["rule"]: f for f in data["findings"]}
    wanted = {"transposed weight", "large copy", "mask as data", "float32 island", "unfused norm"}
    assert wanted <= set(found)
    assert all(f["todo"] for f in found.values())
    assert "700" not in found["transposed weight"]["where"]


def test_a_kernel_far_from_its_floor_is_found() -> None:
    report = report_for("h200")
    slow = [
        replace(d, predictions=tuple(_slower(p, 1e-3) for p in d.predictions))
        for d in report.decisions
    ]
    data = page_data(Report(slow, device="d", material=replace(report.material)))
    assert "far from its roofline" in {f["rule"] for f in data["findings"]}


def _slower(prediction, seconds: float):
    return replace(prediction, fused=replace(prediction.fused, seconds=seconds))


def test_what_comes_from_a_model_is_escaped() -> None:
    report = report_for("h200")
    evil = Decision(
        f"Fuse{NASTY}", NASTY, NASTY, NASTY, decline=Decline(Reason.SHAPE, f"it is {NASTY}")
    )
    fused = [replace(d, spelling=NASTY, function=NASTY, kernel=NASTY) for d in report.fused[:1]]
    graph = FunctionGraph(NASTY, (Node(NASTY, NASTY, (NASTY,), (NASTY,), NASTY, NASTY),))
    material = replace(
        report.material, before=[graph], after=[graph], sources=[source(NASTY, f"</pre>{NASTY}")]
    )
    leftover = Leftover(NASTY, NASTY, "norm", NASTY)
    html = Report([evil, *fused], leftovers=[leftover], device=NASTY, material=material).to_html()
    assert NASTY not in html and "<script>alert" not in html
    assert html.count("<script") == 2
    assert html.count("&lt;script&gt;alert") > 10
    checked(html)


def test_an_empty_report_says_so() -> None:
    html = Report().to_html()
    checked(html)
    for text in ("no chain of any pattern was found", "No chain was fused", "names no device"):
        assert text in html


def test_a_report_without_device_or_workload() -> None:
    report = report_for("llvm")
    html = Report(report.decisions).to_html()
    checked(html)
    assert "so no plan can be priced" in html
    checked(Report([Decision("FuseGatedFFN", "merged", "main", "y", "kernel")]).to_html())


def test_numbers_that_are_none() -> None:
    report = report_for("llvm")
    odd = [
        replace(d, predictions=tuple(_slower(p, v) for p in d.predictions))
        for d, v in zip(report.fused, (nan, inf) * len(report.fused), strict=False)
    ]
    decline = Decline(Reason.NOT_PROFITABLE, "it does not pay", inf, nan)
    odd.append(Decision("FuseGatedFFN", "merged", "main", "y", decline=decline))
    made = Report(odd, material=report.material)
    json.dumps(page_data(made), allow_nan=False)
    html = made.to_html()
    checked(html)
    assert "no finite numbers" in html and "nan" not in re.sub(r"[\w-]*nan\w+", "", html)


def test_huge_texts_are_cut_and_told() -> None:
    material = Material(sources=[source(f"f{i}", "x" * 10**6, 5) for i in range(60)])
    html = Report(material=material).to_html()
    assert len(html) < 3_000_000
    assert "more characters are left out" in html and "PrimFuncs are left out" in html
    assert "2 more texts" in html


def test_a_text_that_cannot_be_written_loses_no_page() -> None:
    def fail() -> list:
        raise RuntimeError(NASTY)

    html = Report(material=Material(sources=[replace(source("f", ""), load=fail)])).to_html()
    assert "no text: &lt;script" in html


def test_the_budget_is_kept_and_told() -> None:
    report = report_for("h200")
    html = report.to_html(seconds=0.0)
    assert "were used up before this kernel" in html and "Texts of" in html
    start = time.perf_counter()
    report.to_html(seconds=0.0)
    assert time.perf_counter() - start < 5


def test_measured_times_stand_beside_predictions() -> None:
    report = report_for("h200")
    first = next(d for d in report.fused if len(d.predictions) > 1)
    times = [replace(p, measured_s=p.fused.seconds * 1.05) for p in first.predictions]
    times[0] = replace(times[0], measured_s=times[0].fused.seconds * 2)
    material = report.material
    html = Report([replace(first, predictions=tuple(times))], material=material).to_html()
    assert html.count(", a miss") == 1 and 'class="miss"' in html and 'class="measured"' in html


def test_every_reason_has_a_remedy() -> None:
    assert set(REMEDIES) == set(Reason)


def test_what_was_switched_off_is_to_be_switched_on() -> None:
    reason = "FuseAttentionChain is switched off"
    assert "--disable FuseAttentionChain" in remedy_of_leftover("attention", reason)
    assert "that the reason names" in remedy_of_leftover("attention", "the pass did not see it")
    leftover = Leftover("main", "a", "attention", reason)
    told = page_data(Report(leftovers=[leftover]))["answers"]["not_fused"]
    assert "--disable FuseAttentionChain" in told["remedy"]


def test_texts_of_kernels_are_there() -> None:
    languages = {
        t["language"] for s in page_data(report_for("h200"))["sources"] for t in s["texts"]
    }
    assert {"TVMScript", "Triton"} <= languages


@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_kernels_that_no_rule_scheduled_have_texts(target: str) -> None:
    """Every kernel that is launched has its text: fused, scheduled, or loops as they were."""
    data = page_data(report_for(target), inf)
    every = {name for s in data["schedules"] for name in s["functions"]}
    assert every - {s["function"] for s in data["sources"]} == set()


def test_numbers() -> None:
    assert numbers.seconds(54.62e-6) == "54.6 µs" and numbers.seconds(nan) == "–"
    assert numbers.scaled(4.8e12, "B/s") == "4.8 TB/s" and numbers.percent(0.031) == "3.1 %"
    assert numbers.slower(1.12, 1.0) == "+12 %" and numbers.slower(3.0, 1.0) == "3.0 ×"
    scale = Scale(1.0, 1000.0, 0.0, 300.0)
    assert [round(scale(v)) for v in (1, 10, 1000, 1e9)] == [0, 100, 300, 300]
    assert tag("text", "<b>", class_='"') == '<text class="&#34;">&lt;b&gt;</text>'


def test_attention_of_one_query_has_any_number_of_keys() -> None:
    report = report_for("h200")
    found = next(d for d in report.fused if isinstance(d.workload, Attention))
    told = replace(found.predictions[0], size=AttentionSize(1, 1, 4096), upper=None)
    for keys, text in (
        (DynamicDim("keys"), "1 query, any number of keys"),
        (4096, "its one size: 1 query × 4,096 keys"),
    ):
        work = replace(found.workload, q_len=1, kv_len=keys)
        (kernel,) = kernels_of([replace(found, workload=work, predictions=(told,))], None)
        assert kernel.fixed == text


def test_plans_of_one_tile_are_told_apart() -> None:
    plan = TilePlan(128, 128, 64, reg_m=4, reg_n=32)
    assert full_text(plan) == "128×128×64 (4×32 in registers)"
    assert full_text(replace(plan, reg_n=64)) == "128×128×64 (4×64 in registers)"
    assert full_text(TilePlan(8, 48, 256, 8, 48, family="panels")) == "panels 8×48×256"
    triton = TilePlan(128, 128, 128, num_warps=12, num_stages=2, family="flash")
    assert full_text(triton) == "flash 128×128×128 (12 warps, 2 stages)"
    refused = [
        r for c in page_data(report_for("h200"))["chains"] for r in c["candidates"]["refused"]
    ]
    assert refused and all("stages)" in p for r in refused for p in r["plans"])
