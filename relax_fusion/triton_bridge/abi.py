"""How an argument of a Triton type is passed to machine code.

A named tuple is as many arguments as it has fields, which have names like ``"x.stride"``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import triton.language as tl

from ..errors import KernelError

_C_TYPES = {
    **{f"i{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
    "i1": "int8_t",
    "u1": "uint8_t",
    "fp32": "float",
    "fp64": "double",
}
_SIZES = {"tensor_map": 128, "void*": 8, "float": 4, "double": 8}


def c_type(kind: str) -> str:
    """Return the C type in which a launch passes an argument of Triton's type `kind`.

    Raises
    ------
    KernelError
        If there is none.
    """
    if kind.startswith("*"):
        return "void*"
    if kind not in _C_TYPES:
        raise KernelError(f"type {kind!r} cannot be passed at run time; use fp32 or an integer")
    return _C_TYPES[kind]


def tensor_map_rank(kind: str) -> int:
    """Return the rank of a type like ``tensordesc<fp16[64, 64]>``; a layout may follow the tile."""
    return kind[: kind.index("]")].count(",") + 1


def size_of(c: str) -> int:
    """Return the bytes of a C type of `c_type`, or of a tensor map."""
    return _SIZES[c] if c in _SIZES else int("".join(filter(str.isdigit, c))) // 8


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
