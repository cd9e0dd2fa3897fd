"""Chains with packed weights on a GPU: numbers of every format, at rows of every family."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from ..passes.test_packed_weights import READ, dtypes, expected, ffn, inputs
from ..support.gpu import gpu_target, needs_gpu
from ..support.quantised import numpy_dtype

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture(scope="module")
def machines() -> dict[str, relax.VirtualMachine]:
    return {}


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 130])
@pytest.mark.parametrize("name", READ)
def test_numbers(machines: dict[str, relax.VirtualMachine], name: str, rows: int) -> None:
    device = tvm.cuda(0)
    if name not in machines:
        mod = ffn(name, tirx.Var("n", "int64"))
        options = {"target": gpu_target(), "always_fuse": True}
        pipeline = relax.get_pipeline("relax_fusion", **options)
        built = tvm.compile(mod, gpu_target(), relax_pipeline=pipeline)
        machines[name] = relax.VirtualMachine(built, device)
    pairs = zip(inputs(name, rows), dtypes(name), strict=True)
    arrays = [a.astype(numpy_dtype(dtype)) for a, dtype in pairs]
    (out,) = machines[name]["main"](*(tvm.runtime.tensor(a, device) for a in arrays))
    out, wanted = out.numpy(), expected(name, arrays)
    error = np.abs(out.astype("float64") - wanted).max() / np.abs(wanted).max()
    assert error < 4 * float(ml_dtypes.finfo(out.dtype).eps) + 1e-5
