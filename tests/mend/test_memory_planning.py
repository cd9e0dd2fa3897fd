"""Functions whose memory TVM's planner would share wrongly."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from ..support.quick import machine, quickly

BRANCHES = """
@I.ir_module
class Module:
    @R.function
    def norm(c: R.Tensor((), "bool"), x: R.Tensor((4, 32), "float32"),
             g: R.Tensor((32,), "float32"), w: R.Tensor((32, 32), "float32")):
        if c:
            h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)
            y = R.matmul(h, w)
        else:
            h1 = R.nn.relu(x)
            y = R.matmul(h1, w)
        z = R.nn.relu(y)
        return z

    @R.function
    def nested(c: R.Tensor((), "bool"), x: R.Tensor((4, 32), "float32"),
               g: R.Tensor((32,), "float32"), w: R.Tensor((32, 32), "float32")):
        d = R.logical_not(c)
        a = R.matmul(x, w)
        if c:
            b = R.exp(a)
            e = R.matmul(R.tanh(b), w)
            y = R.add(e, a)
        else:
            f = R.sigmoid(a)
            if d:
                y1 = R.matmul(R.cos(f), w)
            else:
                y1 = R.matmul(R.sin(f), w)
            y = R.multiply(R.matmul(y1, w), a)
        z = R.matmul(R.tanh(y), w)
        return z

    @R.function
    def straight(x: R.Tensor((4, 32), "float32"), w: R.Tensor((32, 32), "float32")):
        a = R.matmul(R.tanh(R.matmul(R.tanh(R.matmul(x, w)), w)), w)
        return a
"""


@pytest.fixture(scope="module")
def vm() -> relax.VirtualMachine:
    pipeline = relax.get_pipeline("relax_fusion", target="llvm")
    mod = tvm.script.from_source(BRANCHES)
    return machine(quickly(mod, pipeline))


def norm(c: bool, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) if c else np.maximum(x, 0)
    return np.maximum(h @ w, 0)


def nested(c: bool, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    a = x @ w
    y = np.tanh(np.exp(a)) @ w + a if c else np.cos(1 / (1 + np.exp(-a))) @ w @ w * a
    return np.tanh(y) @ w


@pytest.mark.parametrize("expected", [norm, nested])
def test_branches_in_any_order(vm: relax.VirtualMachine, expected) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((4, 32), "float32"), rng.standard_normal((32, 32), "float32") / 6
    given = [tvm.runtime.tensor(v) for v in (x, np.ones(32, "float32"), w)]
    for c in (False, True, False, False, True):
        got = vm[expected.__name__](tvm.runtime.tensor(np.array(c)), *given).numpy()
        np.testing.assert_allclose(got, expected(c, x, w), rtol=1e-4, atol=1e-5)


ENDS = """
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("b", "s", 8), "float32")):
        with R.dataflow():
            a = R.sigmoid(x)
            y = R.strided_slice(a, [1], [0], [END])
            z = R.nn.softmax(R.matmul(y, R.permute_dims(y, [0, 2, 1])))
            halves = R.split(z, 2, axis=2)
            w = R.strided_slice(halves[0], [1, 2], [0, 1], [END, END])
            R.output(z, w)
        return (z, w)
"""


@pytest.mark.parametrize("end", [3, 2**31 - 1, 2**40, 2**62, 2**63 - 1])
def test_ends_of_slices_behind_all_that_there_may_be(end: int) -> None:
    """Sizes are the smaller one of two, of which one times the other sizes is beyond int64."""
    mod = tvm.script.from_source(ENDS.replace("END", str(end)))
    vm = machine(quickly(mod, relax.get_pipeline("relax_fusion", target="llvm")))
    x = np.random.default_rng(1).standard_normal((2, 5, 8), "float32")
    y = 1 / (1 + np.exp(-x[:, :end]))
    scores = np.exp(y @ y.transpose(0, 2, 1))
    wanted = scores / scores.sum(-1, keepdims=True)
    z, w = (part.numpy() for part in vm["main"](tvm.runtime.tensor(x)))
    np.testing.assert_allclose(z, wanted, rtol=1e-4)
    np.testing.assert_allclose(w, wanted[:, :end, 1 : -(-min(end, 5) // 2)], rtol=1e-4)
