"""Named tuples as parameters of kernels: as many arguments as they have fields.

A field has a name like ``"x.stride"``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import triton.language as tl


def fields(name: str, value: Any) -> dict[str, Any]:
    """Return the fields of a named tuple, or any other value under its own name."""
    if not hasattr(value, "_fields"):
        return {name: value}
    return {f"{name}.{field}": each for field, each in zip(value._fields, value, strict=True)}


def nested(types: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return Triton's type of every parameter, and where in them each of `types` is."""
    parameters: dict[str, dict[str, str]] = {}
    position: dict[str, tuple[int, ...]] = {}
    for name, kind in types.items():
        parameter, _, field = name.partition(".")
        inside = parameters.setdefault(parameter, {})
        index = len(parameters) - 1
        position[name] = (index, len(inside)) if field else (index,)
        inside[field] = kind
    return {
        name: inside[""] if "" in inside else namedtuple(name, inside)(**inside)
        for name, inside in parameters.items()
    }, position


def constant(value: Any) -> Any:
    """Return a constant for a kernel, in which each field of a named tuple is one too."""
    return type(value)(*map(tl.constexpr, value)) if hasattr(value, "_fields") else value
