"""Tuples as parameters of kernels: as many arguments as they have fields.

A field has a name like ``"x.stride"``, or ``"x.operands.0"`` in a tuple without names.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import triton.language as tl


def fields(name: str, value: Any) -> dict[str, Any]:
    """Return the fields of a tuple and of those in it, or any other value under its own name."""
    if not isinstance(value, tuple):
        return {name: value}
    names = getattr(value, "_fields", range(len(value)))
    found: dict[str, Any] = {}
    for field, each in zip(names, value, strict=True):
        found |= fields(f"{name}.{field}", each)
    return found


def nested(types: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return Triton's type of every parameter, and where in them each of `types` is."""
    tree: dict[str, Any] = {}
    position: dict[str, tuple[int, ...]] = {}
    for name, kind in types.items():
        *outer, last = name.split(".")
        inside, place = tree, []
        for part in outer:
            inside.setdefault(part, {})
            place.append(list(inside).index(part))
            inside = inside[part]
        inside[last] = kind
        position[name] = (*place, len(inside) - 1)
    return {name: _tuple(name, kind) for name, kind in tree.items()}, position


def _tuple(name: str, kind: Any) -> Any:
    """Return the types of a parameter as the tuple that it is, with names if it has them."""
    if not isinstance(kind, dict):
        return kind
    inside = [_tuple(field, each) for field, each in kind.items()]
    return tuple(inside) if "0" in kind else namedtuple(name, list(kind))(*inside)


def constant(value: Any) -> Any:
    """Return a constant for a kernel, in which each field of a named tuple is one too."""
    return type(value)(*map(tl.constexpr, value)) if hasattr(value, "_fields") else value
