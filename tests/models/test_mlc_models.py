"""What becomes of models as MLC-LLM exports them: launches a layer, and what is left unfused.

``tests/data/mlc/expected.txt`` says it; ``RELAX_FUSION_REWRITE=1 python -m pytest
tests/models/test_mlc_models.py`` writes it anew, for all models, quantisations and targets.
Otherwise each preset is looked at once, in quantisations, functions and on targets that take turns.
Calls of the cache and of attention stay what MLC-LLM's own passes and TVM's runtime know.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import tvm
from tvm import ir, relax
from tvm.ir.transform import Pass
from tvm.target import Target

from relax_fusion import Report, make_target
from relax_fusion.mlc.experts import ReadExperts
from relax_fusion.mlc.repairs import TakePositionsOfBatch
from relax_fusion.options import make_options
from relax_fusion.pipeline import (
    count_launches,
    phase0_annotate,
    phase1_fuse,
    phase2_lower,
    phase3_tir,
)

from ..support import mlc_models
from ..support.slow import sampled
from ..support.written_weights import written_weights

EXPECTED = mlc_models.MODELS.parent / "expected.txt"
REWRITE = bool(os.environ.get("RELAX_FUSION_REWRITE"))
CPU = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2})
TARGETS = {"h200": make_target("h200"), "llvm": CPU}
FUNCTIONS = ("batch_decode", "batch_prefill")
MOST = {"llama3_1_8b": 5, "llama2_7b": 5, "gpt2": 5, "gemma2_2b": 7, "qwen2_0_5b": 5, "phi-3_5": 5}
MOST |= {"Mixtral-8x7B-v0.1": 8}
"""Launches a layer that are not to be exceeded in 16 bits, with attention's."""


class Case(NamedTuple):
    """A function of a model, and the device that it is compiled for."""

    model: str
    function: str
    target: str


def models() -> dict[str, list[str]]:
    """Return the names of the modules of each preset, one for each quantisation."""
    names = sorted(mlc_models.texts())
    return {k: list(g) for k, g in itertools.groupby(names, lambda n: n.rpartition("-")[0])}


def cases() -> list[Case]:
    """Return what is looked at: everything if it is to be written down, else one of each preset."""
    kinds = list(itertools.product(range(3), FUNCTIONS, TARGETS))
    found = []
    for turn, names in enumerate(models().values()):
        chosen = kinds if REWRITE else [kinds[5 * turn % len(kinds)]]
        found += [Case(names[n], function, target) for n, function, target in chosen]
    return found


def fused(case: Case, *first: Pass) -> tuple[ir.IRModule, Report]:
    """Return a function, behind passes, with its kernels not yet scheduled, and the report.

    The models have two layers: were the last cut to the rows that the head reads, as `MoveSlices`
    does, no layer would be like another.
    """
    report, target = Report(), TARGETS[case.target]
    options = make_options(target, {"report": report, "disable": ["MoveSlices"]})
    phases = (phase0_annotate, phase1_fuse, phase2_lower, phase3_tir, count_launches)
    passes = [p for phase in phases for p in phase(options) if p.info.name != "FoldConstants"]
    with target:
        mod = tvm.transform.Sequential([*first, ReadExperts(options), *passes])(
            mlc_models.load(case.model, case.function)
        )
    return mod, report


def found(report: Report) -> str:
    """Return how a function is covered."""
    (coverage,) = report.coverage
    left = Counter(f"{x.kind}: {x.reason}" for x in report.leftovers)
    said = f"{coverage.per_layer} launches a layer, {len(coverage.launches.kernels)} in all"
    return "; ".join([said, *(f"{times} {what}" for what, times in left.items())])


@cache
def expected() -> dict[str, str]:
    """Return what is written down, by model, function and target."""
    lines = EXPECTED.read_text().splitlines() if EXPECTED.exists() else []
    return dict(line.split(": ", 1) for line in lines)


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, str]]:
    """Collect what is found, and write it down if that is asked for."""
    entries: dict[str, str] = {}
    yield entries
    if REWRITE:
        EXPECTED.write_text("".join(f"{name}: {said}\n" for name, said in entries.items()))


@pytest.mark.parametrize("case", cases() if REWRITE else sampled(cases(), 6), ids=" ".join)
def test_launches(case: Case, seen: dict[str, str]) -> None:
    mod, report = fused(case)
    assert not written_weights(mod)
    name = " ".join(case)
    seen[name] = found(report)
    assert REWRITE or seen[name] == expected()[name]


@pytest.mark.parametrize("preset", MOST)
def test_layers_in_16_bits_take_few_launches(preset: str) -> None:
    kinds = itertools.product(("q0f16", "q4f16_1"), FUNCTIONS, TARGETS)
    names = [f"{preset}-{quantisation} {f} {t}" for quantisation, f, t in kinds]
    launches = {name: int(expected()[name].split()[0]) for name in names}
    assert max(launches.values()) <= MOST[preset], launches


def test_each_model_is_there_in_three_quantisations_and_written_down() -> None:
    kinds = list(itertools.product(FUNCTIONS, TARGETS))
    names = {" ".join((name, *kind)) for name in mlc_models.texts() for kind in kinds}
    assert set(expected()) == names
    assert len(models()) >= 15 and all(len(names) == 3 for names in models().values())


def test_positions_of_a_batch_take_no_launch_more() -> None:
    case = Case("gpt2-q4f16_1", "batch_decode", "h200")
    mod, report = fused(case, TakePositionsOfBatch())
    launches = len(report.launches[0].kernels)
    assert f"{launches + 1} in all" in expected()[" ".join(case)] and not written_weights(mod)


@pytest.mark.parametrize("name", ["gpt2-q4f16_1", "llama3_1_8b-q4f32_1"])
def test_rows_of_a_vocabulary_of_unknown_size_are_read_packed(name: str) -> None:
    mod, report = fused(Case(name, "embed", "llvm"))
    assert len(report.launches[0].kernels) == 1 and not written_weights(mod)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-q4f16_1", "llama3_1_8b-q4f32_1"])
def test_whole_functions_compile(name: str) -> None:
    pipeline = relax.get_pipeline("relax_fusion", target=CPU)
    mod = mlc_models.load(name, "batch_decode")
    built = tvm.compile(mod, target=CPU, relax_pipeline=pipeline)
    assert built.mod.implements_function("vm_load_executable")
