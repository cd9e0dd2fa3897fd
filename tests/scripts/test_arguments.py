"""Campaigns of hours refuse at their beginning what would end or spoil them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import fuzz
import mutate
import pytest

from benchmarks import arguments, recording


@pytest.mark.parametrize(
    "given",
    [
        *("--jobs 0", "--jobs -1", "--graphs -1", "--workloads -3", "--seed -5", "--minutes nan"),
        *("--show -1", "--output x.md", "--output /dev/null/x.json", "--output ."),
    ],
)
def test_fuzz_refuses_bad_arguments(given, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz.py", *given.split()])
    with pytest.raises(SystemExit) as ended:
        fuzz.main()
    assert ended.value.code == 2 and given.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        *("--jobs 0", "--mutants -1", "--minutes x", "--output x.md", "--tests tests/nowhere.py"),
        *("nowhere.py", "/etc/hostname", "../x.py"),
    ],
)
def test_mutate_refuses_bad_arguments(given, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["mutate.py", *given.split()])
    with pytest.raises(SystemExit) as ended:
        mutate._arguments()
    assert ended.value.code == 2 and "error" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", '{"x": 1', "", '{"model": 1}'])
def test_a_file_without_results_is_no_beginning(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="holds no results"):
        fuzz.Record(path)
    assert path.read_text() == text


def test_results_are_replaced_as_a_whole(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "sub" / "x.json"
    recording.write_results(path, {"parts": {}}, "text")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        recording.write_results(path, {"parts": {"graphs": 1}}, "other")
    assert json.loads(path.read_text()) == {"parts": {}}
    assert recording.results(path, "parts") == {"parts": {}}


def test_times_and_numbers_are_read() -> None:
    assert arguments.minutes("inf") == float("inf") and arguments.at_least(2)("2") == 2
    with pytest.raises(argparse.ArgumentTypeError, match="no integer from 2 on"):
        arguments.at_least(2)("2.0")


def test_few_functions_owe_no_rare_decline(tmp_path: Path) -> None:
    record = fuzz.Record(tmp_path / "x.json")
    record.part("graphs")["count"] = 20
    assert record.missed() == []
    record.part("graphs")["count"] = 50
    assert "FuseChains: 0, at least 1" in record.missed()
