"""Constants that compilers for GPUs refuse, as TVM writes them: infinite, or beyond float32."""

from __future__ import annotations

import math
from ctypes import c_float

from tvm import ir, tirx

from ..transforms.modules import mapped, module_pass


@module_pass
class FiniteConstants:
    """Put the largest number of its type in the place of every infinite constant.

    rewrite: ``T.Select(m, s, T.float32("-inf"))`` -> ``T.Select(m, s, T.float32(-3.4028235e38))``

    For a mask or the start of a maximum the two are the same, unless a score is as large itself.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without infinities stays the same object."""
        return mapped(mod, (tirx.FloatImm, _finite))


@module_pass
class RoundConstants:
    """Round constants of 32 bits and fewer to float32.

    rewrite: ``T.float32(1e-50)`` -> ``T.float32(0)``

    TVM keeps them as float64, and writes them down as they are.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one of float32's numbers stays the same object."""
        return mapped(mod, (tirx.FloatImm, _rounded))


def _finite(number: tirx.FloatImm) -> tirx.FloatImm:
    if not math.isinf(number.value):
        return number
    dtype = str(number.ty.dtype)
    return tirx.FloatImm(dtype, math.copysign(tirx.max_value(dtype).value, number.value))


def _rounded(number: tirx.FloatImm) -> tirx.FloatImm:
    value = c_float(number.value).value
    dtype = str(number.ty.dtype)
    same = value == number.value or math.isnan(value) or dtype == "float64"
    return number if same else tirx.FloatImm(dtype, value)
