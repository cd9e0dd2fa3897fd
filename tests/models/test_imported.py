"""What becomes of models as TVM's importers bring them: launches, chains, and what is left.

``tests/data/models/expected.txt`` says it; ``RELAX_FUSION_REWRITE=1 python -m pytest
tests/models/test_imported.py`` writes it anew, for all modules.  Otherwise each family is looked at
in one spelling with symbolic sizes, and in a second: every other family in the first, the rest by
slow tests.  Nothing is compiled.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import tvm
from tvm import ir
from tvm.target import Target

from relax_fusion import PATTERNS, Report
from relax_fusion.options import make_options
from relax_fusion.pipeline import (
    count_launches,
    phase0_annotate,
    phase1_fuse,
    phase2_lower,
    phase3_tir,
)
from relax_fusion.report import Coverage

from ..support.imported import MODELS, families, load
from ..support.slow import quick_if, sampled

EXPECTED = MODELS / "expected.txt"
REWRITE = bool(os.environ.get("RELAX_FUSION_REWRITE"))
CPU = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2})


def total(coverage: Coverage) -> dict[str, int]:
    """Return how many chains of each kind there are, but for rotations, which may be merged."""
    return {name: there for name, (_, there) in coverage.chains.items() if name != "rope"}


def without_patterns(mod: ir.IRModule) -> Coverage:
    """Return what is counted where nothing is fused."""
    report = Report()
    options = make_options(CPU, {"report": report, "disable": [*PATTERNS]})
    with CPU:
        tvm.transform.Sequential(phase1_fuse(options))(mod)
    return report.coverage[0]


def covered(mod: ir.IRModule) -> tuple[Report, Coverage]:
    """Return the report of a model, and what it says of its one function."""
    report = Report()
    options = make_options(CPU, {"report": report})
    phases = (phase0_annotate, phase1_fuse, phase2_lower, phase3_tir, count_launches)
    passes = [p for phase in phases for p in phase(options) if p.info.name != "FoldConstants"]
    with CPU:
        tvm.transform.Sequential(passes)(mod)
    (coverage,) = report.coverage
    return report, coverage


def found(mod: ir.IRModule) -> list[str]:
    """Return lines that say how a model is covered."""
    report, coverage = covered(mod)
    chains = ", ".join("{} {} of {}".format(n, *counts) for n, counts in coverage.chains.items())
    launches, copies = len(coverage.launches.kernels), len(coverage.launches.copies)
    left = Counter(f"{x.kind}: {x.reason}" for x in report.leftovers)
    return [
        f"{coverage.per_layer} launches a layer, {launches} in all, {copies} of them copies",
        chains,
        *(f"{times} {what}" for what, times in left.items()),
    ]


def parsed(path: Path) -> dict[str, list[str]]:
    """Return the lines below each name."""
    texts = path.read_text().split("\n\n") if path.exists() else []
    entries = [[line.strip() for line in text.strip().splitlines()] for text in texts]
    return {tag: lines for tag, *lines in entries}


def chosen(family: str, tags: list[str]) -> list[str]:
    """Return the names of the two modules of a family that are looked at."""
    dynamic = f"{family}-sdpa-dyn-f32-torch"
    first = dynamic if dynamic in tags else tags[0]
    others = [tag for tag in tags if tag != first]
    return [first, others[families().index(family) // 2 % len(others)]]


@pytest.mark.parametrize("spelling", quick_if((0).__eq__, (0, 1)))
@pytest.mark.parametrize("family", families() if REWRITE else sampled(families(), 2))
def test_coverage(family: str, spelling: int) -> None:
    expected = parsed(EXPECTED)
    tags = [tag for tag in expected if tag.split("-")[0] == family]
    modules = dict(load(family, None if REWRITE else [chosen(family, tags)[spelling]]))
    seen = {tag: found(mod) for tag, mod in modules.items()}
    if REWRITE:
        entries = {t: lines for t, lines in expected.items() if t not in tags} | seen
        texts = ("\n  ".join([tag, *lines]) + "\n" for tag, lines in sorted(entries.items()))
        EXPECTED.write_text("\n".join(texts))
    assert seen == {tag: parsed(EXPECTED)[tag] for tag in seen}


@pytest.mark.slow
@pytest.mark.parametrize("family", families()[::4])
def test_chains_are_counted_whether_they_are_fused_or_not(family: str) -> None:
    tag = chosen(family, [tag for tag in parsed(EXPECTED) if tag.split("-")[0] == family])[0]
    ((_, mod),) = load(family, [tag])
    assert total(covered(mod)[1]) == total(without_patterns(mod))
