"""What the commands print, and the errors that they end with."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

from ..validation import json_text


class CliError(Exception):
    """A command cannot do what it was asked to.

    Parameters
    ----------
    message : str
        What was wrong, where, and what to do about it.
    code : int
        The exit code: 1, or 2 where the command line itself was wrong.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Console:
    """Progress on stderr, results on what was stdout when the command began.

    Parameters
    ----------
    quiet : bool
        Whether to leave out progress.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._out = sys.stdout
        self._start = time.perf_counter()

    def step(self, text: str) -> None:
        """Say what starts now, with the seconds since the command began."""
        if not self.quiet:
            elapsed = time.perf_counter() - self._start
            tell(f"[{elapsed:6.1f} s] {text}")

    def result(self, text: str = "") -> None:
        """Print a line, or several, of the result, whatever the encoding of stdout can write."""
        encoding = self._out.encoding or "utf-8"
        told = text.encode(encoding, "backslashreplace").decode(encoding)
        print(told, file=self._out, flush=True)

    def json(self, document: dict[str, Any]) -> None:
        """Print the one JSON document of a command that was called with ``--json``."""
        self.result(json_text(document))

    def warn(self, text: str) -> None:
        """Print a warning, also where progress is left out."""
        line = " ".join(text.split())
        tell(f"relax-fusion: warning: {line}")


def tell(line: str) -> None:
    """Print a line on stderr.  That nobody can read it is no reason to stop."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def table(rows: list[tuple[str, ...]]) -> str:
    """Align `rows` in columns, with a rule under the first."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (rows[0], rule, *rows[1:])
    )


def first_line(err: BaseException) -> str:
    """Condense an exception, which from TVM can carry pages of stack, to its first sentence."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    # TVM puts the failed check or the message first and its own frames after; a linker's words
    # stand under a heading.
    first = next((n for n, line in enumerate(lines) if not line.endswith(":")), 0)
    told = " ".join(lines[: first + 1])
    return f"{type(err).__name__}: {told[:300]}" if lines else type(err).__name__
