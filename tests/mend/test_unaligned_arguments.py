"""Code for a host takes arguments at any address: NumPy's, and slices of PyTorch's tensors."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_fusion
from relax_fusion.mend.unaligned_arguments import checked
from relax_fusion.mend.unaligned_arguments import unaligned as unaligned_function
from relax_fusion.workload.reference import numpy_dtype

from ..support.buffers import unaligned

LINES = """
@I.ir_module
class Module:
    @T.prim_func
    def twice(x: T.Buffer((4, 64), "{0}"), y: T.Buffer((4, 64), "{0}")):
        T.func_attr({{"tirx.is_scheduled": True}})
        for i in range(4):
            for j in T.vectorized(64):
                y[i, j] = x[i, j] + x[i, j]

    @R.function
    def main(x: R.Tensor((4, 64), "{0}"), w: R.Tensor(("n", 64), "{0}")):
        with R.dataflow():
            y = R.call_tir(Module.twice, (x,), out_ty=R.Tensor((4, 64), "{0}"))
            z = R.add(w, w)
            R.output(y, z)
        return y, z
"""


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "int8", "uint32", "int64"]
)
def test_at_any_address(dtype: str) -> None:
    """In kernels of the library's, and in PrimFuncs that users bring."""
    built = relax_fusion.build(tvm.script.from_source(LINES.format(dtype)), "llvm")
    run = relax.VirtualMachine(built, tvm.cpu())["main"]
    x = np.arange(256).reshape(4, 64) % 50
    x = x.astype(numpy_dtype(dtype))
    for offset in {1, 3, x.itemsize, 16, 32, 48}:
        for found in run(unaligned(x, offset), unaligned(x, offset)):
            np.testing.assert_array_equal(found.numpy(), x + x)


def test_a_check_of_addresses() -> None:
    """That of functions for CUDA, here of one for a host."""
    mod = tvm.script.from_source(LINES.format("float32"))
    func = checked(unaligned_function(mod["twice"]), "twice").with_attr("global_symbol", "twice")
    run = tvm.compile(func, "llvm")["twice"]
    x, y = np.ones((4, 64), "float32"), np.zeros((4, 64), "float32")
    for offset in (0, 16, 48):
        run(unaligned(x, offset), result := unaligned(y, 0))
        np.testing.assert_array_equal(result.numpy(), x + x)
    for offset in (1, 4, 8):
        for name, at in (("x", (offset, 0)), ("y", (0, offset))):
            message = f"twice: argument {name} begins at an address that is no multiple of 16 bytes"
            with pytest.raises(ValueError, match=message):
                run(unaligned(x, at[0]), unaligned(y, at[1]))
