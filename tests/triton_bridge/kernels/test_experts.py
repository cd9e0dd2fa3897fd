"""Kernels of matmuls by experts: in the interpreter against float64, and what is compiled."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from relax_fusion.errors import KernelError
from relax_fusion.estimator import Problem, candidates
from relax_fusion.estimator.families.triton_experts import ExpertPlan, TritonExperts
from relax_fusion.triton_bridge.compile import try_kernels
from relax_fusion.triton_bridge.specialize import specialize
from relax_fusion.workload.reference import evaluate

from ...support.expert_calls import (
    GPT_OSS,
    MAPPED,
    MODELS,
    PAIRS,
    TALL,
    TILES,
    WORKS,
    ExpertCase,
    down,
    steps_of,
    up,
)
from ...support.interpreted import Interpreter, Launch
from ...support.launches import H200, interpreted
from ...support.slow import sampled
from ...support.workloads import inputs
from .compiled import NARROW, SIGNS, compiled, stack_bytes

PLANS = {"pairs": PAIRS, "tiles": TILES, "tall": TALL, "mapped": MAPPED}
EVEN, ODD = {"k": 64, "n": 32}, {"k": 72, "n": 40}
CASES = {
    **{
        f"{gate}-{layout}": ExpertCase(up(5, 3, **EVEN, layout=layout, gate=gate))
        for gate, layout in product(("halves", "pairs"), ("nk", "kn"))
    },
    **{
        f"clipped-{gate}-{layout}": ExpertCase(
            up(5, 3, **ODD, layout=layout, gate=gate, gate_first=False, **GPT_OSS), bias=True
        )
        for gate, layout in product(("halves", "pairs"), ("nk", "kn"))
    },
    **{
        f"down-{layout}": ExpertCase(down(5, 3, **ODD, layout=layout), True, True, residual=True)
        for layout in ("nk", "kn")
    },
    "sum": ExpertCase(down(2, 2, **EVEN, layout="nk"), share=True, ids_dtype="int32"),
    "same rows": ExpertCase(down(5, 3, **EVEN, layout="nk")._replace(each=False), share=True),
    "plain": ExpertCase(down(5, 1, **ODD, layout="kn")._replace(activation="relu"), True),
    "many experts": ExpertCase(up(33, 2, **EVEN, layout="nk")),
}


@pytest.mark.parametrize(("plan", "name"), sampled([*product(PLANS, CASES)], 3))
def test_launches_match_float64(interpreter: Interpreter, plan: str, name: str) -> None:
    case = CASES[name]
    for tokens in (1, 7):
        given = case.inputs(tokens)
        exact, got = case.exact(given), case.computed(interpreter, PLANS[plan], given)
        assert np.abs(got - exact).max() < 1e-3 * np.abs(exact).max()


def test_weights_of_experts_that_nobody_chose_are_not_read(interpreter: Interpreter) -> None:
    case = CASES["halves-nk"]
    given = case.inputs(7)
    given["ids"] = np.where(given["ids"] == 2, 3, given["ids"])
    exact = case.exact(given)
    given["w"].reshape(5, -1)[2] = np.nan
    for plan in PLANS.values():
        got = case.computed(interpreter, plan, given)
        assert np.abs(got - exact).max() < 1e-3 * np.abs(exact).max()


def test_nan_passes_the_clipping_of_a_gate(interpreter: Interpreter) -> None:
    case = CASES["clipped-pairs-kn"]
    given = case.inputs(3)
    given["x"][1] = np.nan
    for plan in PLANS.values():
        got = case.computed(interpreter, plan, given)
        assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize(("pairs", "experts"), [(1, 3), (70, 5), (500, 40), (97, 1), (320, 300)])
def test_pairs_are_sorted(
    interpreter: Interpreter, pairs: int, experts: int, is_counted: bool
) -> None:
    ids, chunks = np.random.default_rng(0).integers(-2, experts + 2, pairs), -(-pairs // 32)
    tensors = {"ids": ids.astype("float64"), "counts": np.full(512 * chunks, -1.0)}
    tensors |= {"order": np.full(pairs, -1.0), "begins": np.full(experts + 1, -1.0)}
    given = {"ids_ptr": "ids", "counts_ptr": "counts", "pairs": pairs}
    same = {"EXPERTS": experts, "CHUNK": 32, "PDL": False}
    launches = [Launch("expert_counts", (chunks,), given, same)] if is_counted else []
    given = {**given, "order_ptr": "order", "begins_ptr": "begins"}
    given |= {} if is_counted else {"counts_ptr": None}
    launches.append(Launch("expert_order", (chunks,), given, {**same, "BLOCK": 512}))
    types = {"ids": "int64", **dict.fromkeys(("counts", "order", "begins"), "int32")}
    made = interpreter(tensors, types, launches)
    clipped = np.clip(ids, 0, experts - 1)
    assert (made["order"] == np.argsort(clipped, kind="stable")).all()
    assert made["begins"].tolist() == [0, *np.cumsum(np.bincount(clipped, minlength=experts))]


@pytest.mark.parametrize("name", WORKS)
def test_workloads_are_computed_as_their_graphs_say(interpreter: Interpreter, name: str) -> None:
    work = WORKS[name]
    given = inputs(work, {"rows": 5})
    exact = evaluate(work.graph, given)["out0"]
    for plan in (PAIRS, TILES):
        wrong = list(TritonExperts().violations(plan, Problem(work, H200)))
        assert bool(wrong) == (name == "gated sum" and plan is PAIRS), wrong
        if not wrong:
            got = interpreted(interpreter, work, plan, given)["out0"]
            assert np.abs(got - exact).max() < 2e-3 * np.abs(exact).max()


def test_the_least_and_the_largest_scale_of_mxfp4(interpreter: Interpreter) -> None:
    work = replace(WORKS["mxfp4"], gate=None, bias=False, dtype="float32", out_dtype="float32")
    given = inputs(work, {"rows": 5})
    given["w0_scale"][:: work.n], given["w0_scale"][1 :: work.n] = 0, 255
    given["x"] *= 2.0**100
    for plan in (PAIRS, TILES):
        got = interpreted(interpreter, work, plan, given)["out0"]
        exact = evaluate(work.graph, given)["out0"]
        assert np.isnan(got[..., 1]).all() and np.isnan(exact[..., 1]).all()
        least, wanted = got[..., 0], exact[..., 0]
        assert np.abs(wanted).min() > 0
        np.testing.assert_allclose(least, wanted, atol=2e-3 * np.abs(wanted).max())


BIG = ExpertPlan(128, 128, 64, num_stages=4, num_warps=8, family="expert_tiles")
FEW = ExpertPlan(16, 128, 64, num_stages=4, num_warps=4, family="expert_tiles")
BY_MAP = replace(BIG, tensor_map=1)
LONG = ExpertPlan(1, 4, 1024, num_warps=4, unroll=1, family="expert_pairs")
WIDE = ExpertPlan(1, 64, 32, num_warps=4, unroll=2, family="expert_pairs")
COMPILED = [
    *((name, "big") for name in MODELS),
    *((name, "few") for name in MODELS),
    *((name, "pairs") for name in MODELS),
    *((name, "map") for name in MODELS),
]


@pytest.mark.parametrize(("name", "how"), sampled(COMPILED, 5))
def test_the_code_is_wide_and_stays_in_registers(name: str, how: str, tmp_path: Path) -> None:
    case = MODELS[name]
    rows = WIDE if case.form.layout == "kn" else LONG
    plan = {"big": BIG, "few": FEW, "pairs": rows, "map": BY_MAP}[how]
    steps = steps_of(case.call(64, dependent=True), plan, 64)
    assert len(steps) == (1 if how == "pairs" else 3 if case.share else 2)
    steps += steps_of(case.call(4096, dependent=True), plan, 4096)[:1]  # counts, if it sorts
    outs = [case.out_type(64)]
    sources = [specialize(s.function, s.args, s.constexprs, s.options, outs, 90)[0] for s in steps]
    for made in try_kernels(sources):
        assert not isinstance(made, KernelError), made
        text = made.ptx.decode()
        assert "griddepcontrol.wait" in text
        assert stack_bytes(made.image, tmp_path) == 0 and made.scratch_bytes == 0
        signs = {"expert_tiles": ("copies", "wgmma"), "expert_pairs": ("wide loads",)}
        if made.entry == "expert_tiles":
            assert bool(re.search(SIGNS["tensor copies"], text)) == (how == "map")
        for sign in signs.get(made.entry, ()):
            assert re.search(SIGNS[sign], text), sign
            assert sign not in NARROW or not re.search(NARROW["copies"].split("|")[0], text)
        assert not re.search(SIGNS["mma"], text)


WORDS = {
    "q4": replace(WORKS["summed words"], dtype="bfloat16", k=2048, n=768),
    "mxfp4": replace(WORKS["mxfp4"], k=2880, n=2880),
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("family", ["expert_pairs", "expert_tiles"])
def test_words_are_unpacked_in_registers(name: str, family: str, tmp_path: Path) -> None:
    work, tiles = WORDS[name], family == "expert_tiles"
    plans = [p for p in candidates(work, H200, "triton") if p.family == family]
    made = compiled(work, plans[-1 if tiles else 0], at=int(tiles))
    text = made.ptx.decode()
    assert stack_bytes(made.image, tmp_path) == 0 and made.scratch_bytes == 0
    assert re.search(SIGNS["wgmma" if tiles else "wide loads"], text)
    assert "cvt.rn.f32.u" not in text and "cvt.rn.f32.s" not in text


@pytest.mark.parametrize("name", WORKS)
def test_plans_of_pairs_compile(name: str, tmp_path: Path) -> None:
    plans = [p for p in candidates(WORKS[name], H200, "triton") if p.family == "expert_pairs"]
    for plan in dict.fromkeys(plans):
        made = compiled(WORKS[name], plan, at=0)
        assert stack_bytes(made.image, tmp_path) == 0 and made.scratch_bytes == 0


def test_older_devices_have_tiles_too() -> None:
    case = replace(MODELS["mixtral-down"], dtype="bfloat16")
    plan = replace(BIG, block_k=32, num_stages=3)
    _, step, _ = steps_of(case.call(64), plan, 64)
    given = step.function, step.args, step.constexprs, step.options, [case.out_type(64)]
    (made,) = try_kernels([specialize(*given, 80)[0]])
    assert not isinstance(made, KernelError), made
    assert re.search(SIGNS["mma"], made.ptx.decode())
