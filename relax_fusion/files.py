"""Files that are read as a whole, and those that take the place of earlier ones as a whole."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST_BYTES = 2**28
"""A file that is read as a whole has at most this many bytes: no description of weights, and no
kernel, is as long."""


def user_cache_directory() -> Path:
    """Return where this user keeps what can be made again.

    ``RELAX_FUSION_CACHE_DIR``, else ``relax_fusion`` in ``XDG_CACHE_HOME`` or ``~/.cache``.  For a
    user without a home it is a place where nothing can be kept.
    """
    ours = os.environ.get("RELAX_FUSION_CACHE_DIR")
    if ours:
        return Path(ours)
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "relax_fusion"
    except RuntimeError:  # no HOME, and no entry among the users
        return Path(os.devnull) / "relax_fusion"


def check_regular(path: Path) -> os.stat_result:
    """Refuse a pipe, of which opening would wait, and a device, which may have no end.

    Raises `OSError` if there is no file, or it is not a regular one.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return found


def read_file(path: Path, *, own: bool = False) -> bytes:
    """Return the content of a regular file of at most `MOST_BYTES`.

    `path`: the file.
    `own`: whether to refuse a file that others than this user and root own, or can write to.
    Raises `OSError` if there is no such file, or it cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_size > MOST_BYTES:
            text = f"it has {found.st_size} bytes, at most {MOST_BYTES} can be read"
            raise OSError(errno.EFBIG, text, str(path))
        if own and (found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022):
            raise PermissionError(errno.EPERM, "others can write to it", str(path))
        return file.read()


def write_file(path: Path, text: str) -> None:
    """Write a file, which takes the place of an earlier one as a whole or leaves it as it was.

    What has the name is replaced and not followed, be it a symbolic link or one of several hard
    ones: the directory may be a stranger's.  Pipes and devices, and what /dev and /proc call by
    other names, such as ``/dev/stdout``, are written to; nobody waits for a reader.

    Raises `OSError` if it cannot be written.
    """
    content = text.encode("utf-8", "backslashreplace")  # names of files need not be text
    mode = 0o666
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or _is_of_the_system(path):
        _write(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY), content)
        return
    if stat.S_ISREG(mode) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    replace_file(path, content, stat.S_IMODE(mode) & 0o666 if stat.S_ISREG(mode) else 0o666)


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Put a new file in the place of whatever has the name, as a whole or not at all.

    Raises `OSError` if it cannot be written.
    """
    part = path.parent / f".{secrets.token_hex(8)}.part"
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        _write(os.open(part, new, mode), content)
        os.replace(part, path)
    except OSError as err:  # named after the file that was asked for
        raise OSError(err.errno, err.strerror, str(path)) from err
    finally:
        with suppress(OSError):
            part.unlink()


def _is_of_the_system(path: Path) -> bool:
    parent = Path(os.path.realpath(path.parent))
    return parent == Path("/dev") or parent.is_relative_to("/proc")


def _write(descriptor: int, content: bytes) -> None:
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(content)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Open a file, which is made if there is none, while no other process has it in this way.

    The descriptor reads anywhere and writes to the end.  A symbolic link is followed to a file that
    is there, but none is made at its end.

    Raises `OSError` if it cannot be opened, or is no regular file.
    """
    while True:
        with suppress(FileNotFoundError):
            check_regular(path)
        made = 0 if path.is_symlink() else os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | made, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the file is closed
            if _is_still(descriptor, path):  # whoever had it may have put another in its place
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
