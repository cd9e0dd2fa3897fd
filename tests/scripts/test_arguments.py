"""Campaigns of hours refuse at their beginning what would end or spoil them."""

from __future__ import annotations

import json
from pathlib import Path

import fuzz
import pytest

from benchmarks import recording


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


def test_few_functions_owe_no_rare_decline(tmp_path: Path) -> None:
    record = fuzz.Record(tmp_path / "x.json")
    record.part("graphs")["count"] = 20
    assert record.missed() == []
    record.part("graphs")["count"] = 50
    assert "FuseChains: 0, at least 1" in record.missed()
