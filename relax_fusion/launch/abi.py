"""How an argument of a Triton type is passed to machine code."""

from __future__ import annotations

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


def is_tensor_map(kind: str) -> bool:
    """Tell whether an argument is a tensor map."""
    return kind.startswith("tensordesc")


def tensor_map_rank(kind: str) -> int:
    """Return the rank of a type like ``tensordesc<fp16[64, 64]>``; a layout may follow the tile."""
    return kind[: kind.index("]")].count(",") + 1


def size_of(c: str) -> int:
    """Return the bytes of a C type of `c_type`, or of a tensor map."""
    return _SIZES[c] if c in _SIZES else int("".join(filter(str.isdigit, c))) // 8
