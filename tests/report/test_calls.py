"""What a call is told to cost, on the page of a report: its rows, its times and its floor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion import Report, make_target
from relax_fusion.estimator import AttentionSize
from relax_fusion.models import config_from_dict, export
from relax_fusion.report.html import kernels, page_data
from relax_fusion.report.html.floors import floor_of
from relax_fusion.report.html.functions import LIMITS, calls_of
from relax_fusion.workload import Attention, DynamicDim

from ..inventory.test_hand_counts import CONFIGS, report_of
from .page_support import report_for


def test_calls_have_the_rows_of_all_sequences_and_no_more_than_a_bound_allows() -> None:
    report = report_for("h200")
    (limited,) = page_data(report)["functions"]
    assert limited["calls"][-1]["rows"] == 512  # of `rows`, which the pipeline was told
    material = replace(report.material, most={"rows": 64}, after=[])
    (told,) = page_data(Report(report.decisions, work=report.work, material=material))["functions"]
    assert told["calls"][-1]["rows"] == 64  # of what only the model says
    attention = next(d for d in report.fused if isinstance(d.workload, Attention))
    size = AttentionSize(8, 128, 128)
    several = replace(attention.predictions[0], size=size)
    (alone,) = calls_of(Report([replace(attention, predictions=(several,))]))
    assert alone["rows"] == 8 * 128


def test_no_call_has_fewer_rows_than_sequences() -> None:
    report = report_for("h200")
    attention = next(d for d in report.fused if isinstance(d.workload, Attention))
    matmul = next(d for d in report.fused if len(d.predictions) > 1)
    several = replace(attention.predictions[0], size=AttentionSize(8, 1, 128))
    both = [replace(attention, predictions=(several,)), matmul]
    assert [c["rows"] for c in calls_of(Report(both))][:3] == [8, 16, 64]


def test_a_call_with_operators_left_over_has_lower_bounds() -> None:
    """What is left over is counted as if it took a launch and its bytes, at few rows."""
    report = report_for("h200")
    html = report.to_html()
    assert sum(f["left"] for f in page_data(report)["functions"]) == len(report.leftovers) > 0
    assert '<div class="tile"><b>≥ ' in html and "left over</a></b> among them" in html
    whole = Report(report.decisions, material=report.material).to_html()
    assert "≥" not in whole and "left over</a></b> among them" not in whole


def test_what_is_told_of_fused_kernels_alone_says_so() -> None:
    report = report_for("h200")
    (function,) = page_data(report)["functions"]
    call = function["calls"][-1]
    assert call["rest_s"] > 0 and call["share"] > call["floor_s"] / call["seconds"]
    told = "fused kernels: floor", "from “in fused kernels” on are about the fused kernels alone"
    assert all(text in report.to_html() for text in told)
    before = Report(report.decisions, material=replace(report.material, after=[]))  # no kernels yet
    assert {(c["rest_s"], c["seconds"] == c["fused_s"]) for c in calls_of(before)} == {(None, True)}


def test_rotated_rows_of_several_sequences_have_a_floor() -> None:
    """Their kernel is told the rows, and not how many positions of a table they read."""
    exported = export(config_from_dict(CONFIGS["llama"]), dtype="float16", max_seq_len=32, batch=2)
    found = [d.workload for d in report_of(exported.mod, make_target("h200")).fused]
    work = next(w for w in found if w is not None and "positions0" in w.graph.dims)
    floor = floor_of(work, report_for("h200").material.spec, 64)
    assert floor is not None
    assert floor.bytes == sum(work.bytes(rows=64, positions0=1).values())


def test_a_kernel_without_a_floor_leaves_none_to_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_for("h200")
    assert all(call["floor_s"] for call in calls_of(report))
    real, first = kernels.floor_of, report.fused[0].workload
    monkeypatch.setattr(kernels, "floor_of", lambda w, *a: None if w == first else real(w, *a))
    (function,) = page_data(report)["functions"]
    for call in function["calls"]:
        assert call["fused_s"] > 0
        assert (call["floor_s"], call["share"], call["bytes"], call["flops"]) == (None,) * 4


def test_keys_that_nobody_sees_are_in_no_floor() -> None:
    rows, keys = DynamicDim("q_len"), DynamicDim("kv_len")
    spec = report_for("h200").material.spec
    dtypes = {"dtype": "float16", "out_dtype": "float16"}
    full = Attention(1, rows, keys, 8, 8, 64, 64, 0.125, "bottom_right", None, **dtypes)

    def bytes_of(work: Attention, q_len: int, kv_len: int) -> float:
        return floor_of(work, spec, AttentionSize(1, q_len, kv_len)).bytes

    windowed = replace(full, window=128)
    assert bytes_of(windowed, 1, 4096) == bytes_of(full, 1, 128)
    assert bytes_of(windowed, 64, 4096) == bytes_of(full, 64, 191)
    assert bytes_of(windowed, 64, 100) == bytes_of(full, 64, 100)
    assert bytes_of(replace(full, kv_len=4096, window=128), 1, 4096) == bytes_of(full, 1, 128)
    assert bytes_of(replace(full, causal="top_left"), 64, 4096) == bytes_of(full, 64, 64)
    assert bytes_of(replace(windowed, causal="none"), 64, 4096) == bytes_of(full, 64, 4096)


def test_overheads_are_no_launches_alone() -> None:
    data = page_data(report_for("h200"))
    assert "launches" not in LIMITS.values()
    assert any(note.startswith("Overheads are") for note in data["notes"])
