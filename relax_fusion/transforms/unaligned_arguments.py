"""UnalignedArguments: code for the host reads arguments at any address."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.target import Target

from ..hardware.target import is_cpu
from ..matching.expressions import found_in
from .modules import functions_of, with_functions

ELEMENT = 1
"""Bytes of alignment that leave TVM nothing to assume but that of an element."""


@tvm.transform.module_pass(opt_level=0, name="UnalignedArguments")
@dataclass(frozen=True)
class UnalignedArguments:
    """Let no code for a host assume that an argument begins at an aligned address.

    TVM 0.27 takes for granted, and does not check, that every argument begins at a multiple of 64
    bytes.  The arrays of NumPy do at multiples of 16, a slice of a tensor of PyTorch anywhere, and
    an aligned load of either ends the process.  Loads of both kinds take the same time where the
    address is aligned.

    rewrite: ``def f(x: T.Buffer((n,)))`` -> ``def f(x: T.Buffer((n,), align=1))``

    Parameters
    ----------
    target : Target
        Of PrimFuncs that name none.
    """

    target: Target

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite the PrimFuncs for a host, those of users among them."""
        functions = {
            gvar: unaligned(func)
            for gvar, func in functions_of(mod, tirx.PrimFunc).items()
            if is_cpu((func.attrs or {}).get("target", self.target))
        }
        return with_functions(mod, functions)


def unaligned(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose arguments, and windows of buffers, may begin anywhere."""
    blocks = found_in(func.body, s_tir.SBlock)
    windows = [match.buffer for block in blocks for match in block.match_buffers]
    arguments = [p for p in func.params if tirx.is_buffer_var(p)]
    new = {v: _unaligned(v) for v in (*arguments, *windows) if v.ty.data_alignment > ELEMENT}
    return tvm_ffi.structural_map(func, (ir.Var, lambda var: new.get(var, var)))


def _unaligned(var: tirx.Var) -> tirx.Var:
    ty = var.ty
    return tirx.decl_buffer(
        ty.shape,
        str(ty.dtype),
        var.name,
        strides=ty.strides,
        elem_offset=ty.elem_offset,
        scope=ty.storage_scope,
        data_alignment=ELEMENT,
        offset_factor=ty.offset_factor,
        layout=ty.layout,
    )
