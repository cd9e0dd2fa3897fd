"""docs/numerics.md, Hidden keys: queries that see nothing, and what lies where nobody looks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relax_fusion.workload import Lengths

from ..support.small_workloads import (
    ATTENTION,
    BIASED,
    BOUNDED,
    CACHE,
    CAUSAL,
    EVERY,
    FLOAT,
    MASKED,
    SINKS,
    SLOPES,
    WINDOW,
)
from .backends import Run, draw, on_every_backend

SIZES = {"batch": 1, "q_len": 5, "kv_len": 40}
FEW = {**SIZES, "kv_len": 2}
FINFO = np.finfo("float32")


def _close(got: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(got - wanted).max() < 2e-3 * max(1, np.abs(wanted).max()))


@on_every_backend(causal=CAUSAL, sinks=SINKS)
def test_h1_queries_in_front_of_all_keys_are_zero(run: Run) -> None:
    got = run(draw(run.work, **FEW))["out"]
    assert (got[0, :3] == 0).all() and (got[0, 3:] != 0).any((-1, -2)).all()


@on_every_backend(window=WINDOW)
def test_h1_queries_whose_window_is_behind_all_keys_are_zero(run: Run) -> None:
    got = run(draw(run.work, **FEW))["out"]  # query 4 sees keys from 2 on
    assert (got[0, 4] == 0).all() and (got[0, :4] != 0).any((-1, -2)).all()


@on_every_backend(masked=MASKED, added=BIASED, bounded=BOUNDED)
def test_h1_queries_that_a_mask_or_minus_infinity_blinds_are_zero(run: Run) -> None:
    given = draw(run.work, **SIZES)
    hidden = False if "mask" in given else -np.inf
    given["mask" if "mask" in given else "bias"][0, 1, 3] = hidden
    got = run(given)["out"]
    assert (got[0, 3, 1] == 0).all() and (got != 0).any(-1).sum() == 9


@on_every_backend(plain=replace(SLOPES, mask_dims=EVERY, bias_dims=EVERY, causal="bottom_right"))
def test_h2_scores_of_keys_hidden_by_position_or_mask_are_never_seen(run: Run) -> None:
    given = draw(run.work, **SIZES)
    wanted = run.exact(given)["out"]
    given["k"][0, 39] = np.nan  # hidden from queries 0 to 3 by position, from 4 by the mask
    given["mask"][0, :, 4, 39] = False
    given["bias"][~given["mask"]] = np.nan
    given["bias"][..., 39] = np.inf
    exact = run.exact(given)["out"]
    assert np.array_equal(exact[0, :4], wanted[0, :4]) and np.isfinite(exact).all()
    assert _close(run(given)["out"], exact)


@on_every_backend(plain=CAUSAL)
def test_h3_values_of_hidden_keys_count_not_at_all_or_as_nan(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["v"][0, 39] = 6e4
    wanted = run.exact(given)["out"]
    assert _close(run(given)["out"][0, :4], wanted[0, :4])
    given["v"][0, 39] = np.nan
    got = run(given)["out"]
    assert np.isnan(got[0, 4]).all()
    whole = np.isnan(got[0, :4]).all(-1) | (np.abs(got - wanted)[0, :4].max(-1) < 2e-3)
    assert whole.all()


@on_every_backend(cache=CACHE)
def test_h4_a_cache_behind_its_length_is_never_read(run: Run) -> None:
    given = draw(run.work, batch=1, q_len=5, kv_len=37, kv_capacity=64)
    wanted = run.exact(given)["out"]
    given["k"][:, 37:] = given["v"][:, 37:] = np.nan
    assert _close(run(given)["out"], wanted)


COUNTED = replace(WINDOW, causal="bottom_right", lengths=Lengths("int64", by_batch=False))


@on_every_backend(counted=COUNTED)
def test_h4_nor_one_behind_a_length_that_a_tensor_tells(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["lengths"][:] = 17
    wanted = run.exact(given)["out"]
    multiplied = run.backend.name in ("reference", "generated")
    behind = 1e4 if multiplied else np.nan
    given["k"][:, 17:] = given["v"][:, 17:] = behind
    assert _close(run(given)["out"], wanted)


@on_every_backend(counted=COUNTED)
def test_v4_a_window_that_a_tensor_ends_behind_the_last_key_ends_there(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["lengths"][:] = 1 << 40
    wanted = run.exact({**given, "lengths": np.array([SIZES["kv_len"]])})["out"]
    assert _close(run(given)["out"], wanted)


@on_every_backend(half=BIASED, float=replace(BIASED, **FLOAT), bounded=BOUNDED)
def test_h5_the_least_number_hides_a_key_like_minus_infinity(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["bias"][...] = np.where(np.arange(40) % 3 == 0, FINFO.min, given["bias"])
    wanted = run.exact({**given, "bias": np.where(given["bias"] < -1e30, -np.inf, given["bias"])})
    assert _close(run(given)["out"], wanted["out"])


@on_every_backend(half=BIASED, float=replace(BIASED, **FLOAT), bounded=BOUNDED)
def test_h5_of_keys_that_the_least_number_hides_all_come_zeros_or_the_mean(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["bias"][0, 1, 3] = FINFO.min
    got = run(given)["out"]
    mean = given["v"][0, :, 0].astype("float64").mean(0)
    assert (got[0, 3, 1] == 0).all() or _close(got[0, 3, 1], mean)
    assert _close(np.delete(got, 3, 1), np.delete(run.exact(given)["out"], 3, 1))


@on_every_backend(plain=ATTENTION)
def test_h6_a_score_of_minus_infinity_hides_its_key(run: Run) -> None:
    given = draw(run.work, **SIZES)
    given["q"][..., 7] = 1
    given["k"][0, 38, 0, 7] = -np.inf
    without = {**given, "k": np.delete(given["k"], 38, 1), "v": np.delete(given["v"], 38, 1)}
    assert _close(run(given)["out"], run.exact(without)["out"])
