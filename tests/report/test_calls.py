"""What a call is told to cost: its sizes, its times and its floor."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from relax_fusion import make_target
from relax_fusion.estimator import AttentionSize
from relax_fusion.estimator.sequence import EARLY_S, all_reduce
from relax_fusion.hardware import device
from relax_fusion.models import config_from_dict, export
from relax_fusion.report import calls
from relax_fusion.report.calls import floor_s
from relax_fusion.report.item import Array, Item
from relax_fusion.report.material import Node
from relax_fusion.workload import Attention, DynamicDim

from ..inventory.test_hand_counts import CONFIGS, report_of
from ..studio.page_support import report_for


def test_calls_have_no_more_rows_than_a_bound_allows() -> None:
    report = report_for("h200")
    sizes = [call.sizes["rows"] for call in report.calls]
    assert sizes == [1, 16, 64, 256, 512]  # 512 of `rows`, which the pipeline was told
    material = replace(report.material, most={"rows": 48})  # of what only the model says
    made = replace(report, material=material)
    assert [call.sizes["rows"] for call in made.calls] == [1, 16, 48]
    assert replace(report, material=replace(material, spec=None)).calls == []


def test_a_call_is_the_sum_of_its_chains_and_the_rest() -> None:
    report = report_for("h200")
    ((kernel, count),) = Counter(d.kernel for d in report.fused).most_common(1)
    assert count > 1, "layers share a kernel"
    last = next(d for d in report.fused if d.kernel == kernel).predictions
    call = report.calls[-1]
    assert call.rest_s > 0 and call.seconds == call.fused_s + call.rest_s
    alone_s = next(p.fused.seconds for p in last if p.size >= 256)
    assert call.fused_s > count * (alone_s - device("h200").launch_s - EARLY_S)
    assert 0 < call.floor_s < call.fused_s < call.unfused_s
    before = replace(report, material=replace(report.material, after=[]))  # no kernels yet
    assert {(c.rest_s, c.seconds == c.fused_s) for c in before.calls} == {(None, True)}


def test_sums_of_workers_are_part_of_the_rest_by_their_sizes() -> None:
    report = report_for("h200")
    spec, call = report.material.spec, report.calls[-1]
    one = report.work_of(call.function)[0]
    rows = next(name for name in call.sizes)
    arrays = (Array((rows, 4096), "float16"),)
    summed = Item(one.function, "collective", "sum", "outside", "float16", arrays=arrays, count=3)
    launch = Node("s", "runtime.disco.allreduce", read_bytes=1 << 30, is_kernel=True)
    graphs = [replace(g, nodes=(*g.nodes, launch)) for g in report.material.after]
    material = replace(report.material, after=graphs)
    with_sums = replace(report, work=[*report.work, summed], material=material).calls
    for before, after in zip(report.calls, with_sums, strict=True):
        more = 3 * all_reduce(2 * 4096 * before.sizes[rows], spec).seconds
        assert after.rest_s == pytest.approx(before.rest_s + more)


def test_what_a_file_says_is_not_predicted_again() -> None:
    report = report_for("h200")
    told = [replace(report.calls[0], fused_s=1.0)]
    assert replace(report, recorded=told).calls == told


def test_a_kernel_without_a_floor_leaves_none_to_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_for("h200")
    assert all(call.floor_s for call in report.calls)
    real, first = calls.floor_s, report.fused[0].workload
    monkeypatch.setattr(calls, "floor_s", lambda w, *a: None if w == first else real(w, *a))
    assert all(c.fused_s > 0 and c.floor_s is None for c in report.calls)


def test_rotated_rows_of_several_sequences_have_a_floor() -> None:
    """Their kernel is told the rows, and not how many positions of a table they read."""
    exported = export(config_from_dict(CONFIGS["llama"]), dtype="float16", max_seq_len=32, batch=2)
    found = [d.workload for d in report_of(exported.mod, make_target("h200")).fused]
    work = next(w for w in found if w is not None and "positions0" in w.graph.dims)
    spec = report_for("h200").material.spec
    moved = sum(work.bytes(rows=64, positions0=1).values())
    assert floor_s(work, spec, 64) == pytest.approx(moved / spec.dram_bytes_per_s)


def test_keys_that_nobody_sees_are_in_no_floor() -> None:
    rows, keys = DynamicDim("q_len"), DynamicDim("kv_len")
    spec = report_for("h200").material.spec
    dtypes = {"dtype": "float16", "out_dtype": "float16"}
    full = Attention(1, rows, keys, 8, 8, 64, 64, 0.125, "bottom_right", None, **dtypes)

    def floor(work: Attention, q_len: int, kv_len: int) -> float:
        return floor_s(work, spec, AttentionSize(1, q_len, kv_len))

    windowed = replace(full, window=128)
    assert floor(windowed, 1, 4096) == floor(full, 1, 128) < floor(full, 1, 4096)
    assert floor(windowed, 64, 4096) == floor(full, 64, 191)
    assert floor(windowed, 64, 100) == floor(full, 64, 100)
    assert floor(replace(full, kv_len=4096, window=128), 1, 4096) == floor(full, 1, 128)
    assert floor(replace(full, causal="top_left"), 64, 4096) == floor(full, 64, 64)
    assert floor(replace(windowed, causal="none"), 64, 4096) == floor(full, 64, 4096)
