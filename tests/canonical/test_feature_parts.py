"""SplitProjections: parts of features as products of their own, read where their weights lie."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_fusion import Report
from relax_fusion.canonical import SplitProjections
from relax_fusion.pipeline import relax_fusion_pipeline

from ..support.quick import machine, quick_host, quickly
from .common import assert_same_numbers, drawn, module, operators

PARAMS = ", ".join(
    f"{name}: R.Tensor({shape}, 'float32')"
    for name, shape in (
        *(("x", "('b', 's', 16)"), ("w", "(24, 16)"), ("k", "(16, 24)"), ("c", "(24,)")),
        *(("g", "(16,)"), ("u", "(16, 16)"), ("v", "(8, 16)")),
    )
)
PRODUCT = "t = R.permute_dims(w)\nm = R.matmul(x, t)\n"
SPLIT = "p = R.split({}, indices_or_sections=[16], axis=-1)\nl = p[0]\nr = p[1]\n"
READ = "n = R.nn.rms_norm(l, g, axes=[-1])\na = R.matmul(n, u)\nd = R.matmul(r, v)\ny = R.add(a, d)"

CUT = {
    "parts": f"{PRODUCT}{SPLIT.format('m')}{READ}",
    "with a bias": f"{PRODUCT}q = R.add(c, m)\n{SPLIT.format('q')}{READ}",
    "shift and gate": f"{PRODUCT}p = R.split(m, indices_or_sections=[8, 16], axis=-1)\nh = p[0]\n"
    "i = p[1]\ne = R.expand_dims(h, [2])\nf = R.expand_dims(i, [2])\n"
    'o = R.add(R.ones((1, 1, 3, 8), "float32"), e)\ny = R.multiply(o, f)',
    "one part": f"{PRODUCT}{SPLIT.format('m')}y = R.nn.rms_norm(l, g, axes=[-1])",
}


@pytest.mark.parametrize("name", CUT)
def test_parts_are_products(name: str) -> None:
    before = module(PARAMS, CUT[name])
    after = SplitProjections()(before)
    assert "split" not in operators(after)
    products = [operators(mod).count("matmul") for mod in (before, after)]
    assert products[1] == products[0] + (name != "one part")
    assert_same_numbers(before, after)
    assert SplitProjections()(after).same_as(after)


STAYS = {
    "no matmul reads a part": f"{PRODUCT}{SPLIT.format('m')}e = R.sum(r)\ny = R.add(l, e)",
    "a gate of the same rows": f"{PRODUCT}p = R.split(m, indices_or_sections=[8], axis=-1)\n"
    "h = R.strided_slice(p[1], (2,), (0,), (8,))\no = p[0]\ny = R.multiply(o, h)",
    "all features are read": f"{PRODUCT}{SPLIT.format('m')}o = R.sum(m)\nz = R.matmul(l, u)\n"
    "y = R.add(z, o)",
    "another layout": f"m = R.matmul(x, k)\n{SPLIT.format('m')}{READ}",
    "a weight that is computed": "o = R.abs(w)\n" + CUT["parts"].replace("(w)", "(o)"),
    "along another axis": f"{PRODUCT}p = R.split(m, indices_or_sections=[1], axis=0)\nl = p[0]\n"
    "y = R.nn.rms_norm(l, c, axes=[-1])",
}


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    before = module(PARAMS, STAYS[name])
    assert SplitProjections()(before).same_as(before)


def test_kernels_read_the_parts_in_place() -> None:
    mod, report = module(PARAMS.replace("'b', 's'", "2, 3"), CUT["with a bias"], ""), Report()
    arrays = {name: value.astype("float32") for name, value in drawn(mod, {}).items()}
    pipeline = relax_fusion_pipeline(quick_host(), report=report)
    got = machine(quickly(mod, pipeline))["main"](*map(tvm.runtime.tensor, arrays.values()))
    x, w, _, c, g, u, v = (value.astype("float64") for value in arrays.values())
    left, right = np.split(x @ w.T + c, [16], -1)
    normed = left / np.sqrt((left**2).mean(-1, keepdims=True) + 1e-5) * g
    np.testing.assert_allclose(got.numpy(), normed @ u + right @ v, rtol=1e-4, atol=1e-4)
    (coverage,) = report.coverage
    assert not coverage.launches.copies and len(coverage.launches.kernels) <= 3
    assert any("of_parts" in kernel for kernel in coverage.launches.kernels)
