"""Workloads as JSON: how a PrimFunc carries what it computes."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from ..errors import GraphError, LoweringError
from ..validation import read_json, shown
from . import Attention, Chain, DynamicDim, ExpertMatmul, GatedFFN, NormMatmul, Workload
from .formats import Packed
from .graph import Band, Block, Graph, Slot, Tensor
from .values import At, Axis, AxisValue, Const, Op, Read, Size

WORKLOAD_ATTR = "relax_fusion.workload"
"""The PrimFunc attribute that carries a `Workload`, as `to_json` writes it."""

_TYPES = {t.__name__: t for t in (NormMatmul, GatedFFN, Attention, ExpertMatmul, Chain)}

_PARTS = (Graph, Tensor, Packed, Block, Band, Slot, At, Axis, DynamicDim)
_VALUES = (Read, AxisValue, Size, Const, Op)


def to_json(work: Workload) -> str:
    """Return `work` as JSON with its type under ``"type"``, the form of a PrimFunc attribute."""
    return json.dumps({"type": type(work).__name__, **as_record(work)})


def as_record(work: Workload) -> dict[str, Any]:
    """Return the fields of `work` in lists, dictionaries and what JSON has."""
    return {"statements": _encoded(work.statements)} if isinstance(work, Chain) else asdict(work)


def from_json(text: str) -> Workload:
    """Rebuild a workload from `to_json`; raise `LoweringError` if `text` is no such JSON."""
    try:
        values = json.loads(text)
        kind = _TYPES[values.pop("type")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        known = ", ".join(_TYPES)
        raise LoweringError(f"workload is {shown(text)}; must be JSON of {known}") from err
    if kind is Chain:
        return Chain(_graph(values))
    return read_json(kind, json.dumps(values), LoweringError, kind.__name__)


def _encoded(part: Any) -> Any:
    """Return a part of a block graph: its kind, which its fields tell, is left out."""
    if is_dataclass(part):
        return {f.name: _encoded(getattr(part, f.name)) for f in fields(part) if f.init}
    return list(map(_encoded, part)) if isinstance(part, tuple) else part


_BY_FIELDS = {frozenset(f.name for f in fields(t) if f.init): t for t in (*_PARTS, *_VALUES)}


def _graph(values: Any) -> Graph:
    """Return the block graph of a chain."""
    try:
        graph = _decoded(values["statements"])
    except (GraphError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as err:
        raise LoweringError(f"Chain: statements are no block graph ({err})") from err
    if not isinstance(graph, Graph) or len(values) > 1:
        raise LoweringError(f"Chain: {shown(values)}; must have statements, a block graph")
    return graph


def _decoded(part: Any) -> Any:
    if isinstance(part, dict):
        return _BY_FIELDS[frozenset(part)](**{name: _decoded(v) for name, v in part.items()})
    return tuple(map(_decoded, part)) if isinstance(part, list) else part
