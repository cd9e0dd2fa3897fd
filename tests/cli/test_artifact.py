"""Where ``compile`` writes: what may be replaced, and what is left when it is cut short."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from relax_fusion.cli import artifact, manifest
from relax_fusion.cli.artifact import check_output, place, remove_stages, staged, staged_file
from relax_fusion.cli.console import CliError


def fill(directory: Path, *, source: str = "tiny") -> None:
    """Write what ``compile`` would: the smallest that has a valid manifest."""
    (directory / manifest.LIBRARY).write_text("a library")
    made = manifest.Manifest(
        source=source,
        config={},
        dtype="float32",
        max_seq_len=8,
        batch=1,
        target="llvm",
        functions=("prefill", "decode"),
        weights="none",
        versions=manifest.versions(),
        parameters=(),
        files=manifest.file_sums(directory),
    )
    manifest.write_manifest(directory, made)


def source(directory: Path) -> str:
    return manifest.read_manifest(directory).source


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A directory that ``compile`` made, with nothing beside it."""
    with staged(tmp_path / "out", force=False) as part:
        fill(part)
    return tmp_path / "out"


def test_what_compile_made_is_replaced_as_a_whole(out: Path) -> None:
    with pytest.raises(CliError, match="pass --force"):
        check_output(out, force=False)
    (out.parent / "empty").mkdir()
    for old in (out, out.parent / "empty"):
        check_output(old, force=True)
        with staged(old, force=True) as part:
            fill(part, source="new")
        assert source(old) == "new"
    assert sorted(p.name for p in out.parent.iterdir()) == ["empty", "out"]


def precious(name: str, text: str = "precious"):
    def put(out: Path) -> None:
        (out / name).write_text(text)

    return put


def forged(**changes):
    def edit(out: Path) -> None:
        data = json.loads((out / manifest.MANIFEST).read_text())
        (out / manifest.MANIFEST).write_text(json.dumps(data | changes))

    return edit


def linked(out: Path) -> None:
    (out / manifest.LIBRARY).rename(out.parent / "elsewhere")
    (out / manifest.LIBRARY).symlink_to(out.parent / "elsewhere")


@pytest.mark.parametrize(
    "damage, names",
    [
        (precious("notes.txt"), "notes.txt"),
        (precious(".hidden"), ".hidden"),
        (precious(manifest.TOKENIZER), "tokenizer.json"),
        (precious(manifest.LIBRARY, "a librarx"), "lib.so"),
        (precious(manifest.LIBRARY, "short"), "lib.so"),
        (precious(manifest.MANIFEST, '{"manifest_version": 3, "name": "x"}'), "manifest.json"),
        (precious(manifest.MANIFEST, ""), "manifest.json"),
        (lambda out: (out / manifest.MANIFEST).unlink(), "manifest.json"),
        (lambda out: (out / manifest.LIBRARY).unlink(), "lib.so"),
        (lambda out: (out / "deep").mkdir(), "deep"),
        (linked, "lib.so"),
        (forged(files={}), "lib.so"),
        (forged(surprise=1), "surprise"),
    ],
)
def test_whatever_else_stays_as_it_is_and_is_named(out: Path, damage, names: str) -> None:
    damage(out)
    before = {p: p.is_dir() or p.read_bytes() for p in out.rglob("*")}
    with pytest.raises(CliError, match=names) as caught:
        check_output(out, force=True)
    assert caught.value.code == 2
    with pytest.raises(CliError, match=names), staged(out, force=True) as part:
        fill(part)
    assert {p: p.is_dir() or p.read_bytes() for p in out.rglob("*")} == before


def test_files_and_links_are_no_output(out: Path) -> None:
    (out.parent / "file").write_text("")
    (out.parent / "link").symlink_to(out)
    (out.parent / "dangling").symlink_to(out.parent / "nothing")
    for name in ("file", "link", "dangling"):
        with pytest.raises(CliError, match="no directory"):
            check_output(out.parent / name, force=True)


def test_the_working_directory_is_not_replaced(out: Path, monkeypatch) -> None:
    monkeypatch.chdir(out)
    with pytest.raises(CliError, match="is the working directory"):
        check_output(out, force=True)


def test_what_appears_while_it_compiles_is_not_overwritten(out: Path) -> None:
    with pytest.raises(CliError, match=r"notes\.txt"), staged(out, force=True) as part:
        fill(part, source="new")
        precious("notes.txt")(out)
    assert source(out) == "tiny" and (out / "notes.txt").exists()
    with pytest.raises(CliError), staged(out.parent / "new", force=False) as part:
        fill(part)
        (out.parent / "new").mkdir()
    assert sorted(p.name for p in out.parent.iterdir()) == ["new", "out"]


