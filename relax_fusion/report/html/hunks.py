"""Places where texts differ, as a page shows them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ..text_changes import Hunk

_TAGS = {"+": "ins", "-": "del", " ": "span"}


def hunk_entry(hunk: Hunk) -> dict[str, Any]:
    """Return a place: its lines as elements, each of lines with the same sign."""
    runs = groupby(hunk.lines, key=lambda line: _TAGS.get(line[:1], "span"))
    return {
        "before": hunk.before,
        "after": hunk.after,
        "times": hunk.times,
        "runs": [(tag, "\n".join(lines)) for tag, lines in runs],
    }
