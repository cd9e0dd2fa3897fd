"""Buffers of PrimFuncs that TVM writes itself, which LLVM takes for overlapping."""

from __future__ import annotations

from tvm import ir, tirx

from ..transforms.modules import functions_of, module_pass, with_functions


@module_pass
class AttachNoAlias:
    """Say of PrimFuncs with one buffer at most that their buffers do not overlap.

    TVM's own (shapes, scalars) do not say it.  In an LLVM module with one function that does not,
    TVM 0.27 lets all buffers of all functions overlap: sums then go to memory at every step, and
    matmuls take twice as long.

    rewrite: ``def shape_func(h)`` -> ``def shape_func(h): T.func_attr({"tirx.noalias": True})``
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with attributes."""
        updated = {
            gvar: func.with_attr("tirx.noalias", True)
            for gvar, func in functions_of(mod, tirx.PrimFunc).items()
            if sum(map(tirx.is_buffer_var, func.params)) <= 1
        }
        return with_functions(mod, updated)
