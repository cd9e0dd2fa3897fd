"""``passes.json``: what is written is read again; what is damaged or too new is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_fusion import PipelineError
from relax_fusion.report.passes import (
    FORMAT,
    PASSES,
    DumpRecord,
    FunctionChange,
    PassRecord,
    PhaseRecord,
    passes_text,
    read_passes,
)
from relax_fusion.report.text_changes import Hunk

CHANGE = FunctionChange("main", "graph", "changed", 3, 4, (Hunk(1, 1, (" a", "+ß"), 2),), "Cut.")
PASS = PassRecord("FuseAll", 0.25, 1, 2, 30, 4, (CHANGE,))
RECORD = DumpRecord((PhaseRecord("debug-phase1.py", "fusing", 0.25, (PASS,)),), {"target": "llvm"})


def written(directory: Path, text: str) -> Path:
    (directory / PASSES).write_text(text, encoding="utf-8")
    return directory


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_passes(written(tmp_path, passes_text(RECORD))) == RECORD


def refusal(directory: Path) -> str:
    with pytest.raises(PipelineError) as caught:
        read_passes(directory)
    return str(caught.value)


def test_a_directory_without_a_dump(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").endswith("none is no directory")
    assert refusal(tmp_path) == f"{tmp_path} holds no {PASSES}: it is written by --debug-dump"


def test_a_newer_format(tmp_path: Path) -> None:
    text = json.dumps({"format": FORMAT + 1, "phases": "whatever"})
    told = refusal(written(tmp_path, text))
    assert f"has the format {FORMAT + 1}; this version reads up to {FORMAT}" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "it names no format"),
        ('{"format": true}', "it names no format"),
        ('{"format": 0, "phases": []}', "has the format 0"),
        ('{"format": 1}', "'phases' is missing"),
        (passes_text(RECORD).replace('"seconds": 0.25', '"seconds": "long"', 1), "'long'"),
        (passes_text(RECORD).replace('"graph"', '"picture"'), "is 'picture'; must be"),
        (passes_text(RECORD).replace('"before": 3', '"behind": 3'), "'before']\" is missing"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    told = refusal(written(tmp_path, text))
    assert str(tmp_path / PASSES) in told and words in told
