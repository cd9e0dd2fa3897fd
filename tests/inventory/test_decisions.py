"""What is decided about small models on three targets is what was recorded.

``tests/data/decisions.txt`` has a line for each kind of chain and a line for each range of sizes
with its tiles; ``RELAX_FUSION_REWRITE=1 python -m pytest tests/inventory/test_decisions.py`` writes
it anew, for `git diff` to show.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
from tvm.target import Target

from relax_fusion import make_target

from ..support.slow import quick_if
from .test_hand_counts import CONFIGS, reported

EXPECTED = Path(__file__).parents[1] / "data" / "decisions.txt"
HASWELL = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2}
TARGETS = {"llvm": Target(HASWELL), "h200": make_target("h200"), "a100": make_target("a100")}


def entries() -> dict[str, str]:
    """Return what was recorded, by its first line."""
    texts = EXPECTED.read_text().split("\n\n") if EXPECTED.exists() else []
    return {text.splitlines()[0]: text.strip("\n") for text in texts}


@pytest.mark.parametrize(
    ("name", "target"),  # what an a100 has otherwise than an h200, one model shows
    quick_if(lambda case: case[0] == "llama" or case[1] != "a100", product(CONFIGS, TARGETS)),
)
def test_decisions(name: str, target: str) -> None:
    report = reported(name, TARGETS[target])
    plans = {d.kernel: d.plans for d in report.fused}
    lines = [f"{name} on {target}"]
    for item in report.work:
        sizes = ", ".join(f"{p.batch} x {p.m} x {p.n} x {p.k}" for p in item.products)
        why = f" ({item.reason})" if item.status != "fused" else ""
        lines.append(f"  {item.function}: {item.count} of {item.chain}: {sizes}{why}")
        table = plans.get(item.kernel)
        for box, plan in table.boxes if table is not None else ():
            told = f"{plan.num_warps} warps, {plan.num_stages} stages"
            lines.append(f"    {box}: {plan.text}, {told}")
    found = "\n".join(lines)
    if os.environ.get("RELAX_FUSION_REWRITE"):
        texts = entries() | {lines[0]: found}
        EXPECTED.write_text("\n\n".join(texts[key] for key in sorted(texts)) + "\n")
    assert found == entries()[lines[0]]


def test_nothing_else_is_recorded() -> None:
    assert sorted(entries()) == sorted(
        f"{name} on {target}" for name in CONFIGS for target in TARGETS
    )
