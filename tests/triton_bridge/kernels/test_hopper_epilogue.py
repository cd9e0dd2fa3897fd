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
    out = Pointer(np.full(case.rows * case.n, np.nan, "float32"))
    bias = pointer(tensors["bias"], "float32")
    angles = [pointer(tensors[name], "float32") for name in ("cos", "sin")]
    given = (bias, bias, bias, out), (*angles, case.positions or None, 0)
    constants = case.constants()
    half, turned = constants["HALF"], constants["ROTATED"]
    x = np.random.default_rng(3).standard_normal((case.rows, case.n)).astype("float32")
    tile = np.zeros((case.rows + 3, 2 * case.n + 4 * COLUMNS), "float32")  # beyond both ends
    tile[: case.rows, : case.n] = x
    if case.neighbours:
        store = plain(store_neighbours, {})
        for start in range(0, case.n, COLUMNS):
            part = values(tile[:, start : start + COLUMNS])
            store(*given, part, 0, start, case.rows, case.n, case.bias, turned)
    else:
        store = plain(store_pairs, {})
        for start in range(0, case.n // 2, COLUMNS):
            pairs = np.arange(start, start + COLUMNS)
            first = pairs // half * 2 * half + pairs % half
            low, high = values(tile[:, first]), values(tile[:, first + half])
            store(*given, low, high, 0, start, case.rows, case.n, case.bias, half, turned)
    want = case.turned(x + tensors["bias"] * case.bias, tensors)
    np.testing.assert_allclose(out.array.reshape(x.shape), want, rtol=1e-5, atol=1e-5)
