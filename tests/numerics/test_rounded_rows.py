"""docs/numerics.md, R11: rows of int8 in front of packed weights, on CPUs and on request only."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from benchmarks.suites.cpu_q4 import graphs
from benchmarks.suites.cpu_q4 import model as q4_model
from relax_fusion import PipelineOptions, Report, TargetError
from relax_fusion.estimator import candidates, choose, violations
from relax_fusion.estimator.families.cpu_dots import ROUNDED
from relax_fusion.hardware import DeviceSpec
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import DynamicDim, Packed
from relax_fusion.workload.reference import evaluate

from ..dlight_rules.compiled import scheduled
from ..dlight_rules.test_contraction import Work
from ..dlight_rules.test_contraction_panels import panels
from ..dlight_rules.test_contraction_words import BASE, GATED, WORKS, projection
from ..support.contraction_cases import Case
from ..support.quick import loaded, quick_host, quickly

ZEN4 = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "num-cores": 2})
HOST = quick_host()


def on(dev: DeviceSpec) -> DeviceSpec:
    """Return a device whose rows may be rounded."""
    return replace(dev, capabilities=replace(dev.capabilities, int8_rows=True))


def results(work: Work, arrays: dict, rows: int, lanes: int = 16) -> list[np.ndarray]:
    plan = panels(work, (3, 16), lanes, family=ROUNDED)
    library = loaded(quickly(scheduled(work, plan, HOST)))
    outs = [tvm.runtime.empty(s, d) for s, d in Case("", work, rows).out_shapes()]
    library["main"](*map(tvm.runtime.tensor, arrays.values()), *outs)
    return [out.numpy().astype("float64") for out in outs]


def rounded(x: np.ndarray) -> np.ndarray:
    step = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.round(x / step) * step


FORMS = {
    "q4": Packed(4, 32, 7),
    "q4f32": Packed(4, 64, 8, scale_dtype="float32"),
    "q8": Packed(8, 32, 127),
    "q8 of all bytes": Packed(8, 16, 128, scale_dtype="float32"),
}


@pytest.mark.parametrize("lanes", [16, 8])
@pytest.mark.parametrize("name", FORMS)
def test_r11_products_are_those_of_rounded_rows(name: str, lanes: int) -> None:
    """No more and no less is rounded: the graph has the same results for rows that are."""
    weight = projection(24, "bias", form=FORMS[name])
    work = replace(BASE, norm=None, outputs=(weight,), rows=7)
    arrays = Case(name, work).inputs()
    exact = evaluate(work.graph, {**arrays, "x": rounded(arrays["x"])}, "float64")["out0"]
    (found,) = results(work, arrays, 7, lanes)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    plain = evaluate(work.graph, arrays, "float64")["out0"]
    assert 1e-4 < np.abs(found - plain).max() / np.abs(plain).max() < 0.02


@pytest.mark.parametrize("name", WORKS)
def test_r11_rows_behind_norms_err_by_a_hundredth(name: str) -> None:
    work = WORKS[name]
    for rows in (1, 7):
        case = Case(name, work, rows)
        arrays = case.inputs()
        for found, exact in zip(
            results(work, arrays, rows), case.reference(arrays, "float64"), strict=True
        ):
            assert np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


def test_r11_rows_without_numbers_have_none_in_their_products() -> None:
    work = replace(BASE, norm=None, rows=5)
    arrays = Case("odd rows", work).inputs()
    arrays["x"][0, 5], arrays["x"][1, 7], arrays["x"][2, 9] = np.nan, np.inf, -np.inf
    arrays["x"][3] = 0
    (found,) = results(work, arrays, 5)
    assert np.isnan(found[:3]).all() and (found[3] == 0).all() and np.isfinite(found[4]).all()


def test_r11_it_is_asked_for() -> None:
    dev = device_of(ZEN4)
    assert not PipelineOptions(ZEN4).allow_int8_rows and not dev.capabilities.int8_rows
    assert not any(plan.family == ROUNDED for plan in candidates(BASE, dev))
    plan = panels(BASE, (4, 32), 16, family=ROUNDED)
    (why,) = violations(plan, BASE, dev)
    assert "which allow_int8_rows would allow" in why and not violations(plan, BASE, on(dev))
    for work in (BASE, GATED):
        chosen = choose(replace(work, k=1024), on(dev), always=True).plans
        assert chosen.plan_for(512).family == ROUNDED


OTHERS = {
    "in words of 32 along k": replace(BASE, outputs=(projection(24, form=Packed(3, 40, 3)),)),
    "do not divide k": replace(BASE, k=144),
}


@pytest.mark.parametrize("words", OTHERS)
def test_r11_other_weights_keep_their_rows(words: str) -> None:
    plan = panels(OTHERS[words], (4, 32), 16, family=ROUNDED)
    assert any(words in why for why in violations(plan, OTHERS[words], on(device_of(ZEN4))))
    haswell = Target({**ZEN4.export(), "mcpu": "haswell"})
    (why,) = violations(panels(BASE, (2, 16), 8, family=ROUNDED), BASE, on(device_of(haswell)))
    assert "multiplies no bytes of both signs" in why


@pytest.mark.parametrize("target", ["h200", {**ZEN4.export(), "mcpu": "haswell"}])
def test_r11_it_is_refused_where_nothing_multiplies_them(target: str | dict) -> None:
    with pytest.raises(TargetError, match=r"\(--allow-int8-rows\) needs a CPU with AVX-512 VNNI"):
        PipelineOptions(make_target(target), allow_int8_rows=True)


def test_r11_bytes_are_multiplied_by_their_instruction() -> None:
    work = replace(BASE, rows=DynamicDim("rows"), k=256, outputs=(projection(96),))
    plan = panels(work, (4, 48), 16, family=ROUNDED)
    library = tvm.compile(scheduled(work, plan, ZEN4), target=ZEN4)
    lines = library.mod.inspect_source("asm").splitlines()
    assert sum(bool(re.search(r"vpdpbusd.*zmm", line)) for line in lines) >= 4 * 3
    assert not any(re.search(r"v(p?gather|p?scatter)|\bcall.*relax_fusion_v", x) for x in lines)


def test_r11_a_model_of_four_bits() -> None:
    names = {i.name for i in device_of(HOST).capabilities.matrix_instructions}
    if "vpdpbusd" not in names:
        pytest.skip("needs a processor with AVX-512 VNNI or AVX-VNNI")
    model = q4_model.Model(q4_model.Widths(64, 96, 96, 128), 1)
    report, given = Report(), [a for w in model.weights for a in (w.words, w.scales)]
    pipeline = relax.get_pipeline(
        "relax_fusion", target=HOST, report=report, allow_int8_rows=True, always_fuse=True
    )
    library = quickly(graphs.module(model, True), pipeline)
    x = np.random.default_rng(1).standard_normal((40, 64)).astype("float32")
    main = relax.VirtualMachine(library, tvm.cpu())["main"]
    found, exact = main(*map(tvm.runtime.tensor, (x, *given))).numpy(), model.exact(x)
    error = np.abs(found - exact).max() / np.abs(exact).max()
    families = {plan.family for decision in report.fused for _, plan in decision.plans.boxes}
    assert ROUNDED in families and 1e-4 < error < 0.05
