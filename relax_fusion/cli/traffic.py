"""The file in which ``run --record`` counts sizes, and ``workloads --record`` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from ..files import locked, read_file, write_file
from ..models.recording import Recorder
from ..validation import Count, Natural, read_json, shown
from .console import CliError

_EXACT = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Met:
    """Values of a function's symbolic sizes, and how often it was called with them."""

    __pydantic_config__: ClassVar[ConfigDict] = _EXACT

    sizes: dict[str, Natural]
    calls: Count


@dataclass(frozen=True)
class Traffic:
    """The calls of the functions of one model.

    Parameters
    ----------
    source : str
        Name of the model.
    functions : dict of str to tuple of Met
        By function.
    format : int
        Version of this record.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _EXACT

    source: str
    functions: Annotated[dict[str, tuple[Met, ...]], Field()]
    format: Literal[1] = 1

    def plus(self, other: Traffic) -> Traffic:
        """Return the calls of both."""
        functions = {}
        for name in dict.fromkeys([*self.functions, *other.functions]):
            calls: dict[tuple[tuple[str, int], ...], int] = {}
            for met in (*self.functions.get(name, ()), *other.functions.get(name, ())):
                key = tuple(sorted(met.sizes.items()))
                calls[key] = calls.get(key, 0) + met.calls
            functions[name] = tuple(Met(dict(key), n) for key, n in sorted(calls.items()))
        return Traffic(self.source, functions)


def read_traffic(file: Path) -> Traffic:
    """Read what was counted.

    Raises
    ------
    CliError
        If the file is missing, or is none of these.
    """
    try:
        text = read_file(file)
    except OSError as err:
        raise CliError(f"{file} cannot be read: {err.strerror}", code=2) from err
    try:
        return read_json(Traffic, text, ValueError, f"{file} was not written by `run --record`")
    except ValueError as err:
        raise CliError(str(err), code=2) from None


def check_record(file: str | None, source: str) -> None:
    """Refuse, before anything is run, a file that calls cannot be added to.

    Raises
    ------
    CliError
        If it is of another model or no such file, or its directory is missing.
    """
    if file is None:
        return
    path = Path(file)
    if not path.parent.is_dir():
        raise CliError(f"--record {file}: {path.parent} is no directory", code=2)
    _counted(path, source)


def _counted(path: Path, source: str) -> Traffic | None:
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return None
    found = read_traffic(path)
    if found.source != source:
        raise CliError(
            f"{path} has the sizes of {shown(found.source)}, this is {shown(source)}; give another "
            "--record",
            code=2,
        )
    return found


def write_traffic(file: str, source: str, recorder: Recorder) -> Traffic:
    """Add what a run counted to a file, and return all of it; other runs may add to it as well.

    Raises
    ------
    CliError
        If it cannot be written, or has become one of another model.
    """
    counted: Mapping[str, list[Any]] = recorder.to_record()
    functions = {
        name: tuple(Met(each["sizes"], each["calls"]) for each in met)
        for name, met in counted.items()
    }
    traffic, path = Traffic(source, functions), Path(file)
    try:
        with locked(path):
            before = _counted(path, source)
            if before is not None:
                traffic = before.plus(traffic)
            write_file(path, json.dumps(asdict(traffic), indent=2) + "\n")
    except OSError as err:
        raise CliError(f"--record {file} cannot be written ({err.strerror})") from err
    return traffic
