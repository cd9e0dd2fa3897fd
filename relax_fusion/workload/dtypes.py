"""The element types that workloads may have."""

from __future__ import annotations

import re

FLOAT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one element, for the floating-point dtypes a workload may have."""

INTEGER_DTYPES = ("int8", "uint8")
"""Integer dtypes whose products a workload may add up, exactly, as int32."""

DTYPE_BYTES = {**FLOAT_BYTES, **dict.fromkeys(INTEGER_DTYPES, 1), "int32": 4}
"""Bytes of one element, for the dtypes a workload may have."""

STORED_BYTES = {
    **DTYPE_BYTES,
    **dict.fromkeys(("bool", "float8_e4m3fn", "float8_e5m2"), 1),
    "uint16": 2,
    "uint32": 4,
    "int64": 8,
}
"""Bytes of one element of what a kernel is handed: masks and packed words too."""


_PRINTED = re.compile(r"[a-z]+(\d+)(?:_[a-z0-9]+)?(?:x(\d+))?")
"""How TVM prints a dtype: ``uint64``, ``float8_e5m2``, ``float16x4``."""


def stored_bytes(dtype: str) -> int:
    """Return the bytes of one element of any dtype of TVM, also one that no workload may have."""
    found = _PRINTED.fullmatch(dtype)
    if dtype in STORED_BYTES or found is None:
        return STORED_BYTES.get(dtype, 1)
    return (int(found[1]) * int(found[2] or 1) + 7) // 8


def accumulator(dtype: str) -> str:
    """Return the dtype in which products of `dtype` are summed."""
    return "int32" if dtype in INTEGER_DTYPES else "float32"


def step_dtype(dtype: str) -> str:
    """Return the dtype of what is added or multiplied behind a matmul of `dtype`.

    What follows sums of integers (scales, biases) is float32.
    """
    return "float32" if dtype in INTEGER_DTYPES else dtype
