"""Matmuls of 8-bit floats as matmuls of float16, of which they are a part."""

from __future__ import annotations

from tvm import ir, relax
from tvm.target import Target

from ..hardware.target import device_of
from ..matching.pattern import is_call
from ..matching.shapes import dtype_of
from ..transforms.modules import module_pass
from .rewriter import Rewriter, canonicalise

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
"""Each of their numbers is one of float16."""


@module_pass
class WidenFloat8Products:
    """Multiply 8-bit floats as float16, where the device has tensor cores for that.

    rewrite::

        a = R.astype(x, "float8_e4m3fn")
        y = R.matmul(a, w, out_dtype="float32")
            ->
        a = R.astype(R.astype(x, "float8_e4m3fn"), "float16")
        y = R.matmul(a, R.astype(w, "float16"), out_dtype="float32")

    Numbers are the same: sums are float32, of products that are exact.  The kernel that rounds x
    stores float16, and w is read as it is stored, by `FuseDequantize`.

    declines when:
        the device has no tensor cores of float16, as CPUs; the left operand is not made by a cast,
        so that widening it would take a kernel of its own; the result is of 8 bits.

    Parameters
    ----------
    target : Target
        What the module is compiled for.
    """

    target: Target

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        if not device_of(self.target).tensor_flops_per_s("float16"):
            return mod
        return canonicalise(mod, {"relax.matmul": _widened})


def _widened(rewriter: Rewriter, value: relax.Call | relax.TupleGetItem) -> relax.Expr | None:
    assert isinstance(value, relax.Call)
    x, w = value.args
    if dtype_of(x) not in FLOAT8 or dtype_of(w) not in FLOAT8 or dtype_of(value) in FLOAT8:
        return None
    if not is_call(rewriter.definition(x), "relax.astype"):
        return None
    wide = [rewriter.emit(relax.op.astype(operand, "float16")) for operand in (x, w)]
    return relax.op.matmul(*wide, out_dtype=dtype_of(value))
