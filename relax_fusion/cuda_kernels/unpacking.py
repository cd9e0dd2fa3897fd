"""How fields of packed weights become numbers, as constants of ``packed.cu``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..workload import Packed
from ..workload.reference import numpy_dtype


def numbers_of(packed: Packed, dtype: str) -> dict[str, int]:
    """Return how fields become numbers, as `packed.cu` has it."""
    zero, flipped = packed.zero or 0, 0
    if packed.number == "int8":  # as unsigned ones
        zero, flipped = zero + 0x80, 0x80
    group = {"GROUP": max(packed.group, 0)}
    if packed.bits == 8 and dtype == "bfloat16":
        none = {"FACTOR": 0, "OFFSET": 0}
        return {**group, "FIELDS": 0xFF00FF, "LARGE": _twice(flipped), **none, "ZERO": zero}
    large = 1024 if dtype == "float16" else 128
    step = 16 if (packed.bits, dtype) == (4, "float16") else 1  # of the higher half
    kind: Any = numpy_dtype(dtype)

    def pair(low: float, high: float) -> int:
        return int(np.array([low, high], kind).view("uint32")[0])

    return {
        **group,
        "FIELDS": {(4, 16): 0xF0000F, (4, 1): 0xF000F, (8, 1): 0xFF00FF}[packed.bits, step],
        "LARGE": pair(large, large) ^ _twice(flipped),
        "FACTOR": pair(1, 1 / step),
        "OFFSET": pair(-large - zero, -large / step - zero),
        "ZERO": zero,
    }


def _twice(bits: int) -> int:
    return bits << 16 | bits
