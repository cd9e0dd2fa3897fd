"""Into which operators PyTorch writes a model out before it is translated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..frontends.promotion import DECOMPOSED

_aten = torch.ops.aten

_WHOLE = (_aten.silu.default, _aten.gelu.default, _aten.native_layer_norm.default)
"""Operators that our patterns know as they are."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return how operators are written out: those that TVM's importer knows are what is left."""
    table = {**torch.export.default_decompositions(), **DECOMPOSED}
    return {op: how for op, how in table.items() if op not in _WHOLE}
