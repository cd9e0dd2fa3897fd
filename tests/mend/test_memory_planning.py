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
