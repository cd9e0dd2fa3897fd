"""What commands write: pages, tables, and the directory that ``compile`` fills.

The directory takes its place as a whole, or vanishes.  Until then it stands beside its place, as
``.NAME.XXXXXXXX.part``, and is locked as long as its process lives; what a killed one left is
removed by the next ``compile`` to the same place.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..files import write_file
from ..transforms.debug_dump import REPORT
from .console import CliError, Console
from .manifest import LIBRARY, MANIFEST, PARAMS, TOKENIZER, Manifest, check_files, read_manifest

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
_LONGEST = 255 - len("..XXXXXXXX.part")
"""A name may have this many bytes, which leave room for the rest of a stage's name."""

_stages: dict[Path, list[Path]] = {}
"""The directories made for each path that is being filled, from the innermost on."""
_last_words: list[Callable[[], None]] = []
_moving = threading.Lock()
"""This lock is held while a stage and its place are swapped: nobody must be removing their
files."""


def place(text: str) -> Path:
    """Return the path that the system takes `text` for, but for a link that is its last name.

    ``link/..`` is the parent of what ``link`` points to; "." and ".." have a name afterwards.
    """
    path = Path(text)
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent), path.name)


def check_output(out: Path, *, force: bool) -> None:
    """Refuse to write where something else is than what ``compile`` made.

    Raises `CliError` if `out` exists, unless `force` and it is empty or holds what its manifest
    says, and nothing else.
    """
    if not os.path.lexists(out):
        return
    foreign = _foreign(out)
    if foreign is None and force:
        return
    what = "pass --force to replace it" if foreign is None else f"it stays as it is: {foreign}"
    raise CliError(f"{out} exists already; {what}, or choose another -o", code=2)


def _foreign(out: Path) -> str | None:
    """Say what `out` holds that no ``compile`` wrote; None if there is nothing."""
    if out.is_symlink() or not out.is_dir():
        return "it is no directory"
    if out.samefile("."):  # the shell would be left in one that is gone
        return "it is the working directory"
    if out.is_mount():  # nothing can be moved there
        return "it is a mount point"
    try:
        manifest = _check_names(out)
        if manifest is not None:
            check_files(out, manifest, also_weights=True)
    except CliError as err:
        return str(err)
    return None


def _check_names(out: Path) -> Manifest | None:
    """Return the manifest of what is in `out`, which has nothing else; None if it is empty."""
    names = sorted(entry.name for entry in out.iterdir())
    if not names:
        return None
    manifest = read_manifest(out)
    for name in names:
        if name not in (MANIFEST, *manifest.files) or (out / name).is_symlink():
            raise CliError(f"{out / name} is not of its manifest")
    return manifest


