"""The module behind each phase, written for people to read."""

from __future__ import annotations

from pathlib import Path

from tvm import ir

from ..errors import PipelineError


def dump(mod: ir.IRModule, path: Path) -> None:
    """Write a module as TVMScript, constants left out, making the directory if needed.

    Raises
    ------
    PipelineError
        If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(mod.script(show_meta=False) + "\n", encoding="utf-8")
    except OSError as err:
        raise PipelineError(f"debug_dump: {path} cannot be written ({err.strerror})") from err
