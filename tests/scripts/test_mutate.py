"""`scripts/mutate.py` on a module of a few lines."""

from __future__ import annotations

import json
from pathlib import Path

import _mutant_tests
import _mutants
import mutate
import pytest

TOY = '''\
"""A toy, 1 of 2."""
LIMIT = 3


def within(size: int = 1) -> bool:
    """Tell whether 7 < 8."""
    guard(size > 0, Reason.SHAPE, f"{size + 1} is too small")
    return size <= LIMIT and not size == 2


def unused(a, b):
    return other(b, a[1:])
'''

TESTED = """\
import pytest
from toys import toy

class Reason:
    SHAPE = 0

def guard(condition, *_):
    if not condition:
        raise ValueError

@pytest.fixture(autouse=True)
def names(monkeypatch):
    monkeypatch.setattr(toy, "guard", guard, raising=False)
    monkeypatch.setattr(toy, "Reason", Reason, raising=False)

@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, False), (4, False)])
def test_within(size, fits):
    assert toy.within(size) == fits

def test_default():
    assert toy.within()

def test_guard():
    with pytest.raises(ValueError):
        toy.within(-1)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(_mutant_tests, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "PRELOADED", ())
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "toy.py").write_text(TOY, encoding="utf-8")
    (tmp_path / "test_toy.py").write_text(TESTED, encoding="utf-8")
    return tmp_path


def test_what_is_changed(root: Path) -> None:
    found = [m.diff(TOY) for m in _mutants.mutants(root / "toys" / "toy.py")]
    changes = {(before, after) for before, after in found}
    assert {
        ("LIMIT = 3", "LIMIT = 4"),
        ("return size <= LIMIT and not size == 2", "return (size < LIMIT) and not size == 2"),
        ("return size <= LIMIT and not size == 2", "return (size <= LIMIT or not size == 2)"),
        ("return size <= LIMIT and not size == 2", "return size <= LIMIT and (size == 2)"),
        ("return size <= LIMIT and not size == 2", "return size <= LIMIT and not size == (1)"),
        ("return other(b, a[1:])", "return other(a[1:], b)"),
        ("return other(b, a[1:])", "return other(b, a[2:])"),
        ("return other(b, a[1:])", "return None"),
    } <= changes
    guards = {after for before, after in found if before.startswith("guard")}
    message = 'Reason.SHAPE, f"{size + 1} is too small")'
    assert guards == {
        "pass",
        *(f"guard({c}, {message}" for c in ("(size >= 0)", "size > 1", "size > (-1)")),
    }
    assert not [b for b, _ in found if '"""' in b]


def test_a_sample_is_fixed_by_its_seed_and_fair_to_kinds(root: Path) -> None:
    every = _mutants.mutants(root / "toys" / "toy.py")
    chosen = _mutants.sample(every, 8, seed=1)
    assert chosen == _mutants.sample(every, 8, seed=1) != _mutants.sample(every, 8, seed=2)
    assert len({m.kind for m in chosen}) == min(8, len({m.kind for m in every}))
    assert len(_mutants.sample(every, 10**6, seed=1)) == len(every)


def test_mutants_are_caught_by_the_tests_that_run_them(root: Path, monkeypatch, capsys) -> None:
    output = root / "found.json"
    given = ["mutate.py", "toys", "--tests", "test_toy.py", "--seed", "1", "--output", str(output)]
    monkeypatch.setattr("sys.argv", [*given, "--mutants", "12"])
    assert mutate.main() == 1
    record = json.loads(output.read_text(encoding="utf-8"))
    rows = {r["after"]: r for r in record["mutants"]}
    assert len(record["mutants"]) == 12
    assert {r["function"] for r in rows.values() if r["caught"] is None} <= {"unused", "within"}
    assert all(r["caught"] is None for r in rows.values() if r["function"] == "unused")
    assert any(r["by"].startswith("test_toy.py::test_within[") for r in rows.values())
    assert "no test finds it" in output.with_suffix(".md").read_text(encoding="utf-8")
