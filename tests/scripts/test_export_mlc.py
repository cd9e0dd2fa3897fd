"""Modules that `scripts/export_mlc.py` writes as text are read again."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import ir, relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from ..support import mlc_models


@I.ir_module
class Narrow:
    """Two functions that call sizes of 32 and of 64 bits alike."""

    @T.prim_func(private=True, s_tir=True)
    def negative(x: T.Buffer(("n",), "float32"), y: T.Buffer(("n",), "float32")):
        n = T.int32()
        for i in range(n):
            with T.sblock("y"):
                v = T.axis.spatial(n, i)
                y[v] = -x[v]

    @R.function
    def main(x: R.Tensor(("n",), "float32")) -> R.Tensor(("n",), "float32"):
        n = T.int64()
        cls = Narrow
        with R.dataflow():
            y = R.call_tir(cls.negative, (x,), out_ty=R.Tensor((n,), "float32"))
            R.output(y)
        return y

    @R.function
    def other(x: R.Tensor(("n",), "float32")) -> R.Tensor(("n",), "float32"):
        return x


def with_constant(value: float) -> ir.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4], "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            const = relax.const(np.full(4, value, "float16"))
            result = builder.emit_output(builder.emit(relax.op.add(x, const)))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("mod", [mlc_models.only(Narrow, "main"), with_constant(0.0)])
def test_a_text_gives_its_module_back(mod: ir.IRModule) -> None:
    again = mlc_models.parse(mlc_models.printed(mod))
    assert tvm_ffi.structural_equal(again, mod)


def test_constants_that_are_no_zeros_are_refused() -> None:
    with pytest.raises(ValueError, match="no zeros of one shape"):
        mlc_models.printed(with_constant(1.0))
