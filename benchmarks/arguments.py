"""Arguments of campaigns that run for hours: what is wrong with them is said at the beginning."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Return a reader of integers from `least` on."""

    def integer(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer from {least} on")
        return number

    return integer


def minutes(text: str) -> float:
    """Read a time."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:  # NaN is not, either
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes")
    return number


def results_file(text: str) -> Path:
    """Read the name of a file that results can be written to, Markdown beside it."""
    path = Path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"{text!r} must end in .json; Markdown is written beside")
    folder = next(p for p in path.absolute().parents if p.exists())
    for place in (path, path.with_suffix(".md")):
        if place.exists() and not (place.is_file() and os.access(place, os.W_OK)):
            raise argparse.ArgumentTypeError(f"{place} is no file that can be written")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {folder} takes no files")
    return path
