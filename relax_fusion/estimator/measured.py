"""Measured times of plans, as `choose` looks them up; `Database` reads them from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..workload import Workload
from ..workload.json import to_json
from .shape import AttentionSize, Size
from .tile_plan import TilePlan

Times = Mapping[Size, Mapping[TilePlan, float]]
"""Seconds of plans, by the size at which they were measured."""


@dataclass(frozen=True)
class Measured:
    """What was measured on one device, by kernels of these versions.

    Two are equal if they were made of the same measurements.

    Parameters
    ----------
    digest : str
        Of the measurements.
    times : mapping of str to Times
        By workload, as `workload_key` writes it.
    """

    digest: str
    times: Mapping[str, Times] = field(compare=False, repr=False)

    def of(self, work: Workload) -> Times:
        """Return the times of plans of `work`; none where nothing was measured."""
        return self.times.get(workload_key(json.loads(to_json(work))), {})


def workload_key(fields: Mapping[str, Any]) -> str:
    """Return a text that is the same for workloads of the same kernels.

    How a module calls its dynamic dimensions, and how large they may become, makes no difference.

    Parameters
    ----------
    fields : mapping
        A workload as JSON.
    """
    names: dict[str, str] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"name", "upper"}:
            return {"dim": names.setdefault(value["name"], str(len(names)))}
        if isinstance(value, dict):
            return {name: plain(value[name]) for name in sorted(value)}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return json.dumps(plain(dict(fields)))


def size_to_json(size: Size) -> int | dict[str, int]:
    """Return a size as a file has it: rows, or the sizes of an attention by name."""
    return size if isinstance(size, int) else size._asdict()


def size_from_json(size: int | Mapping[str, int]) -> Size | None:
    """Return what `size_to_json` was given; None if it is no such size."""
    if isinstance(size, int):
        return size
    if set(size) != set(AttentionSize._fields):
        return None
    return AttentionSize(**size)
