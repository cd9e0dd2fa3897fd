"""Files that commands write: pages, and where options such as ``--html FILE`` say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from ..files import write_file
from ..transforms.debug_dump import REPORT
from .console import CliError, Console
from .manifest import LIBRARY, MANIFEST, PARAMS, TOKENIZER

_READ = (MANIFEST, REPORT, LIBRARY, PARAMS, TOKENIZER, "config.json")
"""What compiled directories and models have, beside checkpoints."""

_CHECKPOINTS = (".safetensors", ".safetensors.index.json")


def check_written(
    files: Mapping[str, str | None], *inputs: str | None, stdout: Collection[str] = ()
) -> None:
    """Refuse, before anything is done, what cannot become a file, and what the command reads.

    Parameters
    ----------
    files : mapping of str to str
        By option, the file that is to be written; None where none is.
    *inputs : str, optional
        Files and directories that the command reads.
    stdout : collection of str
        Options that take ``-``.

    Raises
    ------
    CliError
        If a file is a directory, or in none; if it is one of `inputs`, or of their files, which it
        would replace; if it is that of another option.
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
    """Write a page, or a table, replacing a file of an earlier call.

    Raises
    ------
    CliError
        If it cannot be written.
    """
    console.step(f"writing {file}")
    try:
        write_file(Path(file), text)
    except OSError as err:
        raise CliError(f"{file} cannot be written ({err.strerror})") from err
