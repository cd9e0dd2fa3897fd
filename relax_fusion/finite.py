"""Infinite constants, for targets that cannot write them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import ir, tirx


@tvm.transform.module_pass(opt_level=0, name="FiniteConstants")
@dataclass(frozen=True)
class FiniteConstants:
    """Put the largest number of its type in the place of every infinite constant.

    rewrite: ``T.Select(m, s, T.float32("-inf"))`` -> ``T.Select(m, s, T.float32(-3.4028235e38))``

    For a mask or the start of a maximum the two are the same, unless a score is as large itself.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without infinities stays the same object."""
        mod = mod.clone()
        for gvar, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                body = tvm_ffi.structural_map(func.body, (tirx.FloatImm, _finite))
                mod.update_func(gvar, func if body.same_as(func.body) else func.with_body(body))
        return mod


def _finite(number: tirx.FloatImm) -> tirx.FloatImm:
    if not math.isinf(number.value):
        return number
    largest = tirx.max_value(str(number.ty.dtype)).value
    return tirx.FloatImm(str(number.ty.dtype), math.copysign(largest, number.value))
