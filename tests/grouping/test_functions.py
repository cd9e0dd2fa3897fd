"""Functions whose sizes only the run knows, or that read parts of tuples, become kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion import PipelineOptions
from relax_fusion.matching.pattern import is_call
from relax_fusion.pipeline import phase1_fuse, phase2_lower, relax_fusion_pipeline

from ..support.chains import HEADER
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


SIZED = """
    @R.function
    def unread(x: R.Tensor(("k", 4), "float32"), shape: R.Shape(ndim=2)):
        n, k = T.int64(), T.int64()
        with R.dataflow():
            c = R.match_cast(shape, R.Shape([n, 4]))
            r = R.reshape(x, R.shape([n, 4]))
            y = R.nn.relu(R.matmul(r, R.ones((4, 4), "float32")))
            R.output(y)
        return y

    @R.function
    def behind(x: R.Tensor(("k", 4), "float32"), shape: R.Shape(ndim=2)):
        n, k = T.int64(), T.int64()
        with R.dataflow():
            a = R.exp(x)
            c = R.match_cast(shape, R.Shape([n, 4]))
            r = R.reshape(x, R.shape([n, 4]))
            y = R.multiply(a, R.sum(r, axis=[0]))
            R.output(y)
        return y

    @R.function
    def between(x: R.Tensor(("k", 4), "float32"), shape: R.Shape(ndim=2)):
        n, k = T.int64(), T.int64()
        with R.dataflow():
            p = R.matmul(x, R.ones((4, 4), "float32"))
            c = R.match_cast(shape, R.Shape([n, 4]))
            q = R.matmul(x, R.ones((4, 4), "float32"))
            r = R.reshape(R.add(p, q), R.shape([n, 4]))
            y = R.add(r, R.matmul(R.nn.silu(r), R.ones((4, 4), "float32")))
            R.output(y)
        return y
"""
ONES = np.ones((4, 4), "float32")
SUMS = 2 * X @ ONES
MADE = {
    "unread": np.maximum(X @ ONES, 0),
    "behind": np.exp(X) * X.sum(0),
    "between": SUMS + (SUMS / (1 + np.exp(-SUMS))) @ ONES,
}


def test_kernels_stand_behind_the_match_cast_that_binds_their_sizes() -> None:
    mod = tvm.script.from_source(HEADER + SIZED)
    made = machine(quickly(mod, relax_fusion_pipeline(quick_host())))
    for name, expected in MADE.items():
        found = made[name](tvm.runtime.tensor(X), tvm.runtime.ShapeTuple([6, 4]))
        np.testing.assert_allclose(found.numpy(), expected, 1e-5, 1e-5)


# FuseOps, which goes through them in the order of their addresses, confuses nine for sure
@pytest.mark.parametrize("count", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_one_kernel_reads_items_of_many_tuples(count: int) -> None:
    matrix, numbers = "R.Tensor((4, {}), 'float32')", range(count)
    tuples = [
        f"p{i}: R.Tuple({matrix.format(2 * i + 1)}, {matrix.format(2 * i + 2)})" for i in numbers
    ]
    items = ", ".join(f"p{i}[0], R.negative(p{i}[1])" for i in numbers)
    text = f"""
    @R.function
    def main({", ".join(tuples)}):
        with R.dataflow():
            y = R.exp(R.concat([{items}], axis=1))
            R.output(y)
        return y
"""
    mod = tvm.script.from_source(HEADER + text)
    made = machine(quickly(mod, relax_fusion_pipeline(quick_host())))
    rng = np.random.default_rng(1)
    parts = [
        [rng.standard_normal((4, 2 * i + n)).astype("float32") for n in (1, 2)] for i in numbers
    ]
    given = [tuple(map(tvm.runtime.tensor, pair)) for pair in parts]
    joined = np.concatenate([part for a, b in parts for part in (a, -b)], axis=1)
    np.testing.assert_allclose(made["main"](*given).numpy(), np.exp(joined), 1e-5)


@pytest.mark.parametrize("value", ["R.matmul(x, q[0])", "R.cumsum(q[0], axis=0)", "R.add(x, q[0])"])
def test_kernels_read_parts_of_nested_tuples(value: str) -> None:
    matrix = 'R.Tensor((8, 8), "float32")'
    text = f"""
    @R.function
    def main(x: {matrix}, p: R.Tuple({matrix}, R.Tuple({matrix}, {matrix}))):
        with R.dataflow():
            q = p[1]
            y = {value}
            R.output(y)
        return y
"""
    mod, options = tvm.script.from_source(HEADER + text), PipelineOptions(quick_host())
    with options.target:
        for step in (*phase1_fuse(options), *phase2_lower(options)):
            mod = step(mod)
    functions = [g.name_hint for g, f in mod.functions_items() if isinstance(f, relax.Function)]
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    assert functions == ["main"] and is_call(values[-1], "relax.call_tir")