@contextmanager
def staged(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Give a directory to fill; it becomes `out` at the end, or vanishes if anything fails."""
    for left in out.parent.glob(f"{glob.escape(_prefix(out))}{'[0-9a-f]' * 8}.part"):
        with suppress(OSError):  # somebody else's
            lock = _lock(left)
            if lock is not None:  # nobody fills it any more
                _remove(left)
                os.close(lock)
    with _new_stage(out) as stage:
        yield stage
        check_output(out, force=force)  # compiling took its time
        try:
            with _moving:
                _put(stage, out, force=force)
        except (OSError, CliError):
            check_output(out, force=force)  # checking took its time; it says what is there now
            raise


@contextmanager
def staged_file(out: Path) -> Iterator[Path]:
    """Give a file to fill; it becomes `out` at the end, or vanishes if anything fails.

    Raises `CliError` if `out` is there by then.
    """
    with _new_stage(out) as stage:
        yield stage / out.name
        with _moving:
            try:
                os.link(stage / out.name, out)  # unlike a rename, it replaces nothing
            except FileExistsError as err:
                raise CliError(f"{out} exists already; choose another", code=2) from err


@contextmanager
def when_interrupted(call: Callable[[], None]) -> Iterator[None]:
    """Have something done if the process is asked to end in a context."""
    _last_words.append(call)
    try:
        yield
    finally:
        _last_words.remove(call)


def remove_stages() -> None:
    """Remove what is being filled; for a process that ends at once, whatever else it is doing.

    What `when_interrupted` was told comes first.
    """
    for call in list(_last_words):
        call()
    with _moving:
        for stage in list(_stages):
            _discard(stage)


def _discard(stage: Path) -> None:
    """Remove a stage, and the directories around it if nothing has come into them."""
    _remove(stage)
    for directory in _stages.pop(stage, ()):
        with suppress(OSError):
            directory.rmdir()


def _prefix(out: Path) -> str:
    """Return the beginning of the stages' names, so short that the file system takes the rest."""
    return os.fsdecode(b".%b." % os.fsencode(out.name)[:_LONGEST])


@contextmanager
def _new_stage(out: Path) -> Iterator[Path]:
    """Make a directory and lock it; it is gone behind the block, if it was not moved.

    Until it is locked, somebody else may take it for a dead process's, and remove it.
    """
    made, lock = [path for path in out.parents if not path.exists()], None
    while lock is None:
        stage = out.parent / f"{_prefix(out)}{secrets.token_hex(4)}.part"
        stage.mkdir(parents=True)
        try:
            lock = _lock(stage)
        except OSError:  # the file system has no locks: nobody will take it for a dead process's
            break
        if lock is not None and not stage.is_dir():
            os.close(lock)
            lock = None
    _stages[stage] = made
    try:
        yield stage
    finally:
        _discard(stage)
        if lock is not None:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """Lock a directory; None if a living process has locked it, or it is gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(descriptor)
        if isinstance(err, BlockingIOError):
            return None
        raise
    return descriptor


def _put(stage: Path, out: Path, *, force: bool) -> None:
    """Move `stage` to `out`, so that one of the two is there at every moment.

    Nothing is replaced without `force`, and nothing with it that has appeared since it was checked:
    what was there is looked at once more when nobody finds it under its name any longer.
    """
    if not force or not out.exists():
        stage.rename(out)
    elif _exchange(stage, out):
        try:
            _check_names(stage)
        except (OSError, CliError):
            _exchange(stage, out)
            raise
    else:
        old = stage.with_suffix(".old")  # all of it is here if the process is killed now
        out.rename(old)
        try:
            _check_names(old)
            stage.rename(out)
        except (OSError, CliError):
            old.rename(out)
            raise
        _remove(old)


def _exchange(one: Path, two: Path) -> bool:
    """Swap two directories in one step; False where the C library or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    names = (os.fsencode(path) for path in (one, two))
    return rename(_AT_FDCWD, next(names), _AT_FDCWD, next(names), _RENAME_EXCHANGE) == 0


def _remove(directory: Path) -> None:
    """Remove a directory, though a linker may still be writing to it."""
    for _ in range(20):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.05)


_READ = (MANIFEST, REPORT, LIBRARY, PARAMS, TOKENIZER, "config.json")
"""The files that commands read of compiled directories and models, beside checkpoints."""

_CHECKPOINTS = (".safetensors", ".safetensors.index.json")


def check_written(
    files: Mapping[str, str | None], *inputs: str | None, stdout: Collection[str] = ()
) -> None:
    """Refuse, before anything is done, what cannot become a file, and what the command reads.

    `files`: by option, the file that is to be written; None where none is.
    `*inputs`: files and directories that the command reads.
    `stdout`: options that take ``-``.
    Raises `CliError` if a file is a directory, or in none; if it is one of `inputs`, or of their
    files, which it would replace; if it is that of another option.
    """
    earlier: dict[Path, str] = {}
    for option, file in files.items():
        if file is None or (file == "-" and option in stdout):
            continue
        path = Path(file)
        if file == "-" or path.is_dir() or not path.parent.is_dir():
            raise CliError(f"{option} {file} must be a file in a directory that exists", code=2)
        if any(_is_read(path, Path(each)) for each in inputs if each is not None):
            raise CliError(f"{option} {file} would replace what is read; give another file", code=2)
        other = earlier.setdefault(path.resolve(), option)
        if other != option:
            raise CliError(f"{other} and {option} are both {file}; give each a file", code=2)


def _is_read(path: Path, source: Path) -> bool:
    """Tell whether a file is what a command reads, or one of its files if that is a directory."""
    if not path.exists() or not source.exists():
        return False
    if source.is_file() and source.name != MANIFEST:
        return path.samefile(source)
    source = source.parent if source.is_file() else source
    real = path.resolve()
    is_file_of_it = real.name in _READ or real.name.endswith(_CHECKPOINTS)
    return is_file_of_it and real.parent.samefile(source)


def write_page(text: str, file: str, console: Console) -> None:
    """Write a page, or a table, replacing a file of an earlier call."""
    console.step(f"writing {file}")
    try:
        write_file(Path(file), text)
    except OSError as err:
        raise CliError(f"{file} cannot be written ({err.strerror})") from err
