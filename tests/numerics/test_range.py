"""docs/numerics.md, Range: overflow on the way, small numbers, constants, and sizes of zero."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..support.small_workloads import (
    ACTIVE,
    ATTENTION,
    BIASED,
    BRAIN,
    CHAIN,
    FLOAT,
    GATED_SILU,
    LAYER,
    LAYER_ADDED,
    LAYER_ROWS,
    PLAIN,
    POST_SUM,
    RMS,
    RMS_ADDED,
    RMS_ROWS,
    SHARED,
    SINKS,
    STEPS,
    K,
    N,
)
from .backends import Run, draw, on_every_backend, zeros

SIZES = {"batch": 1, "q_len": 5, "kv_len": 40}


@on_every_backend(rms=RMS_ADDED, layer=LAYER_ADDED, inside=RMS_ROWS, post=POST_SUM)
def test_f1_squares_in_a_norm_do_not_overflow_float16(run: Run) -> None:
    given = draw(run.work, rows=4)
    given["x"] *= np.float16(6000)
    assert np.abs(given["x"]).max() < 3e4
    wanted, got = run.exact(given)["out0"], run(given)["out0"]
    assert np.abs(wanted).max() > 0.5 and np.abs(got - wanted).max() < 1e-2


@on_every_backend(rms=replace(RMS_ROWS, **BRAIN), gated=replace(GATED_SILU, **FLOAT))
def test_f2_squares_beyond_float32_make_a_row_of_zeros_or_nan(run: Run) -> None:
    given = draw(run.work, rows=4)
    given["x"][3] *= given["x"].dtype.type(1e20)
    got = run(given)["out0"]
    wanted = run.exact(given)["out0"]
    keeps = np.abs(got - wanted).max(-1) < 0.1
    assert np.delete(keeps, 3).all()
    nothing = (got[3] == 0) | np.isnan(got[3])
    assert nothing.all() or run.is_reference  # which is computed in float64


@on_every_backend(plain=ATTENTION, sinks=SINKS)
def test_f3_a_softmax_of_large_scores_does_not_overflow(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["q"] = np.sign(given["q"]) * np.float16(100)
    given["k"] = np.sign(given["k"]) * np.float16(100)
    given["k"][0, 30, 0] = given["q"][0, 4, 1]  # a product of 160,000, a score of 40,000
    wanted = run.exact(given)["out"]
    off = 40000 * 2.0**-23 * np.abs(given["v"]).max().astype("float64")
    assert np.abs(run(given)["out"] - wanted).max() < 2 * off
    assert np.abs(wanted[0, 4, 1] - given["v"][0, 30, 0]).max() < 1e-9


@on_every_backend(plain=BIASED)
def test_f3_a_softmax_of_low_scores_does_not_underflow(run: Run) -> None:
    given = draw(run.work, **SIZES)
    wanted = run.exact(given)["out"]
    given["bias"] -= np.float32(1000)
    assert np.abs(run(given)["out"] - wanted).max() < 4e-3


@on_every_backend(plain=PLAIN)
def test_f4_subnormals_of_float16_are_kept(run: Run) -> None:
    given = zeros(run.work, rows=4)
    given["x"][:, 0] = 2.0**-24
    given["w0"][:, 0] = 3
    assert (run(given)["out0"] == 3 * 2.0**-24).all()


@on_every_backend(brain=replace(PLAIN, **BRAIN), float=replace(PLAIN, **FLOAT))
def test_f4_subnormals_of_float32_and_bfloat16_are_kept_or_zero(run: Run) -> None:
    given = zeros(run.work, rows=4)
    given["x"][:, 0] = 2.0**-130
    given["w0"][:, 0] = 3
    got = run(given)["out0"]
    assert np.isin(got, (0, 3 * 2.0**-130)).all()


@on_every_backend(rms=replace(RMS_ROWS, norm=replace(RMS, eps=1e-12)))
def test_f5_epsilon_is_no_float16(run: Run) -> None:
    given = draw(run.work, rows=4)
    given["x"][3] = 0
    got, wanted = run(given)["out0"], run.exact(given)["out0"]
    assert np.isfinite(wanted).all() and np.abs(got - wanted).max() < 1e-2


@on_every_backend(layer=replace(LAYER_ROWS, norm=replace(LAYER, eps=1e-50)))
def test_f5_epsilon_is_a_float32(run: Run) -> None:
    given = draw(run.work, rows=4)
    given["x"][3] = 0
    assert np.array_equal(np.isnan(run(given)["out0"]).all(-1), np.arange(4) == 3)


@on_every_backend(rms=RMS_ROWS)
def test_f6_what_may_be_rounded_may_overflow(run: Run) -> None:
    given = zeros(run.work, rows=4)
    given["x"][:, :2] = 1, 2.0**-10
    given["gamma"][:2] = 1, 2.0**14
    given["w0"][:, 1] = 2.0**4
    got, wanted = run(given)["out0"], run.exact(given)["out0"]
    assert (wanted < 3000).all()
    assert (np.abs(got - wanted) < 2).all() or not np.isfinite(got).any()


@on_every_backend(
    **{name: replace(ACTIVE[name], **FLOAT) for name in ("silu", "gelu", "gelu_tanh", "quick_gelu")}
)
def test_f7_small_activations_are_exact(run: Run) -> None:
    given = zeros(run.work, rows=2)
    given["bias0_0"][:] = np.linspace(-6, -1, N)
    exact, got = run.exact(given)["out0"], run(given)["out0"]
    is_exact_gelu = run.work.outputs[0].epilogue[-1] == "gelu"
    limit = 2.0**-22 * np.abs(given["bias0_0"]) if is_exact_gelu else 2.0**-18 * np.abs(exact)
    assert (np.abs(got - exact) <= limit).all()


@on_every_backend(half=SHARED, brain=replace(SHARED, **BRAIN), float=replace(SHARED, **FLOAT))
def test_f8_shares_of_what_is_added_are_exact_or_infinite(run: Run) -> None:
    given = zeros(run.work, rows=2)
    large = 2.0**15 if run.work.dtype == "float16" else 2.0**127
    given["x"][:, 0] = 1, 8
    given["w0"][:, 0] = large / 128
    given["residual0_1"][:] = large
    wanted, got = run.exact(given)["out0"], run(given)["out0"]
    assert (wanted[0] == large * 3 / 128).all() and (got[0] == wanted[0]).all()
    may_overflow = run.work.dtype != "float16" and not run.is_reference
    assert ((got[1] == wanted[1]) | (may_overflow & np.isinf(got[1]))).all()


@on_every_backend(steps=STEPS, rms=RMS_ADDED, gated=GATED_SILU, chain=CHAIN, gelu=ACTIVE["gelu"])
def test_e1_no_rows_give_no_rows(run: Run) -> None:
    for name, got in run(draw(run.work, rows=0)).items():
        assert got.shape == (0, K if name.startswith("x_") else N)


@on_every_backend(plain=ATTENTION, biased=BIASED, sinks=SINKS)
def test_e1_no_queries_and_no_batch_give_nothing(run: Run) -> None:
    assert run(draw(run.work, **{**SIZES, "q_len": 0}))["out"].shape == (1, 0, 2, 16)
    assert run(draw(run.work, **{**SIZES, "batch": 0}))["out"].shape == (0, 5, 2, 16)


@on_every_backend(plain=ATTENTION, biased=BIASED, sinks=SINKS)
def test_e2_no_keys_give_zeros(run: Run) -> None:
    got = run(draw(run.work, **{**SIZES, "kv_len": 0}))["out"]
    assert got.shape == (1, 5, 2, 16) and (got == 0).all()