def test_without_an_exchange_a_failed_move_is_undone(out: Path, monkeypatch) -> None:
    monkeypatch.setattr(artifact, "_exchange", lambda *_: False)
    with staged(out, force=True) as part:
        fill(part, source="new")
    assert source(out) == "new" and list(out.parent.iterdir()) == [out]
    rename, calls = Path.rename, []

    def second_fails(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == 2:
            raise OSError("no space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match="no space"), staged(out, force=True) as part:
        fill(part, source="newer")
    assert source(out) == "new" and list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("name", ["out", "new/parents/out"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError, CliError])
def test_what_fails_leaves_nothing(tmp_path: Path, stop: type[BaseException], name: str) -> None:
    with pytest.raises(stop), staged(tmp_path / name, force=False) as part:
        fill(part)
        raise stop("now")
    assert list(tmp_path.iterdir()) == []


def test_directories_that_others_use_meanwhile_stay(tmp_path: Path) -> None:
    with pytest.raises(OSError), staged(tmp_path / "new" / "out", force=False):
        (tmp_path / "new" / "mine").touch()
        raise OSError
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine"]


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_fills_is_not(
    tmp_path: Path,
) -> None:
    dead, living, other = (tmp_path / f".{n}.part" for n in ("out.00000000", "out.1111111f", "o.x"))
    for left in (dead, living, other):
        left.mkdir()
        (left / "lib.so").write_text("half")
    lock = os.open(living, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with staged(tmp_path / "out", force=False) as part:
        fill(part)
    os.close(lock)
    assert sorted(tmp_path.iterdir()) == sorted([living, other, tmp_path / "out"])


@pytest.mark.parametrize("name", ["out", "new/parents/out"])
def test_an_interrupt_removes_what_is_being_filled(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError), staged(tmp_path / name, force=False) as part:
        fill(part)
        remove_stages()
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_does_not_meet_the_move(out: Path, monkeypatch) -> None:
    exchange = artifact._exchange
    interrupt = threading.Thread(target=remove_stages)

    def interrupted(one: Path, two: Path) -> bool:
        interrupt.start()
        interrupt.join(0.05)
        return exchange(one, two)

    monkeypatch.setattr(artifact, "_exchange", interrupted)
    with staged(out, force=True) as part:
        fill(part, source="new")
    interrupt.join()
    assert source(out) == "new" and list(out.parent.iterdir()) == [out]


def test_what_only_looks_like_a_stage_stays(tmp_path: Path) -> None:
    (tmp_path / ".out.my-notes.part").mkdir()
    (tmp_path / ".out.00000000.part").write_text("no directory")
    with staged(tmp_path / "out", force=False) as part:
        fill(part)
    assert len(list(tmp_path.iterdir())) == 3


def test_what_appears_while_it_is_checked_is_not_removed(out: Path, monkeypatch) -> None:
    """Hashing takes minutes; what is removed in the end is looked at once more."""
    check = artifact.check_output

    def late(old: Path, *, force: bool) -> None:
        check(old, force=force)
        precious("notes.txt")(out)

    monkeypatch.setattr(artifact, "check_output", late)
    for exchange in (artifact._exchange, lambda *_: False):
        monkeypatch.setattr(artifact, "_exchange", exchange)
        (out / "notes.txt").unlink(missing_ok=True)
        with pytest.raises(CliError, match=r"out/notes\.txt"), staged(out, force=True) as part:
            fill(part, source="new")
        assert source(out) == "tiny" and list(out.parent.iterdir()) == [out]


def test_without_force_nothing_is_replaced_however_late_it_comes(tmp_path: Path, monkeypatch):
    check, new = artifact.check_output, tmp_path / "out"

    def late(out: Path, *, force: bool) -> None:
        check(out, force=force)
        out.mkdir()
        fill(out, source="somebody's")

    monkeypatch.setattr(artifact, "check_output", late)
    with pytest.raises(CliError, match="exists already"), staged(new, force=False) as part:
        fill(part)
    assert source(new) == "somebody's" and list(tmp_path.iterdir()) == [new]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    left = tmp_path / ".out.00000000.part"  # perhaps somebody fills it
    left.mkdir()
    with staged(tmp_path / "out") as part:
        fill(part)
    assert sorted(tmp_path.iterdir()) == [left, tmp_path / "out"]


def test_a_file_takes_its_place_as_a_whole_and_replaces_nothing(tmp_path: Path) -> None:
    with staged_file(tmp_path / "new" / "out.npz") as file:
        file.write_text("all")
        assert [path.name for path in (tmp_path / "new").iterdir()] != ["out.npz"]
    assert (tmp_path / "new" / "out.npz").read_text() == "all"
    late = tmp_path / "late.npz"
    with pytest.raises(CliError, match=r"late\.npz exists already"), staged_file(late) as file:
        file.write_text("mine")
        late.write_text("somebody's")
    with pytest.raises(FileNotFoundError), staged_file(tmp_path / "cut") as file:
        file.write_text("half")
        remove_stages()
    assert late.read_text() == "somebody's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late.npz", "new"]


def test_names_as_long_as_they_can_be(tmp_path: Path) -> None:
    for letter in "xö":
        out = tmp_path / (letter * (255 // len(letter.encode())))
        for _ in range(2):
            with staged(out, force=True) as part:
                fill(part)
        assert source(out) == "tiny"


def test_mount_points_are_refused_at_once(out: Path, monkeypatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda self: self == out)
    with pytest.raises(CliError, match="is a mount point"):
        check_output(out, force=True)


def test_links_are_followed_as_the_system_does(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    monkeypatch.chdir(tmp_path)
    named = {"link/../x": "far/x", "link": "link", "link/": "link", ".": ".", "link/..": "far"}
    assert {text: place(text) for text in named} == {
        text: Path(os.path.normpath(tmp_path / path)) for text, path in named.items()
    }
