"""Families from outside: one that wins a workload, from its plan to its kernel's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from relax_fusion import (
    DynamicDim,
    KernelFamily,
    NormMatmul,
    PlanTable,
    Report,
    TilePlan,
    register_family,
)
from relax_fusion.errors import TilePlanError
from relax_fusion.estimator import Choice, Footprint, Prediction, choose, registry, violations
from relax_fusion.hardware import DeviceSpec, generic_cpu
from relax_fusion.workload import Projection

from ..passes.common import Chain, compiled, module, outputs

CPU = generic_cpu(2, 32)
WORK = NormMatmul(4, 8, (Projection(16, "kn", ("silu",)),), None, "float32", "float32")


def emit(work: NormMatmul, table: PlanTable, target: Any) -> tirx.PrimFunc:
    """Return the matmul as it is written, and 1 added to tell it from others."""
    x, w = te.placeholder((4, 8), name="x"), te.placeholder((8, 16), name="w")
    k = te.reduce_axis((0, 8), "k")
    acc = te.compute((4, 16), lambda i, j: te.sum(x[i, k] * w[k, j], k), "acc")
    out = te.compute((4, 16), lambda i, j: acc[i, j] / (1 + te.exp(-acc[i, j])) + 1, "out")
    return te.create_prim_func([x, w, out], index_dtype_override="int64")


class Plain(KernelFamily[NormMatmul]):
    """Loops as they are written; predicted to take no time."""

    names = ("plain",)
    kind = "cpu"
    takes = (NormMatmul,)
    error = 1.0
    emitter = f"{__name__}:emit"

    def refuses(self, work: NormMatmul, dev: DeviceSpec) -> str | None:
        return None if isinstance(work.rows, int) else "the rows are dynamic"

    def plans(self, work: NormMatmul, dev: DeviceSpec) -> Iterator[TilePlan]:
        yield TilePlan(1, 1, work.k, family="plain")

    def violations(self, plan: TilePlan, work: NormMatmul, dev: DeviceSpec) -> Iterator[str]:
        if plan.lanes != 1:
            yield f"lanes is {plan.lanes}, plain loops have 1"

    def footprint(self, plan: TilePlan, work: NormMatmul, dev: DeviceSpec) -> Footprint:
        return Footprint(0, 1, 1)

    def predict(self, plan: TilePlan, work: NormMatmul, dev: DeviceSpec, size: Any) -> Prediction:
        return Prediction(1e-9, 0.0, 0.0, 1, "compute")


class Nameless(Plain):
    """A family without an emitter."""

    emitter = ""


class Twin(Plain):
    """A family whose name one of ours has."""

    names = ("panels",)


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "FAMILIES", [*registry.FAMILIES])
    yield
    monkeypatch.undo()
    choose.cache_clear()


def chosen(work: NormMatmul, **options: Any) -> list[str]:
    """Return the families of the plans that are chosen."""
    choice = choose(work, CPU, **options)
    assert isinstance(choice, Choice)
    return [plan.family for _, plan in choice.plans.entries]


@pytest.mark.usefixtures("_own_registry")
def test_a_family_from_outside_wins_a_workload() -> None:
    assert "plain" not in chosen(WORK, always=True)
    register_family(Plain())
    assert chosen(WORK) == ["plain"]
    assert "plain" not in chosen(replace(WORK, rows=DynamicDim("n")), always=True)
    chain = Chain("main", "x[4,8] W[8,16]", "m = R.matmul(x, W); y = R.nn.silu(m)", "y")
    report = Report()
    machine = compiled(module([chain]), report=report)
    x, w = chain.arrays()
    (got,) = outputs(machine, "main", [x, w])
    product = x @ w
    assert np.abs(got - product / (1 + np.exp(-product)) - 1).max() < 1e-5
    assert "Plain" in report.text()


@pytest.mark.usefixtures("_own_registry")
def test_a_users_plan_names_the_family_and_is_checked_by_it() -> None:
    register_family(Plain())
    plan = next(Plain().plans(WORK, CPU))
    assert chosen(WORK, plans=plan) == ["plain"]
    wrong = replace(plan, lanes=2)
    assert violations(wrong, WORK, CPU) == ("lanes is 2, plain loops have 1",)
    with pytest.raises(TilePlanError, match="plain loops have 1"):
        choose(WORK, CPU, plans=PlanTable.single(wrong))


@pytest.mark.usefixtures("_own_registry")
@pytest.mark.parametrize(
    ("family", "words"),
    [
        (Plain, "must be a KernelFamily"),
        (Nameless(), "emitter is '', must be module:function"),
        (Twin(), "family Twin: Panels is called 'panels' as well"),
    ],
)
def test_what_is_no_family_is_refused(family: Any, words: str) -> None:
    with pytest.raises(TilePlanError, match=words):
        register_family(family)


@pytest.mark.usefixtures("_own_registry")
def test_families_come_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("plain", f"{__name__}:Plain", registry.ENTRY_POINTS)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry._load_entry_points.cache_clear()
    assert chosen(WORK) == ["plain"]
    points[:] = [EntryPoint("lost", "no.such.module:Family", registry.ENTRY_POINTS)]
    registry._load_entry_points.cache_clear()
    with pytest.raises(TilePlanError, match="entry point 'lost' of"):
        choose(replace(WORK, rows=5), CPU)
    points.clear()
    registry._load_entry_points.cache_clear()


def test_former_names_are_read() -> None:
    assert TilePlan(8, 16, 64, family="skinny") == TilePlan(8, 16, 64, family="few_rows")
    old = {**TilePlan(8, 16, 64).to_attr(), "family": "skinny"}
    assert TilePlan.from_attr(old).family == "few_rows"
