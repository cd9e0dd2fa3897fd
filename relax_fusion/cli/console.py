"""What the commands print, and the errors that they end with."""

from __future__ import annotations

import codecs
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..validation import json_text, printable

BUSY = 0.5
"""The load average for each processor from which on a machine is called busy."""


class CliError(Exception):
    """A command cannot do what it was asked to.

    `message`: what was wrong, where, and what to do about it.
    `code`: the exit code: 1, or 2 where the command line itself was wrong.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Console:
    """Progress on stderr, unless it is quiet, results on what was stdout when the command began."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._out = sys.stdout
        self._start = time.perf_counter()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Print as warnings, in a context, what modules warn of and what ours log."""
        logger = logging.getLogger(__name__.partition(".")[0])
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warn(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: self.warn(str(message))
                yield
        finally:
            logger.removeHandler(handler)

    def step(self, text: str) -> None:
        """Say what starts now, with the seconds since the command began."""
        if not self.quiet:
            elapsed = time.perf_counter() - self._start
            tell(f"[{elapsed:6.1f} s] {' '.join(text.split())}")

    def result(self, text: str = "") -> None:
        """Print a line, or several, of the result, whatever the encoding of stdout can write."""
        encoding = self._out.encoding or "utf-8"
        told = printable(text).encode(encoding, "relax_fusion.json").decode(encoding)
        print(told, file=self._out, flush=True)

    def json(self, document: dict[str, Any]) -> None:
        """Print the one JSON document of a command that was called with ``--json``."""
        self.result(json_text(document))

    def warn(self, text: str) -> None:
        """Print a warning, also where progress is left out."""
        line = " ".join(text.split())
        tell(f"relax-fusion: warning: {line}")

    def load(self) -> float:
        """Return the load average; warn, before times are measured, where it is that of others."""
        load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if load > BUSY * processors:
            self.warn(
                f"the machine is busy: its load average is {load:.1f}, and it has {processors} "
                "processors; times will be longer than they need to be, and differ"
            )
        return load


def tell(line: str) -> None:
    """Print a line on stderr.  That nobody can read it is no reason to stop."""
    with suppress(OSError):
        print(printable(line), file=sys.stderr, flush=True)


def _as_in_json(err: UnicodeError) -> tuple[str, int]:
    """Write characters that an encoding lacks as JSON does, for they may stand in JSON."""
    assert isinstance(err, UnicodeEncodeError)
    return json.dumps(err.object[err.start : err.end])[1:-1], err.end


codecs.register_error("relax_fusion.json", _as_in_json)


FOREIGN_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""TVM raises one of these errors for every failed check of its C++ side."""


def first_line(err: BaseException) -> str:
    """Condense an exception, which from TVM can carry pages of stack, to its first sentence."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    # TVM puts the failed check or the message first and its own frames after; a linker's words
    # stand under a heading.
    first = next((n for n, line in enumerate(lines) if not line.endswith(":")), 0)
    told = " ".join(lines[: first + 1])
    return f"{type(err).__name__}: {told[:300]}" if lines else type(err).__name__
