"""The report of a compilation, as text and as JSON."""

from __future__ import annotations

import json

from relax_fusion import Decision, Decline, Reason, Report

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
    records = {r["function"]: r for r in json.loads(filled().to_json())}
    good, bad = records["good"], records["bad"]
    assert good["fused"] and good["workload"]["rows"]["name"] == "b" and good["plans"]
    assert any(line.startswith("acc0[i, j0]") for line in good["graph"])
    assert all(p["fused_s"] > 0 and p["unfused_s"] > 0 for p in good["predictions"])
    assert not bad["fused"] and bad["decline"]["reason"] == "wrong axis" and bad["kernel"] == ""


def test_json_has_null_for_infinities_and_nan() -> None:
    decline = Decline(Reason.NOT_PROFITABLE, "it does not pay", float("inf"), float("nan"))
    decision = Decision("FuseGatedFFN", "merged", "main", "y", decline=decline)
    (record,) = json.loads(Report([decision]).to_json())
    assert (record["decline"]["fused_s"], record["decline"]["unfused_s"]) == (None, None)


def test_text_names_both() -> None:
    text = filled().text()
    assert "rms_norm matmul NN" in text and "wrong axis" in text
    assert Report().text() == "no chain of any pattern was found"


def test_a_decision_without_predictions() -> None:
    assert "main" in Report([Decision("FuseGatedFFN", "merged", "main", "y", "kernel")]).text()
