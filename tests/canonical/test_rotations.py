"""FuseNormRotation: heads that are normalised, moved and rotated."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import ir, relax

import relax_fusion
from relax_fusion.canonical import FuseNormRotation, MoveTransposes

from ..support.quick import machine, quick_host, quickly
from .common import assert_same_numbers, module, operators

ROTATION = """
h1 = R.strided_slice(t, (3,), (4,), (8,))
h0 = R.strided_slice(t, (3,), (0,), (4,))
m = R.negative(h1)
r = R.concat((m, h0), axis=-1)
a = R.multiply(t, c)
d = R.multiply(r, e)
y = R.add(a, d)
"""

NEIGHBOURS = """
h1 = R.strided_slice(t, (3,), (1,), (8,), (2,))
h0 = R.strided_slice(t, (3,), (0,), (8,), (2,))
m1 = R.negative(h1)
m2 = R.expand_dims(m1, axis=[4])
m3 = R.expand_dims(h0, axis=[4])
m4 = R.concat((m2, m3), axis=-1)
r = R.reshape(m4, R.shape([b, s, 2, 8]))
a = R.multiply(t, c)
d = R.multiply(r, e)
y = R.add(a, d)
"""


def heads(angles: str, movement: str, dtype: str = "float32", plus: bool = False) -> ir.IRModule:
    """Return a module with heads that are normalised, moved and rotated."""
    params = (
        f"x: R.Tensor(('b', 's', 2, 8), '{dtype}'), g: R.Tensor((8,), '{dtype}'), "
        f"c: R.Tensor({angles}, '{dtype}'), e: R.Tensor({angles}, '{dtype}')"
    )
    gamma = f'k = R.add(g, R.const(1, "{dtype}"))' if plus else "k = g"
    norm = f"{gamma}\nn = R.nn.rms_norm(x, k, axes=[-1], epsilon=1e-5)\n"
    return module(params, norm + movement + ROTATION)


@pytest.mark.parametrize("angles", ["('s', 1, 8)", "('b', 's', 2, 8)", "(8,)", "(1, 's', 1, 8)"])
@pytest.mark.parametrize("plus", [False, True])
def test_fused(angles: str, plus: bool) -> None:
    before = heads(angles, "t = n", plus=plus)
    after = FuseNormRotation()(before)
    assert operators(after) == ["call_tir"]
    assert_same_numbers(before, after, rtol=1e-6)  # the mean is of float32


@pytest.mark.parametrize(
    "angles, axes",
    [("(1, 1, 's', 8)", [0, 2, 1, 3]), ("('s', 8)", [0, 2, 1, 3]), ("('b', 8)", [1, 2, 0, 3])],
)
def test_transposed_heads(angles: str, axes: list[int]) -> None:
    before = heads(angles, f"t = R.permute_dims(n, axes={axes})")
    after = FuseNormRotation()(MoveTransposes()(before))
    assert [o for o in operators(after) if o != "reshape"] == ["call_tir", "permute_dims"]
    assert_same_numbers(before, after, rtol=1e-6)


@pytest.mark.parametrize("angles", ["('s', 1, 8)", "('b', 's', 2, 8)", "(8,)", "(1, 1, 's', 8)"])
def test_a_norm_of_all_heads_together(angles: str) -> None:
    moved = angles == "(1, 1, 's', 8)"
    before = module(
        "x: R.Tensor(('b', 's', 16), 'float32'), g: R.Tensor((16,), 'float32'), "
        f"c: R.Tensor({angles}, 'float32'), e: R.Tensor({angles}, 'float32')",
        "n = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
        f"{'v' if moved else 't'} = R.reshape(n, R.shape([b, s, 2, 8]))\n"
        + "t = R.permute_dims(v, axes=[0, 2, 1, 3])\n" * moved
        + ROTATION,
    )
    after = FuseNormRotation()(MoveTransposes()(before))
    moves = ["reshape"] + ["permute_dims"] * moved
    assert [o for o in operators(after) if o != "expand_dims"][-len(moves) :] == moves
    assert "call_tir" in operators(after) and "nn.rms_norm" not in operators(after)
    assert_same_numbers(before, after, rtol=1e-6)


@pytest.mark.parametrize("rows", ["[b, s * 2, 8]", "[b * s, 2, 8]"])
def test_heads_that_are_rows_too(rows: str) -> None:
    before = module(
        "x: R.Tensor(('b', 's', 16), 'float32'), g: R.Tensor((16,), 'float32'), "
        "c: R.Tensor((8,), 'float32'), e: R.Tensor((8,), 'float32')",
        "n = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
        f"t = R.reshape(n, R.shape({rows}))\n" + ROTATION.replace("(3,)", "(2,)"),
    )
    assert FuseNormRotation()(before).same_as(before)


def test_neighbours() -> None:
    params = (
        "x: R.Tensor(('b', 's', 2, 8), 'float32'), g: R.Tensor((8,), 'float32'), "
        "c: R.Tensor(('s', 1, 8), 'float32'), e: R.Tensor(('s', 1, 8), 'float32')"
    )
    norm = "t = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
    before = module(params, norm + NEIGHBOURS)
    after = FuseNormRotation()(before)
    assert operators(after) == ["call_tir"]
    assert_same_numbers(before, after, rtol=1e-6)


def test_something_in_between() -> None:
    before = heads("('s', 1, 8)", "t = R.tanh(n)")
    assert FuseNormRotation()(before).same_as(before)


def test_kernels_of_float32_are_none_for_float64() -> None:
    before = heads("('s', 1, 8)", "t = n", "float64")
    assert FuseNormRotation()(before).same_as(before)


WIDENED_NORM = """
x32 = R.astype(x, "float32")
g32 = R.astype(g, "float32")
g1 = R.add(g32, R.const(1, "float32"))
n = R.nn.rms_norm(x32, g1, axes=[-1], epsilon=1e-5)
t = R.astype(n, "float16")
"""
WIDENED_ROTATION = """
n = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)
t = R.reshape(n, R.shape([b, s, 2, 8]))
h1 = R.strided_slice(t, (3,), (4,), (8,))
h0 = R.strided_slice(t, (3,), (0,), (4,))
m = R.negative(h1)
r = R.concat((m, h0), axis=-1)
t32 = R.astype(t, "float32")
r32 = R.astype(r, "float32")
a = R.multiply(t32, c)
d = R.multiply(r32, e)
y32 = R.add(a, d)
y = R.astype(y32, "float16")
"""
CASTS = {
    "norm": ("'b', 's', 2, 8", 8, "float16", WIDENED_NORM + ROTATION),
    "rotation": ("'b', 's', 16", 16, "float32", WIDENED_ROTATION),
}


@pytest.mark.parametrize("case", CASTS)
def test_casts_around_norm_and_rotation(case: str) -> None:
    rows, width, angles, body = CASTS[case]
    before = module(
        f"x: R.Tensor(({rows}), 'float16'), g: R.Tensor(({width},), 'float16'), "
        f"c: R.Tensor(('s', 1, 8), '{angles}'), e: R.Tensor(('s', 1, 8), '{angles}')",
        body,
    )
    after = FuseNormRotation()(before)
    assert [o for o in operators(after) if o != "reshape"] == ["call_tir"]
    assert_same_numbers(before, after, rtol=2e-3)


def test_rows_that_are_widened_again_are_rounded() -> None:
    """As the graph rounds them (R7), where no rotation turns them."""
    before = module(
        "x: R.Tensor(('b', 's', 16), 'float16'), g: R.Tensor((16,), 'float16'), "
        "c: R.Tensor(('s', 1, 8), 'float32'), e: R.Tensor(('s', 1, 8), 'float32')",
        WIDENED_ROTATION,
    )
    target = quick_host()
    vm = machine(quickly(before, relax.get_pipeline("relax_fusion", target=target), target))
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal(shape).astype("float16") for shape in ((2, 32, 16), (16,)))
    angles = [np.full((32, 1, 8), value, "float32") for value in (3, 0)]
    got = vm["main"](*map(tvm.runtime.tensor, (x, g, *angles))).numpy()
    wide = x.astype("float64")
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * g
    want = (3 * normed.astype("float16").astype("float64")).astype("float16")
    assert (want.reshape(got.shape) != got).mean() < 0.02  # a third, where they are not rounded


def test_a_wide_result_has_no_kernel_of_narrow_rows() -> None:
    before = module(
        "x: R.Tensor(('b', 's', 16), 'float16'), g: R.Tensor((16,), 'float16'), "
        "c: R.Tensor(('s', 1, 8), 'float32'), e: R.Tensor(('s', 1, 8), 'float32')",
        WIDENED_ROTATION.replace('R.astype(y32, "float16")', "R.exp(y32)"),
    )
    assert FuseNormRotation()(before).same_as(before)


def test_angles_that_broadcast_the_heads() -> None:
    before = module(
        "x: R.Tensor((1, 's', 2, 8), 'float32'), g: R.Tensor((8,), 'float32'), "
        "c: R.Tensor(('b', 's', 1, 8), 'float32'), e: R.Tensor(('b', 's', 1, 8), 'float32')",
        "t = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n" + ROTATION,
    )
    assert FuseNormRotation()(before).same_as(before)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scheduled_by_the_rule_of_norms(dtype: str) -> None:
    mod = heads("(1, 1, 's', 8)", "t = R.permute_dims(n, axes=[0, 2, 1, 3])", dtype)
    report = relax_fusion.Report()
    target = quick_host()
    pipeline = relax.get_pipeline("relax_fusion", target=target, report=report)
    vm = machine(quickly(mod, pipeline, target))
    (rule,) = {s.rule for s in report.schedules if "rotation" in s.function}
    assert rule == "NormRule"
    rng = np.random.default_rng(1)
    arrays = [
        rng.standard_normal(s).astype(dtype) for s in ((2, 3, 2, 8), (8,), *[(1, 1, 3, 8)] * 2)
    ]
    x, g, c, e = (a.astype("float64") for a in arrays)
    n = (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g).transpose(0, 2, 1, 3)
    want = n * c + np.concatenate([-n[..., 4:], n[..., :4]], -1) * e
    got = vm["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    step = np.finfo(dtype).eps
    np.testing.assert_allclose(got, want, rtol=step, atol=4 * step)
