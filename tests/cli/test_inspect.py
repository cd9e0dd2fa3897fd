"""``inspect``: the page of a dump is written anew from passes.json, or one line says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import relax_fusion
from relax_fusion.cli import main

from ..transforms.test_debug_dump import PIPELINE, module


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump")
    relax_fusion.partition(module(), debug_dump=path, **PIPELINE)
    return path


def copy(dumped: Path, to: Path, *names: str) -> Path:
    for name in names:
        (to / name).write_bytes((dumped / name).read_bytes())
    return to


def test_the_page_is_the_one_that_the_dump_wrote(dumped: Path, capsys) -> None:
    before = (dumped / "index.html").read_text(encoding="utf-8")
    (dumped / "index.html").unlink()
    assert main(["inspect", str(dumped), "-q"]) == 0
    out = capsys.readouterr().out
    assert str(dumped / "index.html") in out and "fusing operators" in out
    assert (dumped / "index.html").read_text(encoding="utf-8") == before
    assert 'href="report.html"' in before and "FuseGatedFFN" in before


def test_a_copy_of_passes_json_is_enough(dumped: Path, tmp_path: Path, capsys) -> None:
    copied = copy(dumped, tmp_path, "passes.json", "debug-phase1.py")
    assert main(["inspect", str(copied), "--json", "-q"]) == 0
    facts = json.loads(capsys.readouterr().out)
    page = Path(facts["page"]).read_text(encoding="utf-8")
    assert 'href="debug-phase1.py"' in page and 'href="debug-phase0.py"' not in page
    assert 'href="report.html"' not in page
    assert "FuseGatedFFN" in facts["phases"][1]["changing"] and facts["failed"] == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "holds no passes.json: it is written by --debug-dump"),
        ("{", "passes.json is damaged: it is no JSON"),
        ('{"format": 99}', "has the format 99; this version reads up to 1"),
        ('{"format": 1, "phases": 3}', "phases is 3"),
    ],
)
def test_what_is_no_dump(tmp_path: Path, text: str | None, words: str, capsys) -> None:
    if text is not None:
        (tmp_path / "passes.json").write_text(text)
    assert main(["inspect", str(tmp_path), "-q"]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "index.html").exists()


def test_no_directory(tmp_path: Path, capsys) -> None:
    assert main(["inspect", str(tmp_path / "none"), "-q"]) == 1
    assert "none is no directory" in capsys.readouterr().err


def test_a_page_that_cannot_be_written(dumped: Path, tmp_path: Path, capsys) -> None:
    (copy(dumped, tmp_path, "passes.json") / "index.html").mkdir()
    assert main(["inspect", str(tmp_path), "-q"]) == 1
    assert "index.html" in capsys.readouterr().err
