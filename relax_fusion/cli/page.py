"""Pages that commands write: where ``--html FILE`` says, and into a dump."""

from __future__ import annotations

from pathlib import Path

from .console import CliError, Console


def check_page(file: str | None, *inputs: str) -> None:
    """Refuse, before anything is done, what cannot become a file, and what the command reads.

    Raises
    ------
    CliError
        If it is a directory, or in none; or if it is one of `inputs`, which it would replace.
    """
    if file is None:
        return
    if file == "-" or Path(file).is_dir() or not Path(file).parent.is_dir():
        raise CliError(f"--html {file} must be a file in a directory that exists", code=2)
    if Path(file).exists() and any(Path(x).exists() and Path(x).samefile(file) for x in inputs):
        raise CliError(f"--html {file} would replace what is read; give another file", code=2)


def write_page(text: str, file: str, console: Console) -> None:
    """Write a page, replacing a file of an earlier call.

    Raises
    ------
    CliError
        If it cannot be written.
    """
    console.step(f"writing {file}")
    try:
        Path(file).write_text(text, encoding="utf-8", errors="replace")
    except OSError as err:
        raise CliError(f"{file} cannot be written ({err.strerror})") from err
