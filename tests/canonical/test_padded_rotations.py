"""PadRotations: what a rotation leaves out turns by no angle; pairs stay neighbours for scores."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_fusion import Report
from relax_fusion.canonical import PadRotations
from relax_fusion.pipeline import relax_fusion_pipeline

from ..support.quick import machine, quick_host, quickly
from .common import assert_same_numbers, drawn, module, operators

HALVES = """
{0}u = R.strided_slice({0}, (3,), (4,), (8,), assume_inbound=True)
{0}l = R.strided_slice({0}, (3,), (0,), (4,), assume_inbound=True)
{0}m = R.negative({0}u)
{0}j = R.concat(({0}m, {0}l), axis=3)
{0}c = R.multiply({0}, cos)
{0}s = R.multiply({0}j, sin)
{0}r = R.add({0}c, {0}s)
"""
"""Of eight features, by halves, with an angle for each."""

APART = """
{0}e = R.strided_slice({0}, (3,), (0,), (8,), (2,), assume_inbound=True)
{0}o = R.strided_slice({0}, (3,), (1,), (8,), (2,), assume_inbound=True)
{0}a = R.multiply({0}e, cos)
{0}b = R.multiply({0}o, sin)
{0}l = R.subtract({0}a, {0}b)
{0}c = R.multiply({0}o, cos)
{0}s = R.multiply({0}e, sin)
{0}h = R.add({0}c, {0}s)
"""
TO_HALVES = f"{APART}{{0}}r = R.concat(({{0}}l, {{0}}h), axis=3)\n"
TO_NEIGHBOURS = f"""{APART}
{{0}}p = R.expand_dims({{0}}l, axis=[4])
{{0}}q = R.expand_dims({{0}}h, axis=[4])
{{0}}t = R.concat(({{0}}p, {{0}}q), axis=4)
{{0}}r = R.reshape({{0}}t, R.shape([{{1}}, 8]))
"""
"""Of four pairs of neighbours, with an angle for each."""

REORDERED = """
{0}1 = R.reshape({0}, R.shape([{1}, 4, 2]))
{0}2 = R.permute_dims({0}1, axes=[0, 1, 2, 4, 3])
{0}h = R.reshape({0}2, R.shape([{1}, 8]))
"""
X = "x: R.Tensor((2, 5, 3, 8), 'float32')"
ANGLES = "cos: R.Tensor({0}, 'float32'), sin: R.Tensor({0}, 'float32')"


def cut(at: int, axis: int) -> str:
    """Return x in two parts, `f` and `g`."""
    return f"p = R.split(x, indices_or_sections=[{at}], axis={axis})\nf = p[0]\ng = p[1]\n"


PADDED = {
    "the first row": (
        f"{X}, {ANGLES.format('(4, 1, 8)')}",
        f"{cut(1, 1)}{HALVES.format('g')}y = R.concat((f, gr), axis=1)",
    ),
    "the last rows": (
        f"{X}, {ANGLES.format('(1, 3, 1, 8)')}",
        f"{cut(3, 1)}{HALVES.format('f')}y = R.concat((fr, g), axis=1)",
    ),
    "behind a transpose, one angle for all rows": (
        f"{X}, {ANGLES.format('(8,)')}",
        f"{cut(2, 1)}t = R.permute_dims(f, axes=[0, 2, 1, 3])\n"
        "z = R.permute_dims(g, axes=[0, 2, 1, 3])\n"
        f"{HALVES.format('z')}y = R.concat((t, zr), axis=2)",
    ),
    "neighbours of a head": (
        f"x: R.Tensor((2, 5, 3, 14), 'float32'), {ANGLES.format('(5, 1, 4)')}",
        f"{cut(6, 3)}{TO_NEIGHBOURS.format('g', '2, 5, 3')}y = R.concat((f, gr), axis=3)",
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_all_is_rotated(name: str) -> None:
    params, body = PADDED[name]
    before = module(params, body, "")
    after = PadRotations()(before)
    assert operators(after).count("full") == 2
    assert "split" not in operators(after)
    assert_same_numbers(before, after)
    assert PadRotations()(after).same_as(after)


LEFT = {
    "halves of a head": (
        f"x: R.Tensor((2, 5, 3, 14), 'float32'), {ANGLES.format('(5, 1, 8)')}",
        f"{cut(6, 3)}{HALVES.format('g')}y = R.concat((f, gr), axis=3)",
    ),
    "rows of another tensor": (
        f"{X}, {ANGLES.format('(4, 1, 8)')}, z: R.Tensor((2, 1, 3, 8), 'float32')",
        f"{cut(1, 1)}{HALVES.format('g')}y = R.concat((z, gr), axis=1)",
    ),
    "in another order": (
        f"{X}, {ANGLES.format('(4, 1, 8)')}",
        f"{cut(1, 1)}{HALVES.format('g')}y = R.concat((gr, f), axis=1)",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left(name: str) -> None:
    params, body = LEFT[name]
    before = module(params, body, "")
    assert PadRotations()(before).same_as(before)


Q, K = "q: R.Tensor((2, 3, 5, 8), 'float32')", "k: R.Tensor((2, 1, 5, 8), 'float32')"
MORE = "n: R.Tensor((2, 3, 5, 2), 'float32'), v: R.Tensor((2, 3, 5, 2), 'float32')"
SCORES = """
w = R.broadcast_to(kr, R.shape([2, 3, 5, 8]))
d = R.concat((n, qr), axis=3)
e = R.concat((v, w), axis=3)
f = R.multiply(d, R.const(0.5, 'float32'))
t = R.permute_dims(e, axes=[0, 1, 3, 2])
y = R.matmul(f, t)
""".replace("'", '"')
REORDER = "".join(REORDERED.format(x, f"2, {n}, 5") for x, n in (("q", 3), ("k", 1)))
REAL = {
    "written apart": (f"{TO_HALVES.format('q')}{TO_HALVES.format('k')}", "(5, 4)"),
    "behind a transpose of pairs": (
        (REORDER + HALVES.format("qh") + HALVES.format("kh")).replace("hr = ", "r = "),
        "(5, 8)",
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_scores_do_not_mind_the_order_of_features(name: str) -> None:
    body, angles = REAL[name]
    before = module(f"{Q}, {K}, {MORE}, {ANGLES.format(angles)}", body + SCORES, "")
    after = PadRotations()(before)
    # both rotations put pairs together as neighbours: an axis is added for each part
    assert operators(after).count("expand_dims") == 4
    assert_same_numbers(before, after)
    assert PadRotations()(after).same_as(after)


def test_keys_in_another_order_stay() -> None:
    body = f"{TO_HALVES.format('q')}kr = R.negative(k)\n{SCORES}"
    before = module(f"{Q}, {K}, {MORE}, {ANGLES.format('(5, 4)')}", body, "")
    assert PadRotations()(before).same_as(before)


def test_the_kernel_of_a_projection_rotates_all_but_the_first_row() -> None:
    heads = "t = R.permute_dims(w)\nm = R.matmul(a, t)\nx = R.reshape(m, R.shape([2, 5, 3, 8]))\n"
    params = "a: R.Tensor((2, 5, 16), 'float32'), w: R.Tensor((24, 16), 'float32'), "
    mod = module(params + ANGLES.format("(4, 1, 8)"), heads + PADDED["the first row"][1], "")
    report = Report()
    arrays = {name: value.astype("float32") for name, value in drawn(mod, {}).items()}
    pipeline = relax_fusion_pipeline(quick_host(), report=report, always_fuse=True)
    got = machine(quickly(mod, pipeline))["main"](*map(tvm.runtime.tensor, arrays.values()))
    a, w, cos, sin = (value.astype("float64") for value in arrays.values())
    x = (a @ w.T).reshape(2, 5, 3, 8)
    turned = np.concatenate([-x[..., 4:], x[..., :4]], -1)
    want = np.concatenate([x[:, :1], x[:, 1:] * cos + turned[:, 1:] * sin], 1)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)
    (coverage,) = report.coverage
    assert coverage.chains["rope"] == (1, 1)
    # a table of angles each, and the projection
    assert len(coverage.launches.kernels) == 3
