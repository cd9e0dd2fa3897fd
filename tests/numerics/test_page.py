"""Every sentence of docs/numerics.md has a test, and every test has a sentence."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


def test_sentences_and_tests_are_the_same() -> None:
    sentences = re.findall(r"^\*\*([A-Z]\d)\*\* ", PAGE.read_text(), re.MULTILINE)
    tests = [p.read_text() for p in Path(__file__).parent.glob("test_*.py")]
    tested = {name.upper() for text in tests for name in re.findall(r"def test_([a-z]\d)_", text)}
    assert len(sentences) == len(set(sentences)) > 30
    assert set(sentences) == tested
