"""Buffers of PrimFuncs that TVM writes itself, which LLVM takes for overlapping."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import ir, tirx

from ..transforms.modules import functions_of, with_functions


@tvm.transform.module_pass(opt_level=0, name="AttachNoAlias")
@dataclass(frozen=True)
class AttachNoAlias:
    """Say of PrimFuncs with one buffer at most that their buffers do not overlap.

    TVM's own (shapes, scalars) do not say it.  In an LLVM module with one function that does not,
    TVM 0.27 lets all buffers of all functions overlap: sums then go to memory at every step, and
    matmuls take twice as long.

    rewrite: ``def shape_func(h)`` -> ``def shape_func(h): T.func_attr({"tirx.noalias": True})``
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with attributes."""
        updated = {
            gvar: func.with_attr("tirx.noalias", True)
            for gvar, func in functions_of(mod, tirx.PrimFunc).items()
            if sum(map(tirx.is_buffer_var, func.params)) <= 1
        }
        return with_functions(mod, updated)
