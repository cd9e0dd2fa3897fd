"""Rules on a whole module, and the record of which scheduled what."""

from __future__ import annotations

import json

import pytest
import tvm
from tvm import relax, s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from relax_fusion import Report, host_target
from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import CPUSpatialRule, GenericMatmulRule, ScheduleKernels
from relax_fusion.dlight_rules.apply import is_scheduled
from relax_fusion.dlight_rules.safe_rule import SafeRule
from relax_fusion.errors import Decline, LoweringError, Reason
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.report.decision import Scheduling
from relax_fusion.workload import NormMatmul, Projection

from ..support.generic_cases import Input, fused


class Failing(SafeRule):
    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule:
        sch = s_tir.Schedule(func)
        sch.compute_inline(sch.get_sblock("matmul"))
        return sch


class Unbuilt(SafeRule):
    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule:
        raise LoweringError("of no form that we know")


class Mistaken(SafeRule):
    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule:
        return {}["a mistake of ours"]


def asserting(func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
    raise AssertionError("not made for this")


def matmul() -> tirx.PrimFunc:
    return fused([Input((8, 16)), Input((16, 4))], relax.op.matmul)


def module() -> tvm.IRModule:
    done = matmul().with_attr("tirx.is_scheduled", 1)
    plain = fused([Input((512, 64))], relax.op.nn.relu)
    functions = {"product": matmul(), "relu": plain, "done": done}
    return tvm.IRModule({n: f.with_attr("global_symbol", n) for n, f in functions.items()})


def scheduled(*rules: ScheduleRule) -> tuple[tvm.IRModule, dict[str, Scheduling]]:
    record: list[Scheduling] = []
    mod = ScheduleKernels(host_target(), rules, record)(module())
    return mod, {s.function: s for s in record}


def test_the_first_rule_that_takes_a_function_is_recorded() -> None:
    mod, record = scheduled(GenericMatmulRule(), CPUSpatialRule())
    assert {name: s.rule for name, s in record.items()} == {
        "product": "GenericMatmulRule",
        "relu": "CPUSpatialRule",
    }
    assert record["product"].plans is not None and record["relu"].plans is None
    assert all(is_scheduled(f) for _, f in mod.functions_items())
    assert mod["done"].attrs["global_symbol"] == "done"


def test_a_rule_that_fails_is_passed_over_and_named() -> None:
    tvm_like = ScheduleRule.from_callable("Asserting")(asserting)
    _, record = scheduled(Failing(), Unbuilt(), tvm_like, GenericMatmulRule())
    assert record["product"].rule == "GenericMatmulRule"
    rules, declines = zip(*record["product"].refusals, strict=True)
    assert rules == ("Failing", "Unbuilt", "dlight.Asserting")
    assert all(d.reason is Reason.SCHEDULE for d in declines)
    assert "of no form" in declines[1].detail and "not made for this" in declines[2].detail
    assert record["relu"].rule == "" and len(record["relu"].refusals) == 3


def test_a_mistake_of_ours_is_not_hidden() -> None:
    with pytest.raises(KeyError, match="a mistake of ours"):
        Mistaken().apply(matmul(), host_target(), False)


def test_a_failed_schedule_is_none_to_tvm() -> None:
    assert Failing().apply(matmul(), host_target(), False) is None
    assert isinstance(Failing().attempt(matmul(), host_target()), Decline)


def test_functions_for_triton_are_left() -> None:
    work = NormMatmul(8, 16, (Projection(4, "kn"),), None, "float32", "float32")
    table = PlanTable.single(TilePlan(16, 16, 16, num_warps=4, family="pointer"))
    func = build_prim_func(work, table).with_attr("global_symbol", "f")
    record: list[Scheduling] = []
    mod = ScheduleKernels(host_target(), [GenericMatmulRule()], record)(tvm.IRModule({"f": func}))
    assert record == [Scheduling("f", "Triton", table)]
    assert not is_scheduled(mod["f"])


def test_the_report_tells_rules_and_tiles() -> None:
    _, record = scheduled(Failing(), GenericMatmulRule(), CPUSpatialRule())
    report = Report(schedules=list(record.values()))
    product, relu = json.loads(report.to_json())["schedules"]
    assert (product["function"], product["rule"]) == ("product", "GenericMatmulRule")
    assert product["plans"][0]["upper"] == -1 and product["plans"][0]["block_n"] >= 4
    assert [r["rule"] for r in product["refusals"]] == ["Failing"]
    assert relu["rule"] == "CPUSpatialRule" and "plans" not in relu
    text = report.text()
    assert "GenericMatmulRule  1          product" in text and "CPUSpatialRule" in text
