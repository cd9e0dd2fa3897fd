"""How many lines and files there may be: only a commit that says why raises these numbers."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = 93_146, 550
"""The most lines, of all languages, and the most files in ``relax_fusion/``."""

TESTS = 70_775
"""The most lines of Python in ``tests/``."""


def lines_of(folder: str, pattern: str) -> list[int]:
    """Return the lines of each file in a folder."""
    files = [f for f in (ROOT / folder).rglob(pattern) if "__pycache__" not in f.parts]
    return [f.read_bytes().count(b"\n") for f in files if f.is_file()]


def test_the_library_is_no_longer_than_it_was() -> None:
    lines = lines_of("relax_fusion", "*")
    assert lines, "no file was found"
    assert sum(lines) <= LIBRARY[0] and len(lines) <= LIBRARY[1]


def test_its_tests_are_not_either() -> None:
    assert sum(lines_of("tests", "*.py")) <= TESTS
