"""Elements of packed tensors, as kernels compute them: rounded once, whatever the format has."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import te

from relax_fusion import make_target
from relax_fusion.compute.packed import unpacked
from relax_fusion.mend.narrow_floats import RoundNarrowFloats
from relax_fusion.workload import Packed
from relax_fusion.workload.unpacked import decoded

from ..support.quantised import numpy_dtype
from ..support.quick import loaded, quickly

SHAPE = (4, 16)
FORMS = {
    "numbers of 16 bits": Packed(16, 8, 65000, "uint16"),
    "zeros of 16 bits": Packed(16, 8, None, "uint16"),
    "a zero that is no bfloat16": Packed(8, 8, 301, "uint8"),
    "a difference that is no bfloat16": Packed(8, 8, -4, "uint8"),
    "scales of another type": Packed(4, 8, 7, scale_dtype="bfloat16"),
    "numbers of a byte": Packed(8, 8, 127, "uint8"),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FORMS)
def test_elements_are_rounded_once(name: str, dtype: str) -> None:
    form, rng = FORMS[name], np.random.default_rng(2)
    operands = form.operands("w", SHAPE)
    stored = []
    for operand in operands:
        kind = numpy_dtype(operand.dtype)
        if operand.dtype.startswith("uint"):
            most = np.iinfo(kind).max
            stored.append(rng.integers(most - 99, most, operand.shape, kind, endpoint=True))
        else:
            stored.append((1 + rng.random(operand.shape)).astype(kind) / kind.type(128))
    given = [te.placeholder(o.shape, o.dtype, o.name) for o in operands]
    out = te.compute(SHAPE, lambda *at: unpacked(form, given, at, dtype), "out")
    func = te.create_prim_func([*given, out]).with_attr("global_symbol", "main")
    mod = RoundNarrowFloats(make_target("llvm"))(tvm.IRModule({"main": func}))
    got = tvm.runtime.empty(SHAPE, dtype)
    loaded(quickly(mod["main"]))["main"](*map(tvm.runtime.tensor, stored), got)
    wanted = decoded(form, stored, SHAPE)
    step = float(ml_dtypes.finfo(dtype).eps) / 2 * 1.01
    np.testing.assert_allclose(got.numpy().astype("float64"), wanted, rtol=step)
