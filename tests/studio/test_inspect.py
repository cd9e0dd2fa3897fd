"""``inspect``: pages of a compilation and of a dump, or one line that says why there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import relax_fusion
from relax_fusion import Report, make_target
from relax_fusion.cli import main
from relax_fusion.report.record import record_of
from relax_fusion.studio import report_html
from relax_fusion.studio.compilation import report_of

from ..transforms.test_debug_dump import PIPELINE, module
from .page_support import report_for


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump")
    relax_fusion.partition(module(), debug_dump=path, **PIPELINE)
    return path


def copy(dumped: Path, to: Path, *names: str) -> Path:
    for name in names:
        (to / name).write_bytes((dumped / name).read_bytes())
    return to


@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_a_report_that_was_written_and_read_says_the_same(target: str) -> None:
    report, made = report_for(target), make_target(target)
    record = {"target": str(made), **record_of(report, sources=True)}
    again = report_of(json.loads(json.dumps(record)))
    both = (json.dumps(record_of(each, sources=True)) for each in (again, report))
    assert next(both) == next(both)
    assert report_html(again) == report_html(report) and again.text() == report.text()
    assert isinstance(again, Report) and again.declined == report.declined


def test_the_pages_of_a_dump(dumped: Path, capsys) -> None:
    assert main(["inspect", str(dumped), "-q"]) == 0
    out = capsys.readouterr().out
    assert str(dumped / "index.html") in out and "fusing operators" in out
    page = (dumped / "index.html").read_text(encoding="utf-8")
    assert 'href="report.html"' in page and "FusePatterns" in page
    assert "</html>" in (dumped / "report.html").read_text(encoding="utf-8")
    assert main(["inspect", str(dumped), "-o", "x.html", "-q"]) == 2
    assert "are written into it" in capsys.readouterr().err


def test_a_copy_of_passes_json_is_enough(dumped: Path, tmp_path: Path, capsys) -> None:
    copied = copy(dumped, tmp_path, "passes.json", "debug-phase1.py")
    assert main(["inspect", str(copied), "--json", "-q"]) == 0
    facts = json.loads(capsys.readouterr().out)
    page = Path(facts["page"]).read_text(encoding="utf-8")
    assert 'href="debug-phase1.py"' in page and 'href="debug-phase0.py"' not in page
    assert 'href="report.html"' not in page
    assert "FusePatterns" in facts["phases"][1]["changing"] and facts["failed"] == ""


def test_the_page_of_a_report(dumped: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    source = str(copy(dumped, tmp_path, "report.json") / "report.json")
    assert main(["inspect", source, "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == "report.html"
    assert "</html>" in Path("report.html").read_text(encoding="utf-8")
    assert main(["inspect", source, "-o", source, "-q"]) == 2
    assert "would replace what is read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (None, 2, "has no manifest.json"),
        ("{", 1, "passes.json is damaged: it is no JSON"),
        ('{"format": 99}', 1, "has the format 99; this version reads up to 1"),
        ('{"format": 1, "phases": 3}', 1, "phases is 3"),
    ],
)
def test_what_is_no_dump(
    tmp_path: Path, text: str | None, code: int, words: str, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "passes.json").write_text(text)
    assert main(["inspect", str(tmp_path), "-q"]) == code
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))


def test_no_directory(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(tmp_path / "none"), "-q"]) == 2
    assert "none does not exist" in capsys.readouterr().err


def test_a_page_that_cannot_be_written(dumped: Path, tmp_path: Path, capsys) -> None:
    (copy(dumped, tmp_path, "passes.json") / "index.html").mkdir()
    assert main(["inspect", str(tmp_path), "-q"]) == 1
    assert "index.html" in capsys.readouterr().err
