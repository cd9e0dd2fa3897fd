"""docs/numerics.md, Sums: what is added up in what, and how far a result may be from exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from relax_fusion.workload import NormMatmul
from relax_fusion.workload.reference import numpy_dtype

from ..support.accuracy import assert_accurate, nudged
from ..support.small_workloads import (
    ACTIVE,
    ATTENTION,
    BYTES,
    CAPPED,
    CHAIN,
    FLOAT,
    GATED_SILU,
    LAYER_ROWS,
    PLAIN,
    POST,
    POST_SUM,
    RMS_ROWS,
    TWO_MATMULS,
    WIDE,
    K,
    dtypes,
)
from .backends import Run, draw, on_every_backend, zeros


@on_every_backend(
    tf32=replace(PLAIN, **FLOAT, allow_tf32=True),
    **{name: replace(work, **WIDE) for name, work in dtypes(PLAIN).items()},
)
def test_s1_sums_of_floats_are_float32(run: Run) -> None:
    given = zeros(run.work, rows=2)
    given["x"][:] = 1
    given["x"][:, 0] = 32768
    given["w0"][:] = 1
    given["w0"][:, 0] = 4
    assert (run(given)["out0"] == 131072 + K - 1).all()


@on_every_backend(
    bytes=BYTES,
    signed=replace(BYTES, dtype="int8"),
    long_lines=replace(BYTES, k=528),
    signed_long_lines=replace(BYTES, dtype="int8", k=528),
)
def test_s2_sums_of_integers_are_exact(run: Run) -> None:
    given = zeros(run.work, rows=4)
    largest = np.iinfo(run.work.dtype).max
    given["x"][:] = largest
    given["w0"][:] = largest
    given["x"][0, 0] = given["w0"][0, 0] = 1
    got = run(given)["out0"]
    terms = run.work.k
    assert got[1, 1] == terms * largest**2
    assert got[0, 0] == (terms - 1) * largest**2 + 1
    assert got[0, 1] == (terms - 1) * largest**2 + largest


def scaled_bytes(out_dtype: str) -> NormMatmul:
    outputs = (replace(BYTES.outputs[0], epilogue=("scale", "bias")),)
    return replace(BYTES, k=2048, outputs=outputs, dtype="int8", out_dtype=out_dtype)


@on_every_backend(float=replace(PLAIN, **FLOAT))
def test_s3_float32_is_multiplied_as_float32(run: Run) -> None:
    given = zeros(run.work, rows=2)
    given["x"][:, 0] = 1 + 2.0**-20
    given["w0"][:, 0] = 1
    assert (run(given)["out0"] == 1 + 2.0**-20).all()


def test_s3_tf32_is_asked_for() -> None:
    assert not NormMatmul.allow_tf32 and not GATED_SILU.allow_tf32


@on_every_backend(
    single=scaled_bytes("float32"), half=scaled_bytes("float16"), brain=scaled_bytes("bfloat16")
)
def test_s5_steps_behind_sums_of_integers_are_float32(run: Run) -> None:
    given = zeros(run.work, rows=4)
    given["x"][:] = given["w0"][:] = 127
    given["x"][1] = -128
    given["scale0_0"][:], given["bias0_1"][:] = 2.0**-12, 0.25
    got = run(given)["out0"]
    for row, factor in enumerate((127, -128, 127, 127)):
        total = np.float32(given["x"].shape[1] * factor * 127)
        value = total * np.float32(2.0**-12) + np.float32(0.25)
        assert (got[row] == value.astype(numpy_dtype(run.work.out_dtype))).all()
    given["x"][0, 0] = 126  # an odd sum beyond 2^24
    total = np.float32(127 * (given["x"].shape[1] * 127 - 1))
    assert float(total) != 127 * (given["x"].shape[1] * 127 - 1)
    value = total * np.float32(2.0**-12) + np.float32(0.25)
    assert (run(given)["out0"][0] == value.astype(numpy_dtype(run.work.out_dtype))).all()


def _length(work: Any) -> int:
    """Return how many terms are added up for a result."""
    return 40 if not hasattr(work, "k") else work.k


HALVES = {
    **{f"{name}": work for name, work in ACTIVE.items()},
    "rms": RMS_ROWS,
    "layer": LAYER_ROWS,
    "gated": GATED_SILU,
    "post": POST,
    "post_sum": POST_SUM,
    "attention": ATTENTION,
    "capped": CAPPED,
    "chain": CHAIN,
}
OTHERS = {
    f"{name}_{dtype}": work
    for name in ("gelu", "rms", "gated", "post", "attention", "chain")
    for dtype, work in dtypes(TWO_MATMULS if name == "chain" else HALVES[name]).items()
    if dtype != "half"
}


@on_every_backend(**HALVES, **OTHERS)
def test_s4_errors_are_those_of_rounded_inputs(run: Run) -> None:
    given = draw(run.work, rows=4, batch=1, q_len=5, kv_len=40)
    dtype = run.work.dtype
    moved = {n: nudged(a, dtype, seed) for seed, (n, a) in enumerate(given.items())}
    exact, near, got = run.exact(given), run.exact(moved), run(given)
    terms = _length(run.work) if dtype == "float32" else 0
    for name, values in got.items():
        assert_accurate(values, exact[name], near[name], dtype, terms)
