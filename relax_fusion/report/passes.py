"""What each pass of a compilation changed, as ``passes.json`` in the directory of a dump."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import PipelineError
from ..files import read_file
from ..validation import json_text, read_json, shown
from .text_changes import Hunk, Kind

PASSES = "passes.json"
FORMAT = 1
"""This version writes this format, and reads up to it."""


@dataclass(frozen=True)
class FunctionChange:
    """What a pass did to one function."""

    function: str
    """Its name in the module."""
    kind: Kind
    """A Relax function, a PrimFunc, or neither."""
    what: Literal["added", "changed", "removed"]
    """What was done."""
    before: int
    after: int
    """Lines of its text; 0 where there is none."""
    hunks: tuple[Hunk, ...] = ()
    """Where the text changed; of an added function the text itself, of a removed one nothing."""
    left_out: str = ""
    """What is missing in `hunks`, as a sentence."""


@dataclass(frozen=True)
class PassRecord:
    """One pass, and the module behind it."""

    name: str
    """As TVM knows the pass."""
    seconds: float
    """How long it ran."""
    graphs: int = 0
    kernels: int = 0
    """Relax functions and PrimFuncs of the module behind it."""
    lines: int = 0
    bindings: int = 0
    """Of their texts, and of the Relax functions."""
    changes: tuple[FunctionChange, ...] = ()
    """Functions that it added, changed and removed: graphs first, then by name."""


@dataclass(frozen=True)
class PhaseRecord:
    """One phase."""

    file: str
    """Where the module behind it is."""
    title: str
    """What the phase is doing."""
    seconds: float
    """How long its passes ran."""
    passes: tuple[PassRecord, ...] = ()
    """In their order; the last may be one that failed, with no change."""


@dataclass(frozen=True)
class DumpRecord:
    """What ``passes.json`` holds; `failed` names the pass that raised an error."""

    phases: tuple[PhaseRecord, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""
    format: int = FORMAT


def passes_text(record: DumpRecord) -> str:
    """Return what ``passes.json`` holds."""
    return json_text(record) + "\n"


def read_passes(directory: Path) -> DumpRecord:
    """Read ``passes.json`` of a directory.

    Raises `PipelineError` if there is no such file, or it is damaged, or a newer version wrote it.
    """
    path = directory / PASSES
    if not directory.is_dir():
        raise PipelineError(f"{directory} is no directory")
    if not path.exists():
        raise PipelineError(f"{directory} holds no {PASSES}: it is written by --debug-dump")
    try:
        text = read_file(path)
    except OSError as err:
        raise PipelineError(f"{path} cannot be read: {err.strerror}") from err
    _check_format(text, path)
    record: DumpRecord = read_json(DumpRecord, text, PipelineError, f"{path} is damaged", "ignore")
    return record


def _check_format(text: bytes, path: Path) -> None:
    """Refuse what is no record, or is of a format that is not known."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise PipelineError(f"{path} is damaged: it is no JSON") from err
    number = found.get("format") if isinstance(found, dict) else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise PipelineError(f"{path} is damaged: it names no format")
    if not 1 <= number <= FORMAT:
        raise PipelineError(
            f"{path} has the format {shown(number)}; this version reads up to {FORMAT}: "
            "use the version that wrote it"
        )
