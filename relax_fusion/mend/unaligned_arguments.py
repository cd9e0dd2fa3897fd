"""Arguments at any address: code for a host reads them, and a GPU's kernels refuse some."""

from __future__ import annotations

from collections import defaultdict

import tvm
from tvm import ir, tirx
from tvm.target import Target

from ..hardware.target import is_cpu, is_cuda
from ..matching.expressions import found_in
from ..transforms.modules import functions_of, module_pass, with_functions
from ..tvm_ir import SBlock, SBlockRealize, TensorLoad, structural_map

ELEMENT = 1
"""Bytes of alignment that leave TVM nothing to assume but that of an element."""

WIDEST = 16
"""Bytes of the widest load and copy of a thread of a GPU."""


@module_pass
class UnalignedArguments:
    """Let no code assume that an argument begins at an aligned address, unless it is checked.

    TVM 0.27 takes for granted, and does not check, that every argument begins at a multiple of 64
    bytes.  The arrays of NumPy do at multiples of 16, a slice of a tensor of PyTorch anywhere.  On
    a host an aligned load of either ends the process; loads of both kinds take the same time where
    the address is aligned.  On a GPU, which has no others, it leaves a device that does nothing any
    more until the process ends.

    rewrite::

        def f(x: T.Buffer((n,))):                 ->  def f(x: T.Buffer((n,), align=1)):

        @T.prim_func  # for CUDA                  ->  @T.prim_func
        def f(x: T.Buffer((n,))):                     def f(x: T.Buffer((n,))):
            for i in T.vectorized(4): ... x[i]            assert x.data % 16 == 0
                                                          for i in T.vectorized(4): ... x[i]
    """

    target: Target  # of PrimFuncs that name none

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite all PrimFuncs, those of users among them."""
        functions = {}
        for gvar, func in functions_of(mod, tirx.PrimFunc).items():
            target = (func.attrs or {}).get("target", self.target)
            if is_cpu(target) or is_cuda(target):
                functions[gvar] = unaligned(func)
            if is_cuda(target):  # where the compiler knew better, it would leave out the check
                functions[gvar] = checked(functions[gvar], gvar.name_hint)
        return with_functions(mod, functions)


def unaligned(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose arguments, and windows of buffers, may begin anywhere."""
    blocks = found_in(func.body, SBlock)
    windows = [match.buffer for block in blocks for match in block.match_buffers]
    arguments = [p for p in func.params if tirx.is_buffer_var(p)]
    new = {v: _unaligned(v) for v in (*arguments, *windows) if v.ty.data_alignment > ELEMENT}
    return structural_map(func, (ir.Var, lambda var: new.get(var, var)))


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


def checked(func: tirx.PrimFunc, name: str) -> tirx.PrimFunc:
    """Return a function that refuses arguments which vectors cannot be loaded of."""
    widths = {b: n for b, n in _widths(func).items() if b in set(func.params) and n > 1}
    asserts = [_check(buffer, widths[buffer], name) for buffer in func.params if buffer in widths]
    if not asserts:
        return func
    if not isinstance(func.body, SBlockRealize):
        return func.with_body(tirx.SeqStmt([*asserts, func.body]))
    root = func.body.block
    body = tirx.SeqStmt([*asserts, root.body])
    new = SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        body,
        root.init,
        root.alloc_buffers,
        root.match_buffers,
        root.annotations,
    )
    return func.with_body(SBlockRealize([], True, new))


def _widths(func: tirx.PrimFunc) -> dict[tirx.Var, int]:
    """Return how many bytes of each buffer are loaded, stored or copied at once."""
    found: dict[tirx.Var, int] = defaultdict(int)

    def see(buffer: tirx.Var, lanes: int) -> None:
        size = lanes * tvm.DataType(str(buffer.ty.dtype)).itemsize
        power = 1 << (size.bit_length() - 1)
        if lanes > 1:
            found[buffer] = max(found[buffer], min(power, WIDEST))

    for loop in found_in(func.body, tirx.For):
        if loop.kind == tirx.ForKind.VECTORIZED and isinstance(loop.extent, tirx.IntImm):
            for load in found_in(loop.body, TensorLoad):
                see(load.source, int(loop.extent))
            for store in found_in(loop.body, tirx.BufferStore):
                see(store.buffer, int(loop.extent))
    for call in found_in(func.body, ir.Call):
        if call.op.same_as(_ADDRESS_OF):  # for copies
            see(call.args[0].source, WIDEST)
    for block in found_in(func.body, SBlock):
        for window in block.match_buffers:  # for instructions on matrices
            see(window.source.buffer, WIDEST)
    return found


_ADDRESS_OF = ir.Op.get("tirx.address_of")


def _check(buffer: tirx.Var, width: int, name: str) -> tirx.AssertStmt:
    """Return the assertion that a tensor begins at a multiple of some bytes, or is empty."""
    message = (
        f"{name}: argument {buffer.name} begins at an address that is no multiple of {width} "
        "bytes, which its kernel loads at once; pass a copy of the tensor"
    )
    low = tirx.call_llvm_pure_intrin(
        "handle", "llvm.ptrmask", buffer.data, tirx.const(width - 1, "int64")
    )
    aligned = tirx.isnullptr(low)
    # TVM 0.27 names the first two the other way round
    return tirx.AssertStmt(aligned, ir.StringImm("ValueError"), [ir.StringImm(message)])
