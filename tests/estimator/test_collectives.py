"""What collectives between GPUs take, and what reports say of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from relax_fusion import make_target
from relax_fusion.estimator.sequence import ALL_REDUCES, all_reduce
from relax_fusion.hardware import DEVICES
from relax_fusion.models import export
from relax_fusion.report.costs import function_cost
from relax_fusion.studio.workload_tables import product_text

from ..inventory.test_hand_counts import report_of
from ..support.tiny_llama import TWO_LAYERS

H200, CPU = (
    next(spec for spec in DEVICES.values() if spec.kind == kind) for kind in ("gpu", "cpu")
)


def test_figures_are_met_and_joined_by_lines() -> None:
    for moved, seconds in ALL_REDUCES:
        assert all_reduce(moved, H200).seconds == pytest.approx(seconds)
    for (less, least), (more, most) in pairwise(ALL_REDUCES):
        middle = all_reduce((less + more) / 2, H200)
        assert middle.seconds == pytest.approx((least + most) / 2)
    assert all_reduce(2, H200).seconds == ALL_REDUCES[0][1]
    (less, least), (more, most) = ALL_REDUCES[-2:]
    beyond = most + (most - least) * more / (more - less)
    assert all_reduce(2 * more, H200).seconds == pytest.approx(beyond)
    bounds = [all_reduce(moved, H200).bound for moved in (8 << 10, 8 << 20)]
    assert bounds == ["latency", "dram"]
    assert all_reduce(8 << 10, CPU) is None


def test_sums_of_workers_are_priced_by_their_sizes() -> None:
    exported = export(TWO_LAYERS, dtype="float16", max_seq_len=4096, shards=2)
    report = report_of(exported.mod, make_target("h200"))
    hidden, layers = TWO_LAYERS.hidden_size, TWO_LAYERS.num_layers
    for function, rows in (("decode", 1), ("prefill", 2048)):
        values = {"seq_len": rows, "total_len": rows}
        items = [i for i in report.work_of(function) if i.kind == "collective"]
        *sums, gather = items
        assert all(each.chain == "ccl.allreduce sum" for each in sums)
        assert (gather.chain, gather.count) == ("ccl.allgather", 1)
        assert sum(each.count for each in sums) == 2 * layers + 1
        last = 2 if rows > 1 else 0  # those of a prompt's last layer, of one row
        expected = {2 * rows * hidden: 2 * layers + 1 - last}
        expected |= {2 * hidden: last} if last else {}
        assert {each.bytes(values): each.count for each in sums} == expected
        costs = function_cost(function, items, values, H200, "auto")
        for each, cost in zip(sums, costs.costs, strict=False):
            assert product_text(each).endswith(f" x {hidden}") and each.flops(values) == 0
            seconds = each.count * all_reduce(each.bytes(values), H200).seconds
            assert cost.seconds == pytest.approx(seconds)
        assert not costs.unpriced
