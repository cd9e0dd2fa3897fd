"""Rolls as two slices that are joined, and norms behind the rows that they move."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_fusion import Report
from relax_fusion.canonical import MendImports, MoveNorms
from relax_fusion.pipeline import relax_fusion_pipeline

from ..support.quick import machine, quick_host, quickly
from .common import assert_same_numbers, drawn, module, operators

X = "x: R.Tensor((2, 8, 6), 'float32')"
ROLL = """
n{0} = R.arange(0, 8, 1, dtype='int64')
a{0} = R.add(n{0}, R.const({1}, 'int64'))
i{0} = R.mod(a{0}, R.const(8, 'int64'))
r{0} = R.take({2}, i{0}, axis=1, mode='fast')
""".replace("'", '"')

TAKEN = {
    "a roll": (ROLL.format(0, 3, "x") + "y = R.negative(r0)", 2),
    "by nothing": (ROLL.format(0, 0, "x") + "y = R.negative(r0)", 1),
    "neighbours": ("y = R.take(x, R.const([2, 3, 4], 'int32'), axis=-1)".replace("'", '"'), 1),
}


@pytest.mark.parametrize("name", TAKEN)
def test_neighbours_by_number_are_slices(name: str) -> None:
    body, slices = TAKEN[name]
    before = module(X, body, "")
    after = MendImports()(before)
    found = operators(after)
    assert "take" not in found and found.count("strided_slice") == slices
    assert_same_numbers(before, after)


@pytest.mark.parametrize("numbers", ["[0, 2, 1]", "[6, 7, 8]", "[[0], [1]]"])
def test_other_numbers_stay(numbers: str) -> None:
    body = f'y = R.take(x, R.const({numbers}, "int32"), axis=1, mode="clip")'
    before = module(X, body, "")
    assert MendImports()(before).same_as(before)


WINDOWS = """
v = R.reshape(r0, R.shape([2, 2, 4, 6]))
p = R.permute_dims(v, axes=[0, 2, 1, 3])
m = R.matmul(p, w)
"""
NORM = "l = R.nn.layer_norm(x, g, c, axes=[-1])\n"
PARAMS = f"{X}, " + ", ".join(
    f"{name}: R.Tensor({shape}, 'float32')"
    for name, shape in (("g", "(6,)"), ("c", "(6,)"), ("w", "(6, 5)"))
)


def test_a_norm_is_behind_what_moves_its_rows() -> None:
    before = MendImports()(
        module(PARAMS, f"{NORM}{ROLL.format(0, 3, 'l')}{WINDOWS}y = R.abs(m)", "")
    )
    after = MoveNorms()(before)
    order = ["concat", "reshape", "permute_dims", "nn.layer_norm", "matmul", "abs"]
    assert operators(after)[-6:] == order
    assert_same_numbers(before, after)
    assert MoveNorms()(after).same_as(after)


STAYS = {
    "read by others": f"{NORM}t = R.permute_dims(l, axes=[1, 0, 2])\n"
    "m = R.matmul(t, w)\ny = R.add(R.sum(l), m)",
    "no row stays whole": f"{NORM}t = R.permute_dims(l, axes=[0, 2, 1])\ny = R.matmul(t, u)",
    "no projection reads it": f"{NORM}t = R.permute_dims(l, axes=[1, 0, 2])\ny = R.abs(t)",
    "nothing is moved": f"{NORM}t = R.reshape(l, R.shape([4, 4, 6]))\ny = R.matmul(t, w)",
    "no shape is known": "l = R.nn.layer_norm(o, g, c, axes=[-1])\n"
    "t = R.permute_dims(l, axes=[1, 0, 2])\ny = R.matmul(t, w)",
}


@pytest.mark.parametrize("name", STAYS)
def test_other_norms_stay(name: str) -> None:
    more = "u: R.Tensor((8, 3), 'float32'), o: R.Tensor(ndim=3, dtype='float32')"
    before = module(f"{PARAMS}, {more}", STAYS[name], "")
    assert MoveNorms()(before).same_as(before)


def test_a_roll_of_windows_is_two_launches() -> None:
    back = "q = R.permute_dims(m, axes=[0, 2, 1, 3])\nu = R.reshape(q, R.shape([2, 8, 6]))\n"
    body = f"{NORM}{ROLL.format(0, 3, 'l')}{WINDOWS}{back}{ROLL.format(1, 5, 'u')}y = R.add(x, r1)"
    mod, report = module(PARAMS.replace("(6, 5)", "(6, 6)"), body, ""), Report()
    arrays = {name: value.astype("float32") for name, value in drawn(mod, {}).items()}
    pipeline = relax_fusion_pipeline(quick_host(), report=report, always_fuse=True)
    got = machine(quickly(mod, pipeline))["main"](*map(tvm.runtime.tensor, arrays.values()))
    x, g, c, w = (value.astype("float64") for value in arrays.values())
    normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + c
    np.testing.assert_allclose(got.numpy(), x + normed @ w, rtol=1e-5, atol=1e-5)
    (coverage,) = report.coverage
    assert len(coverage.launches.kernels) == 2
