"""The report of a compilation, as text and as JSON."""

from __future__ import annotations

import json

import pytest

from relax_fusion import Decision, Decline, Reason, Report
from relax_fusion.report import FunctionGraph, Leftover, Node
from relax_fusion.report.coverage import layer_length
from relax_fusion.report.tables import coverage_table

from ..support.chains import Chain, module, run_pass

H = "h = R.nn.rms_norm(x, g, axes=[{}], epsilon=1e-5); y = R.matmul(h, W)"


def filled() -> Report:
    chains = [
        Chain("good", "x[b,32] g[32] W[32,48]", H.format(-1), "y"),
        Chain("bad", "x[32,32] g[32] W[32,48]", H.format(0), "y"),
    ]
    return Report(run_pass(module(chains), "FuseRMSNormMatmul")[1])


def test_fused_and_declined() -> None:
    report = filled()
    assert [d.function for d in report.fused] == ["good"]
    assert [d.function for d in report.declined] == ["bad"]


def test_json_holds_workload_plan_times_and_reason() -> None:
    records = {r["function"]: r for r in json.loads(filled().to_json())["decisions"]}
    good, bad = records["good"], records["bad"]
    assert good["fused"] and good["workload"]["rows"]["name"] == "b" and good["plans"]
    assert any(line.startswith("acc0[i, j0]") for line in good["graph"])
    assert all(p["fused_s"] > 0 and p["unfused_s"] > 0 for p in good["predictions"])
    assert not bad["fused"] and bad["decline"]["reason"] == "wrong axis" and bad["kernel"] == ""


def test_json_has_null_for_infinities_and_nan() -> None:
    decline = Decline(Reason.NOT_PROFITABLE, "it does not pay", float("inf"), float("nan"))
    decision = Decision("FuseGatedFFN", "merged", "main", "y", decline=decline)
    (record,) = json.loads(Report([decision]).to_json())["decisions"]
    assert (record["decline"]["fused_s"], record["decline"]["unfused_s"]) == (None, None)


def test_text_names_both() -> None:
    text = filled().text()
    assert "rms_norm matmul NN" in text and "wrong axis" in text
    assert Report().text() == "no chain of any pattern was found"


def test_a_decision_without_predictions() -> None:
    assert "main" in Report([Decision("FuseGatedFFN", "merged", "main", "y", "kernel")]).text()


@pytest.mark.parametrize(
    ("kernels", "length"),
    [
        ("", None),
        ("a", None),
        ("a b c d", None),
        ("take a b c a b c head", 3),
        ("take a b c a b c a b c head", 3),
        ("a1 b c2 d a2 b c3 d", 4),
        ("first b c d b c last", 3),  # a layer that begins or ends otherwise
        ("n n a n n a n n a", 3),
        ("take n a e f e f n a e e head", 5),  # the branches of a layer in another order
        ("fuse_x_0123abcd_1x2_9 r fuse_x_3210dcba_4 r1", 2),
    ],
)
def test_a_layer_is_what_repeats(kernels: str, length: int | None) -> None:
    assert layer_length(tuple(kernels.split())) == length


def test_coverage_counts_what_is_in_kernels_and_what_is_left() -> None:
    report = filled()
    report.leftovers += [
        Leftover("good", "h", "norm", "why", "norm -> projection"),
        Leftover("good", "p", "softmax", "why not"),
        Leftover("other", "p", "softmax", "why not"),
    ]
    nodes = [
        Node(str(n), op, is_kernel=True, copied=8 * (op == "b")) for n, op in enumerate("abab")
    ]
    report.material.after.append(FunctionGraph("good", tuple(nodes)))
    (good,) = report.coverage
    assert good.chains == {"projection": (1, 1), "norm -> projection": (1, 2)}
    assert (good.per_layer, good.copied) == (2, 16)
    assert "1 of 2" in coverage_table([good]).text()
    (record,) = json.loads(report.to_json())["coverage"]
    assert record["chains"]["norm -> projection"] == [1, 2]
    assert (record["per_layer"], record["copied_bytes"]) == (2, 16)


def test_what_is_left_is_counted_by_reason() -> None:
    left = [Leftover("main", name, "norm", "nobody reads it") for name in ("h", "k")]
    report = Report(leftovers=left)
    assert "main      norm  2      h      nobody reads it" in report.text()
    assert [r["where"] for r in json.loads(report.to_json())["leftovers"]] == ["h", "k"]
