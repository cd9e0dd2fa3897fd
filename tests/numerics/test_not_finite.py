"""docs/numerics.md, NaN and infinity: where they come out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ..support.small_workloads import (
    ACTIVE,
    ADAPTED,
    ATTENTION,
    BIASED,
    BOUNDED,
    CAPPED,
    CAUSAL,
    CHAIN,
    FLOAT,
    GATED,
    GATED_SILU,
    LAYER_ADDED,
    MASKED,
    PLAIN,
    RMS,
    RMS_ADDED,
    RMS_ROWS,
    ROTATED,
    ROTATED_EIGHTS,
    SINKS,
    SLOPES,
    STEPS,
    N,
)
from .backends import Arrays, Run, draw, on_every_backend, zeros

SIZES = {"rows": 4, "batch": 1, "q_len": 5, "kv_len": 40}


def spoilt(run: Run, name: str, at: Any, value: float = np.nan) -> Arrays:
    """Return results with an element of an operand replaced."""
    given = draw(run.work, **SIZES)
    given[name][at] = value
    return run(given)


def assert_nan(got: np.ndarray, *at: Any) -> None:
    """Check that there is NaN at the given places, and at no others."""
    wanted = np.zeros(got.shape, bool)
    for place in at:
        wanted[place] = True
    assert np.array_equal(np.isnan(got), wanted)


@on_every_backend(plain=PLAIN, steps=STEPS, rms=RMS_ROWS, gated=GATED_SILU)
def test_n1_nan_in_x_is_nan_in_its_row(run: Run) -> None:
    assert_nan(spoilt(run, "x", (3, 7))["out0"], 3)


@on_every_backend(chain=CHAIN)
def test_n1_nan_in_x_is_nan_in_its_row_of_a_chain(run: Run) -> None:
    assert_nan(spoilt(run, "x", (3, 7))["out1"], 3)


@on_every_backend(rms=RMS_ADDED, layer=LAYER_ADDED)
@pytest.mark.parametrize("name", ["x", "residual"])
def test_n1_nan_in_front_of_a_norm_is_nan_in_its_row(run: Run, name: str) -> None:
    got = spoilt(run, name, (3, 7))
    assert_nan(got["x_sum"], (3, 7))
    assert_nan(got["x_norm"], 3)
    assert_nan(got["out0"], 3)


@on_every_backend(rms=RMS_ADDED, layer=LAYER_ADDED)
def test_n2_nan_in_gamma_or_beta_is_nan_in_its_feature_and_in_all_products(run: Run) -> None:
    for name in ("gamma", *(("beta",) if run.work.norm.beta else ())):
        got = spoilt(run, name, 7)
        assert_nan(got["x_norm"], (slice(None), 7))
        assert np.isnan(got["out0"]).all()


@on_every_backend(plain=PLAIN, steps=STEPS, rms=RMS_ROWS)
def test_n3_nan_in_a_weight_is_nan_in_its_feature(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["w0"][4, 7] = np.nan
    given["x"][2] = 0
    assert_nan(run(given)["out0"], (slice(None), 4))


@on_every_backend(gated=GATED, silu=GATED_SILU)
@pytest.mark.parametrize("half", [0, N])
def test_n3_nan_in_a_weight_of_gate_or_up_is_nan_in_its_feature(run: Run, half: int) -> None:
    assert_nan(spoilt(run, "w0", (half + 4, 7))["out0"], (slice(None), 4))


@on_every_backend(rotated=ROTATED, eights=ROTATED_EIGHTS)
def test_n3_nan_in_a_weight_is_nan_in_its_pair(run: Run) -> None:
    every, rope = slice(None), run.work.outputs[0].rope
    assert_nan(spoilt(run, "w0", (1, 7))["out0"], (every, 1), (every, 1 + rope.distance))
    kept = rope.features + 2
    assert_nan(spoilt(run, "w0", (kept, 7))["out0"], (every, kept))


@on_every_backend(chain=CHAIN)
def test_n3_nan_in_a_weight_of_a_chain(run: Run) -> None:
    assert np.isnan(spoilt(run, "w0", (4, 7))["out1"]).all()
    assert_nan(spoilt(run, "w1", (4, 7))["out1"], (slice(None), 4))


@on_every_backend(adapted=ADAPTED, normed=replace(ADAPTED, norm=RMS))
def test_n3_nan_in_a_weight_of_an_adapter(run: Run) -> None:
    assert np.isnan(spoilt(run, "w0_a", (4, 7))["out0"]).all()
    assert_nan(spoilt(run, "w0_b", (4, 7))["out0"], (slice(None), 4))


@on_every_backend(steps=STEPS, **ACTIVE)
def test_n4_nan_passes_every_activation(run: Run) -> None:
    assert_nan(spoilt(run, "bias0_0", 4)["out0"], (slice(None), 4))


@on_every_backend(gated=GATED)
def test_n4_nan_passes_the_gate(run: Run) -> None:
    assert_nan(spoilt(run, "bias0", 4)["out0"], (slice(None), 4))
    assert_nan(spoilt(run, "bias0", N + 4)["out0"], (slice(None), 4))


@on_every_backend(steps=STEPS)
def test_n4_nan_in_a_residual_is_nan_in_its_element(run: Run) -> None:
    assert_nan(spoilt(run, "residual0_2", (3, 4))["out0"], (3, 4))


@on_every_backend(rotated=ROTATED, eights=ROTATED_EIGHTS)
@pytest.mark.parametrize("name", ["cos0", "sin0"])
def test_n4_nan_in_an_angle_is_nan_in_its_lane(run: Run, name: str) -> None:
    lane = run.work.outputs[0].rope.distance + 1
    assert_nan(spoilt(run, name, (3, lane))["out0"], (3, lane))


@on_every_backend(plain=ATTENTION, bounded=BOUNDED, masked=MASKED, capped=CAPPED)
def test_n5_nan_in_a_query_is_nan_in_its_row(run: Run) -> None:
    given = draw(run.work, **SIZES)
    if "mask" in given:
        given["mask"][0, 1, 3, 5] = True
    given["q"][0, 3, 1, 7] = np.nan
    assert_nan(run(given)["out"], (0, 3, 1))


@on_every_backend(plain=CAUSAL)
def test_n5_nan_in_a_key_is_nan_for_the_queries_that_see_it(run: Run) -> None:
    assert_nan(spoilt(run, "k", (0, 38, 0, 7))["out"], (0, [3, 4]))


@on_every_backend(plain=ATTENTION)
def test_n5_nan_in_a_value_is_nan_in_its_feature(run: Run) -> None:
    assert_nan(spoilt(run, "v", (0, 38, 0, 7))["out"], (0, slice(None), slice(None), 7))


@on_every_backend(added=BIASED, bounded=BOUNDED)
def test_n5_nan_in_a_bias_is_nan_in_its_row(run: Run) -> None:
    assert_nan(spoilt(run, "bias", (0, 1, 3, 17))["out"], (0, 3, 1))


@on_every_backend(plain=SINKS)
def test_n5_nan_in_a_sink_is_nan_in_its_head(run: Run) -> None:
    assert_nan(spoilt(run, "sinks", 1)["out"], (0, slice(None), 1))


@on_every_backend(plain=SINKS)
def test_n5_nan_in_a_sink_may_give_zeros_where_no_key_is_seen(run: Run) -> None:
    given = draw(run.work, **{**SIZES, "kv_len": 2})
    given["sinks"][1] = np.nan
    got = run(given)["out"]
    blind = got[0, :-2, 1]  # the last two queries see keys
    assert np.isnan(blind).all() or (blind == 0).all()
    got[0, :-2, 1] = np.nan
    assert_nan(got, (0, slice(None), 1))


@on_every_backend(plain=SLOPES)
def test_n5_nan_in_a_slope_is_nan_in_its_head(run: Run) -> None:
    assert_nan(spoilt(run, "slopes", 1)["out"], (0, slice(None), 1))


@on_every_backend(plain=PLAIN)
def test_i1_infinities_are_multiplied_and_added_as_in_float32(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["x"][3, 7] = np.inf
    given["w0"][:, 7] = np.resize([1, -1, 0], N)
    got = run(given)["out0"]
    assert (got[3, ::3] == np.inf).all() and (got[3, 1::3] == -np.inf).all()
    assert_nan(got, (3, slice(2, None, 3)))


@on_every_backend(rms=RMS_ADDED, layer=LAYER_ADDED)
def test_i2_an_infinity_in_front_of_a_norm(run: Run) -> None:
    got = spoilt(run, "x", (3, 7), np.inf)
    assert_nan(got["x_norm"], (3, 7) if run.work.norm.kind == "rms" else 3)
    if run.work.norm.kind == "rms":
        assert (np.delete(got["x_norm"][3], 7) == 0).all()
    assert_nan(got["out0"], 3)


@on_every_backend(rms=RMS_ROWS, gated=GATED_SILU)
def test_i2_an_infinity_in_front_of_a_norm_inside(run: Run) -> None:
    assert_nan(spoilt(run, "x", (3, 7), np.inf)["out0"], 3)


LIMITS = {"sigmoid": (1, 0), "tanh": (1, -1)}
"""The limits of activations that have two."""


@on_every_backend(**ACTIVE)
def test_i3_activations_at_infinities_and_far_out(run: Run) -> None:
    given = zeros(run.work, **SIZES)
    name = run.work.outputs[0].epilogue[1]
    given["bias0_0"][:4] = np.inf, -np.inf, 6e4, -6e4
    got = run(given)["out0"]
    highest, lowest = LIMITS.get(name, (np.inf, 0))
    far = np.inf if name == "relu2" else np.float16(min(highest, 6e4))  # a square
    assert (got[:, 0] == highest).all() and (got[:, 2] == far).all()
    assert (got[:, 3] == lowest).all()
    ends = name in LIMITS or name in ("relu", "relu2")
    assert (got[:, 1] == lowest).all() if ends else np.isnan(got[:, 1]).all()


@on_every_backend(**{name: replace(work, **FLOAT) for name, work in ACTIVE.items()})
def test_i3_activations_far_out_in_float32(run: Run) -> None:
    given = zeros(run.work, **SIZES)
    given["bias0_0"][:4] = 1e30, -1e30, 3e38, -3e38
    got = run(given)["out0"]
    name = run.work.outputs[0].epilogue[1]
    highest, lowest = LIMITS.get(name, (np.inf, 0))
    far = [np.inf, np.inf] if name == "relu2" else np.minimum([1e30, 3e38], highest)
    assert (got[:, [0, 2]] == np.float32(far)).all() and (got[:, [1, 3]] == lowest).all()


@on_every_backend(added=BIASED)
def test_i4_a_score_of_infinity_is_nan_in_its_row(run: Run) -> None:
    assert_nan(spoilt(run, "bias", (0, 1, 3, 17), np.inf)["out"], (0, 3, 1))


@on_every_backend(bounded=BOUNDED)
def test_i4_an_infinite_bound_bounds_nothing(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["bias"][:] = np.inf
    wanted = run.exact({**given, "bias": np.full_like(given["bias"], 1e4)})["out"]
    assert np.abs(run(given)["out"] - wanted).max() < 2e-3


@on_every_backend(capped=CAPPED)
def test_i4_a_soft_cap_bounds_infinities(run: Run) -> None:
    given = zeros(run.work, **SIZES)
    given["q"][0, :, :, 0] = 1
    given["k"][0, 3, 0, 0] = np.inf
    given["k"][0, 4, 0, 0] = -np.inf
    given["v"][0, 3] = 1
    wanted = np.exp(5) / (np.exp(5) + np.exp(-5) + 38)
    assert np.abs(run(given)["out"] - wanted).max() < 1e-3


@on_every_backend(plain=ATTENTION)
def test_i5_an_infinite_value_is_infinite_in_its_feature(run: Run) -> None:
    got = spoilt(run, "v", (0, 38, 0, 7), np.inf)["out"]
    assert (got[..., 7] == np.inf).all() and np.isfinite(np.delete(got, 7, -1)).all()


@on_every_backend(plain=PLAIN, relu=STEPS)
def test_i6_a_result_beyond_its_dtype_is_infinite(run: Run) -> None:
    given = zeros(run.work, **SIZES)
    given["x"][:, 0] = 256
    given["x"][:, 1] = 1
    given["w0"][:, 0] = 255.75
    given["w0"][:, 1] = np.resize([47, 48], N)  # 65519 and 65520
    got = run(given)["out0"]
    assert (got[:, ::2] == 65504).all() and (got[:, 1::2] == np.inf).all()
