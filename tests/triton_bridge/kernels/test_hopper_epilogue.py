"""Rotated epilogues of the kernels for Hopper, run on numpy arrays, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from relax_fusion.triton_bridge.kernels.hopper_epilogue import store_neighbours, store_pairs

from .cases import ODD_HEADS, ROTATIONS, Case
from .gluon_on_cpu import Pointer, plain, values

CASES = [*ROTATIONS, *ODD_HEADS]
COLUMNS = 16
"""Of a tile, or pairs."""


def pointer(values: np.ndarray, dtype: str) -> Pointer:
    return Pointer(values.astype(dtype).ravel())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.head_dim}-{case.width}-{case.n}")
def test_rotated_tiles(case: Case) -> None:
    tensors, _ = case.tensors()
    made = case.product(COLUMNS)
    form = made["F0"]
    names = {"bias", "cos", "sin"}
    held = {n: pointer(tensors[n], "float32") for n in names if getattr(made["p0"], n) is not None}
    out = Pointer(np.full(case.rows * case.n, np.nan, "float32"))
    p = made["p0"]._replace(out=out, **held)
    x = np.random.default_rng(3).standard_normal((case.rows, case.n)).astype("float32")
    tile = np.zeros((case.rows + 3, 2 * case.n + 4 * COLUMNS), "float32")  # beyond both ends
    tile[: case.rows, : case.n] = x
    if case.neighbours:
        store = plain(store_neighbours, {})
        for start in range(0, case.n, COLUMNS):
            store(p, values(tile[:, start : start + COLUMNS]), 0, start, case.rows, form)
    else:
        store = plain(store_pairs, {})
        for start in range(0, case.n // 2, COLUMNS):
            pairs = np.arange(start, start + COLUMNS)
            first = pairs // form.half * 2 * form.half + pairs % form.half
            low, high = values(tile[:, first]), values(tile[:, first + form.half])
            store(p, low, high, 0, start, case.rows, form)
    want = case.turned(x + tensors["bias"] * case.bias, tensors)
    np.testing.assert_allclose(out.array.reshape(x.shape), want, rtol=1e-5, atol=1e-5)
