"""What kernels have to do without on some targets, whichever rule has scheduled them.

WebGPU has no third grid dimension; vectors of Metal, WebGPU and Vulkan have four elements at most.
"""

from __future__ import annotations

from tvm import ir, tirx

from ..matching.expressions import found_in, substitute, thread_tag
from ..tvm_ir import structural_map
from .modules import mapped, module_pass


@module_pass
class FoldGridDepth:
    """Do without ``blockIdx.z``, which TVM keeps for grids of more than 65535 blocks in a row.

    rewrite::

        for b in thread_binding(B, "blockIdx.z"):        ->    for f in (B * Y, "blockIdx.y"):
            for y in thread_binding(Y, "blockIdx.y"):              S(f // Y, f % Y)
                S(b, y)

    Where there is no ``blockIdx.y`` inside, it takes the loop as it is.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every scheduled PrimFunc of `mod`; one without such loops stays the same."""
        return mapped(mod, (tirx.For, _without_depth))


@module_pass
class NarrowVectors:
    """Cut vectors into parts of `most` elements or of their largest divisor below that.

    rewrite::

        for i in T.vectorized(8):        ->    for o in T.unroll(2):
            S(i)                                   for i in T.vectorized(4):
                                                       S(o * 4 + i)
    """

    most: int

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every scheduled PrimFunc of `mod`; one without such loops stays the same."""
        return mapped(mod, (tirx.For, self._narrow))

    def _narrow(self, loop: tirx.For) -> tirx.For:
        extent = loop.extent
        if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(extent, tirx.IntImm):
            return loop
        if extent.value <= self.most:
            return loop
        width = next(n for n in range(self.most, 0, -1) if extent.value % n == 0)
        dtype = str(loop.loop_var.ty.dtype)
        outer, inner = tirx.Var("o", dtype), tirx.Var("i", dtype)
        place = {loop.loop_var: outer * tirx.const(width, dtype) + inner}
        body = substitute(loop.body, place)
        zero, unrolled = tirx.const(0, dtype), tirx.ForKind.UNROLLED
        if width > 1:
            vector = tirx.ForKind.VECTORIZED
            body = tirx.For(inner, zero, tirx.const(width, dtype), vector, body)
        else:
            body = substitute(body, {inner: zero})
        return tirx.For(outer, zero, tirx.const(extent.value // width, dtype), unrolled, body)


def _without_depth(loop: tirx.For) -> tirx.For:
    if thread_tag(loop) != "blockIdx.z":
        return loop
    rows = [f for f in found_in(loop.body, tirx.For) if thread_tag(f) == "blockIdx.y"]
    if not rows:
        return _bound(loop.loop_var, loop.extent, loop.body)
    inner = rows[0]
    fused = tirx.Var("f", str(inner.loop_var.ty.dtype))
    places = {inner.loop_var: fused % inner.extent, loop.loop_var: fused // inner.extent}
    body = structural_map(
        loop.body, (tirx.For, lambda f: f.body if f.same_as(inner) else f), order="post"
    )
    return _bound(fused, loop.extent * inner.extent, substitute(body, places))


def _bound(var: tirx.Var, extent: tirx.Expr, body: tirx.Stmt) -> tirx.For:
    """Return the loop over ``blockIdx.y``."""
    dtype = str(var.ty.dtype)
    axis = tirx.IterVar(None, tirx.Var("blockIdx.y", dtype), tirx.IterVar.ThreadIndex, "blockIdx.y")
    zero = tirx.const(0, dtype)
    return tirx.For(var, zero, extent, tirx.ForKind.THREAD_BINDING, body, axis)
