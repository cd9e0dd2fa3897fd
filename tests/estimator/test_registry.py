"""Families from outside: one that wins a workload, from its plan to its kernel's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib.metadata import EntryPoint
from threading import Barrier, BrokenBarrierError
from typing import Any
from unittest import mock

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
from relax_fusion.compute import build_prim_func
from relax_fusion.errors import SchedulingError, TilePlanError
from relax_fusion.estimator import (
    Breaks,
    Choice,
    Footprint,
    Launches,
    Offer,
    Problem,
    Step,
    choose,
    registry,
    violations,
)
from relax_fusion.estimator.registry import plan_of, table_of
from relax_fusion.hardware import DeviceSpec, device, generic_cpu
from relax_fusion.validation import Count
from relax_fusion.workload import Projection

from ..support.chains import Chain, compiled, module, outputs

CPU = generic_cpu(2, 32)
FIELDS = ", ".join(f.name for f in fields(TilePlan))
WORK = NormMatmul(4, 8, (Projection(16, "kn", ("silu",)),), None, "float32", "float32")


def emit(work: NormMatmul, plan: TilePlan, target: Any) -> tirx.PrimFunc:
    """Return the matmul as it is written, and 1 added to tell it from others."""
    return kernel_that_adds(1)


def emit_shifted(work: NormMatmul, plan: ShiftedPlan, target: Any) -> tirx.PrimFunc:
    """Return the matmul, and what the plan says added."""
    return kernel_that_adds(plan.shift)


def kernel_that_adds(shift: int) -> tirx.PrimFunc:
    x, w = te.placeholder((4, 8), name="x"), te.placeholder((8, 16), name="w")
    k = te.reduce_axis((0, 8), "k")
    acc = te.compute((4, 16), lambda i, j: te.sum(x[i, k] * w[k, j], k), "acc")
    out = te.compute((4, 16), lambda i, j: acc[i, j] / (1 + te.exp(-acc[i, j])) + shift, "out")
    return te.create_prim_func([x, w, out], index_dtype_override="int64")


def emit_wider(work: NormMatmul, plan: TilePlan, target: Any) -> tirx.PrimFunc:
    """Return a kernel of another signature."""
    return build_prim_func(replace(work, k=work.k + 1), PlanTable.single(plan))


def emit_text(work: NormMatmul, plan: TilePlan, target: Any) -> str:
    """Return no kernel."""
    return "kernel"


class Plain(KernelFamily[NormMatmul]):
    """Loops as they are written; predicted to take no time."""

    names = ("plain",)
    error = 1.0
    emitter = f"{__name__}:emit"

    def takes(self, problem: Problem[Any]) -> bool:
        return problem.is_plain("cpu", NormMatmul)

    def refuses(self, problem: Problem[NormMatmul]) -> str | None:
        return None if isinstance(problem.work.rows, int) else "the rows are dynamic"

    def plans(self, problem: Problem[NormMatmul]) -> Iterator[Offer]:
        yield Offer(TilePlan(1, 1, problem.work.k, family="plain"))

    def violations(self, plan: TilePlan, problem: Problem[NormMatmul]) -> Iterator[str]:
        if plan.lanes != 1:
            yield f"lanes is {plan.lanes}, plain loops have 1"

    def price(self, plan: TilePlan, problem: Problem[NormMatmul]) -> Launches:
        foot = Footprint(0, 1, 1)
        return Launches(problem.dev, foot, lambda _: [Step(1, foot, 1e-9, dram_bytes=0.0)])


class Nameless(Plain):
    """A family without an emitter."""

    emitter = ""


class Twin(Plain):
    """A family whose name one of ours has."""

    names = ("panels",)


@dataclass(frozen=True)
class ShiftedPlan(TilePlan):
    """A plan with a number of its own."""

    shift: Count = 1


class Shifted(Plain):
    """A family with plans of its own."""

    names = ("shifted",)
    plan = ShiftedPlan
    emitter = f"{__name__}:emit_shifted"

    def plans(self, problem: Problem[NormMatmul]) -> Iterator[Offer]:
        yield Offer(ShiftedPlan(1, 1, problem.work.k, family="shifted", shift=3))


class Undecorated(TilePlan):
    """A plan whose fields no dataclass knows."""


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "FAMILIES", [*registry.FAMILIES])
    with mock.patch.dict(registry._BY_NAME):
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
    assert "plain 1x1x8" in report.text()


@pytest.mark.usefixtures("_own_registry")
def test_a_number_that_only_one_family_has_reaches_its_emitter() -> None:
    register_family(Shifted())
    chain = Chain("main", "x[4,8] W[8,16]", "m = R.matmul(x, W); y = R.nn.silu(m)", "y")
    x, w = chain.arrays()
    product = x @ w
    plain = TilePlan(1, 1, 8, family="shifted")
    for options, shift in (({}, 3), ({"plans": {"FuseGatedFFN": plain}}, 1)):
        (got,) = outputs(compiled(module([chain]), **options), "main", [x, w])
        assert np.abs(got - product / (1 + np.exp(-product)) - shift).max() < 1e-5


@pytest.mark.usefixtures("_own_registry")
def test_plans_are_read_as_what_their_family_has() -> None:
    register_family(Shifted())
    plan = ShiftedPlan(1, 1, 8, family="shifted", shift=3)
    table = PlanTable(((16, plan), (None, TilePlan(1, 1, 8, family="words"))))
    assert table_of(table.to_attr()) == table
    assert plan_of({"block_m": 1, "block_n": 1, "block_k": 8, "family": "shifted"}) == (
        replace(plan, shift=1)
    )
    with pytest.raises(TilePlanError, match="shift is 0"):
        plan_of({**plan.to_attr(), "shift": 0})
    with pytest.raises(TilePlanError, match="there is no field 'shift'"):
        plan_of({**plan.to_attr(), "family": "panels"})
    assert violations(replace(plan, family="words"), WORK, CPU) == (
        "tile plan of family 'words': there is no field 'shift'; there are " + FIELDS,
    )


@pytest.mark.usefixtures("_own_registry")
def test_a_users_plan_names_the_family_and_is_checked_by_it() -> None:
    register_family(Plain())
    plan = next(Plain().plans(Problem(WORK, CPU))).plan
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
        *(
            (type("Odd", (Plain,), {name: value})(), f"family Odd: {name} is .*, must be {words}")
            for name, value, words in (
                ("names", "plain", "a tuple of text"),
                ("names", (), "a tuple of text"),
                ("language", "python", "'tir', 'triton' or 'cuda'"),
                ("error", 0, "a number above 0"),
                ("error", float("nan"), "a number above 0"),
                ("error", None, "a number above 0"),
                ("instead_of", None, "a tuple of families"),
                ("emitter", None, "module:function"),
                ("emitter", "..:emit", "module:function"),
                ("breaks", None, "Breaks"),
                ("plan", None, "a dataclass that derives from TilePlan"),
                ("plan", Breaks, "a dataclass that derives from TilePlan"),
                ("plan", Undecorated, "a dataclass that derives from TilePlan"),
            )
        ),
        (Twin(), "family Twin: CpuTiles is called 'panels' as well"),
    ],
)
def test_what_is_no_family_is_refused(family: Any, words: str) -> None:
    with pytest.raises(TilePlanError, match=words):
        register_family(family)


@pytest.mark.usefixtures("_own_registry")
@pytest.mark.parametrize(
    ("emitter", "words"),
    [
        ("no.such:emit", "No module named 'no'"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:CPU", "must be a function"),
        (f"{__name__}:emit_text", "emit_text made 'kernel', must be a PrimFunc"),
        ("operator:getitem", "operator:getitem: TypeError: getitem expected 2 arguments, got 3"),
        (f"{__name__}:emit_wider", r"made a function of \(x float32\[4, 9\]; .*\), wanted is \(x"),
    ],
)
def test_emitters_that_make_no_kernel(emitter: str, words: str) -> None:
    register_family(type("Odd", (Plain,), {"emitter": emitter})())
    chain = Chain("main", "x[4,8] W[8,16]", "m = R.matmul(x, W); y = R.nn.silu(m)", "y")
    with pytest.raises(SchedulingError, match=words):
        compiled(module([chain]))


@pytest.mark.parametrize("dev", [CPU, device("h200")], ids=["cpu", "gpu"])
def test_launches_are_priced_one_after_the_other(dev: DeviceSpec) -> None:
    foot = Footprint(0, 32, 128)
    one = Step(300, foot, block_s=2e-6, dram_bytes=1e6, flops=7.0)
    other = replace(one, blocks=1, block_s=0.0, dram_bytes=1e9)
    first, second, both = (
        Launches(dev, foot, lambda _, steps=steps: steps).at(4)
        for steps in ([one], [other], [one, other])
    )
    assert both.seconds == first.seconds + second.seconds and both.flops == 14
    assert first.bound == "compute" and second.bound == both.bound == "dram"
    assert first.seconds - dev.launch_s >= -(-300 // dev.sm_count) * 2e-6
    with pytest.raises(TilePlanError, match="a plan has no launches at 4"):
        Launches(dev, foot, lambda _: []).at(4)


@pytest.mark.usefixtures("_own_registry")
def test_families_come_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("plain", f"{__name__}:Plain", registry.ENTRY_POINTS)]
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    monkeypatch.setattr(registry, "_LOADED", set())
    assert chosen(WORK) == ["plain"]
    points.append(EntryPoint("lost", "no.such.module:Family", registry.ENTRY_POINTS))
    for rows in (5, 6):  # a second time, too
        with pytest.raises(TilePlanError, match="entry point 'lost' of"):
            choose(replace(WORK, rows=rows), CPU)


@pytest.mark.usefixtures("_own_registry")
def test_a_written_plan_brings_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (EntryPoint("shifted", f"{__name__}:Shifted", registry.ENTRY_POINTS),)
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    monkeypatch.setattr(registry, "_LOADED", set())
    plan = ShiftedPlan(1, 1, 8, family="shifted", shift=3)
    assert plan_of(plan.to_attr()) == plan


@pytest.mark.usefixtures("_own_registry")
def test_an_entry_point_is_loaded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = Barrier(2)

    class Slow(EntryPoint):
        def load(self) -> Any:
            with suppress(BrokenBarrierError):
                barrier.wait(timeout=0.1)
            return Plain

    points = (Slow("plain", f"{__name__}:Plain", registry.ENTRY_POINTS),)
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    monkeypatch.setattr(registry, "_LOADED", set())
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: registry._load_entry_points(), range(2)))
    assert [type(family) for family in registry.FAMILIES].count(Plain) == 1


def test_every_plan_of_a_table_is_told() -> None:
    lost, wide = TilePlan(1, 1, 8, family="lost"), TilePlan(1, 16, 8, lanes=64, family="cpu_tiles")
    with pytest.raises(TilePlanError, match=r"family is 'lost'.*; plan .*lanes is 64"):
        choose(replace(WORK, rows=DynamicDim("n")), CPU, plans=PlanTable(((1, lost), (None, wide))))
