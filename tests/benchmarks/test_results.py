"""Files of results that texts and sources name are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks/results", "docs/experiments", "tests/data")
NAMES = {path.name for folder in FOLDERS for path in (ROOT / folder).iterdir()}
TEXTS = ("README.md", "CHANGELOG.md", "docs/**/*.md", "benchmarks/results/*.md")
SOURCES = ("relax_fusion/**/*.py", "benchmarks/**/*.py", "scripts/*.py")
DATED = re.compile(r"\b(20\d\d-\d\d-\d\d-[\w.-]+\.(?:json|log|md|svg))\b")
ENDS = re.compile(r"`(-[\w-]+\.(?:json|log|md|svg))`")


def test_every_file_that_is_named_exists() -> None:
    named = {}
    for path in (p for pattern in (*TEXTS, *SOURCES) for p in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        named |= dict.fromkeys(DATED.findall(text), path.name)
        for end in ENDS.findall(text):
            assert any(name.endswith(end) for name in NAMES), f"{path.name}: {end}"
    assert len(named) > 30
    assert {name: where for name, where in named.items() if name not in NAMES} == {}


def test_what_a_benchmark_left_has_one_place() -> None:
    places = [path.name for folder in FOLDERS for path in (ROOT / folder).iterdir()]
    assert sorted(places) == sorted(NAMES)
    pictures = [name for name in NAMES if name.endswith(".svg")]
    assert pictures and {name.replace(".svg", ".json") for name in pictures} <= NAMES
