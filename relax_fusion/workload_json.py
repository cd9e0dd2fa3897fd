"""Workloads as JSON: how a PrimFunc carries what it computes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from .workload import (
    Attention,
    DynamicDim,
    GatedFFN,
    MatmulChain,
    Norm,
    NormMatmul,
    Projection,
    Rope,
    Workload,
)

WORKLOAD_ATTR = "relax_fusion.workload"
"""The PrimFunc attribute that carries a `Workload`, as `to_json` writes it."""

_TYPES = {t.__name__: t for t in (NormMatmul, GatedFFN, MatmulChain, Attention)}
_TUPLES = ("bias_dims", "mask_dims", "layouts", "inner", "outer")


def to_json(work: Workload) -> str:
    """Return `work` as JSON with its type under ``"type"``, the form of a PrimFunc attribute."""
    return json.dumps({"type": type(work).__name__, **asdict(work)})


def from_json(text: str) -> Workload:
    """Rebuild a workload from `to_json`.

    Raises
    ------
    KeyError, TypeError, ValueError
        If `text` is no such JSON.
    """
    values = json.loads(text)
    kind = values.pop("type")
    return _TYPES[kind](**{name: _rebuilt(name, value) for name, value in values.items()})


def _rebuilt(name: str, value: Any) -> Any:
    """Turn a JSON value back into what the field `name` holds."""
    if name == "norm" and value is not None:
        return Norm(**value)
    if name == "outputs":
        return tuple(_rebuilt_projection(p) for p in value)
    if name in _TUPLES and value is not None:
        return tuple(value)
    return DynamicDim(**value) if isinstance(value, dict) else value


def _rebuilt_projection(value: dict[str, Any]) -> Projection:
    """Turn the JSON of a projection back into one."""
    rope = value["rope"]
    if rope is not None:
        rope = Rope(**{name: _rebuilt(name, v) for name, v in rope.items()})
    return Projection(**{**value, "epilogue": tuple(value["epilogue"]), "rope": rope})
