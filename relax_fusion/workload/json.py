"""Workloads as JSON: how a PrimFunc carries what it computes."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..errors import LoweringError
from ..validation import read_json, shown
from . import Attention, GatedFFN, MatmulChain, NormMatmul, Workload

WORKLOAD_ATTR = "relax_fusion.workload"
"""The PrimFunc attribute that carries a `Workload`, as `to_json` writes it."""

_TYPES = {t.__name__: t for t in (NormMatmul, GatedFFN, MatmulChain, Attention)}


def to_json(work: Workload) -> str:
    """Return `work` as JSON with its type under ``"type"``, the form of a PrimFunc attribute."""
    return json.dumps({"type": type(work).__name__, **asdict(work)})


def from_json(text: str) -> Workload:
    """Rebuild a workload from `to_json`.

    Raises
    ------
    LoweringError
        If `text` is no such JSON.
    """
    try:
        values = json.loads(text)
        kind = _TYPES[values.pop("type")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        known = ", ".join(_TYPES)
        raise LoweringError(f"workload is {shown(text)}; must be JSON of {known}") from err
    return read_json(kind, json.dumps(values), LoweringError, kind.__name__, unknown="forbid")
