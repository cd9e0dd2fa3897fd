"""Files that the library writes stay in the directory that they are written into."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tvm.script import ir as I

import relax_fusion
from relax_fusion.cli import main
from relax_fusion.errors import DatabaseError
from relax_fusion.estimator.database import Database
from relax_fusion.files import read_file, replace_file, write_file
from relax_fusion.report import Report
from relax_fusion.transforms.debug_dump import Wanted, phase_runner, reported

ROOT = Path(relax_fusion.__file__).parent
PLACES: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda place, mine: place.symlink_to(mine),
    "relative link": lambda place, mine: place.symlink_to(f"../{mine.name}"),
    "link to a link": lambda place, mine: (
        place.with_name("other").symlink_to(mine),
        place.symlink_to("other"),
    ),
    "hard link": lambda place, mine: os.link(mine, place),
    "dangling link": lambda place, _: place.symlink_to("../made"),
    "link to a directory": lambda place, mine: place.symlink_to(".."),
}


def inspect(directory: Path) -> None:
    phase = {"file": "debug-phase0.py", "title": "t", "seconds": 1.0, "passes": []}
    record = {"phases": [phase], "options": {}, "failed": "", "format": 1}
    (directory / "passes.json").write_text(json.dumps(record))
    assert main(["inspect", str(directory), "-q"]) == 0


@I.ir_module
class Nothing:
    """A module without functions."""


def dump(directory: Path) -> None:
    (directory / "debug-final.py").touch()  # of an earlier dump
    with phase_runner(Wanted(directory), Nothing, {}) as run:
        run("debug-phase0.py", "t", [], Nothing)


def written(directory: Path) -> None:
    with reported(Report(), relax_fusion.make_target("llvm"), "tir", directory):
        pass


WRITERS: list[tuple[Callable[[Path], object], str]] = [
    (inspect, "index.html"),
    *((dump, name) for name in ("debug-phase0.py", "passes.json")),
    (written, "report.json"),
    (lambda directory: write_file(directory / "record.json", "{}"), "record.json"),
]


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_what_has_the_name_is_not_followed(tmp_path: Path, write, name: str, kind: str) -> None:
    mine, directory = tmp_path / "mine", tmp_path / "theirs"
    mine.write_text("my only copy")
    directory.mkdir()
    PLACES[kind](directory / name, mine)
    write(directory)
    assert mine.read_text() == "my only copy" and not (tmp_path / "made").exists()
    written = directory / name
    assert written.is_file() and not written.is_symlink() and written.stat().st_nlink == 1
    assert not list(directory.glob("*.part")) and sorted(tmp_path.iterdir()) == [mine, directory]


def test_files_are_written_in_one_place() -> None:
    """`artifact` moves what was written into a directory of its own, and so does the cache."""
    found = set()
    for path in ROOT.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"write_(text|bytes)|open\(", source):
            continue
        for node in ast.walk(ast.parse(source)):
            text = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if re.match(
                r"[^(]*\bwrite_(text|bytes)\(|(?!os\.)[^(]*\bopen\(.*['\"][wax]b?\+?", text
            ):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {"files.py", "cli/arrays.py"}


def test_pipes_devices_and_what_the_system_calls_by_other_names(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):  # nobody waits for a reader
        write_file(pipe, "page")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "page")
    assert os.read(reader, 99) == b"page" and pipe.is_fifo()
    os.close(reader)
    write_file(Path("/dev/null"), "page")
    assert Path("/dev/null").is_char_device()
    file = tmp_path / "file"
    with file.open("w") as stream:
        write_file(Path(f"/dev/fd/{stream.fileno()}"), "page")
        assert os.path.samestat(os.fstat(stream.fileno()), file.stat())
    assert file.read_text() == "page"


def test_a_file_stays_as_it_was_or_is_replaced(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    file.chmod(0o600)
    write_file(file, "a\udcff")
    assert file.read_text() == "a\\udcff" and file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for users other than root
    with pytest.raises(PermissionError, match="Permission denied"):
        write_file(file, "after")
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "directory", "after")
    assert file.read_text() == "a\\udcff" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["my only line", '{"a": 1}', "x" * 2**21, '{"form'])
def test_a_database_takes_the_last_line_of_no_other_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes"
    file.write_text(text)
    if text == '{"form':  # what a writer leaves that is killed
        Database(file).create()
        assert file.read_text() == ""
        return
    with pytest.raises(DatabaseError, match="is no measurement"):
        Database(file).create()
    assert file.read_text() == text


def test_links_to_databases(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("made")
    (tmp_path / "link").symlink_to("times")
    with pytest.raises(DatabaseError, match="cannot be written"):
        Database(tmp_path / "dangling").create()
    (tmp_path / "times").touch()
    Database(tmp_path / "link").create()
    assert not (tmp_path / "made").exists()


def test_what_its_user_keeps_is_read_again_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        replace_file(tmp_path / "kept", b"ours")
    finally:
        os.umask(before)
    assert read_file(tmp_path / "kept", own=True) == b"ours"
