"""Roundings that a kernel has to keep: made coarse on both sides, one that is missing is seen.

Which they are is told by :mod:`..matching.roundings`; kernels keep those of `Tensor.rounds`.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..matching.roundings import kept_roundings
from ..workload import Chain
from .interpreter import Hook, Value
from .operators import Array
from .region import Region

BITS = 4
"""Of mantissa that a coarse number has."""


def coarse(values: Array) -> Array:
    """Round to `BITS` bits of mantissa."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2**BITS) / 2**BITS, exponent)


def coarse_bindings(region: Region) -> Hook:
    """Return what rounds the bindings of a region that its kernel has to round."""
    work = region.match.workload
    between = isinstance(work, Chain) or work.is_adapted
    kept = kept_roundings(region.values, between)

    def rounded(var: relax.Var, value: Value) -> Value:
        return coarse(value) if var in kept else value

    return rounded
