"""Functions whose sizes and numbers only the run knows become kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion.pipeline import relax_fusion_pipeline

from ..support.quick import machine, quick_host, quickly

N, M = 3, 2
INPUTS = 'x: R.Tensor(("k", 4), "float32"), sizes: R.Shape(["n", "m"])'
X = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")


def sliced(begin: str, end: str, inbound: bool = False) -> str:
    bounds = f"(0,), ({begin},), ({end},), (1,), assume_inbound={inbound}"
    return f"R.exp(R.multiply(R.strided_slice(x, {bounds}), R.const(2.0)))"


def counted(begin: str, end: str) -> str:
    return f'R.exp(R.astype(R.arange({begin}, {end}, 1, "int64"), "float32"))'


CASES = {
    "slice": (sliced("m", "m + n"), np.exp(2 * X[M : M + N])),
    "slice_from_the_end": (sliced("k - n", "k"), np.exp(2 * X[-N:])),
    "slice_of_parts": (
        f"R.exp(R.split({sliced('m', 'm + n')}, 2, axis=1)[1])",
        np.exp(np.exp(2 * X[M : M + N, 2:])),
    ),
    "slice_inside": (sliced("m", "m + n", True), np.exp(2 * X[M : M + N])),
    "matmul": (
        f"R.nn.silu(R.matmul({sliced('k - n', 'k')}, R.ones((4, 4), 'float32')))",
        np.repeat(np.exp(2 * X[-N:]).sum(1, keepdims=True), 4, 1),
    ),
    "positions": (counted("m", "m + n"), np.exp(np.arange(M, M + N))),
    "positions_by_two": (
        f"R.add(R.expand_dims({counted('m', 'm + n')}, 1), {counted('n', 'n + m')})",
        np.exp(np.arange(M, M + N))[:, None] + np.exp(np.arange(N, N + M)),
    ),
}


def module() -> tvm.IRModule:
    text = "@I.ir_module\nclass Module:\n"
    for name, (value, _) in CASES.items():
        text += f"    @R.function\n    def {name}({INPUTS}):\n"
        text += "        n, m, k = T.int64(), T.int64(), T.int64()\n        with R.dataflow():\n"
        text += f"            y = {value}\n            R.output(y)\n        return y\n"
    return tvm.script.from_source(text)


@pytest.fixture(scope="module")
def vm() -> relax.VirtualMachine:
    return machine(quickly(module(), relax_fusion_pipeline(quick_host())))


@pytest.mark.parametrize("name", CASES)
def test_sizes_and_numbers_of_the_run(name: str, vm: relax.VirtualMachine) -> None:
    made = vm[name](tvm.runtime.tensor(X), tvm.runtime.ShapeTuple([N, M])).numpy()
    expected = CASES[name][1]
    if name == "matmul":
        expected = expected / (1 + np.exp(-expected))
    np.testing.assert_allclose(made, expected, 1e-5)
