"""docs/numerics.md, Roundings: which a fused kernel may drop, and which it keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_fusion.workload.reference import rounded

from ..support.small_workloads import (
    ADAPTED,
    ATTENTION,
    BRAIN,
    CHAIN,
    GATED,
    GATED_SILU,
    LAYER_ADDED,
    LAYER_ROWS,
    OFFSET_ROWS,
    PLAIN,
    POST,
    POST_SUM_KEPT,
    RMS_ADDED,
    RMS_ROWS,
    ROTATED,
    ROTATED_EIGHTS,
    STEPS,
    TWO_MATMULS,
    N,
)
from .backends import Run, draw, on_every_backend, zeros


@on_every_backend(half=PLAIN, brain=replace(PLAIN, **BRAIN))
def test_r1_results_are_rounded_to_nearest_ties_to_even(run: Run) -> None:
    given = zeros(run.work, rows=2)
    one = 2048 if run.work.dtype == "float16" else 256  # the next number is two more
    given["x"][0, :2] = one, 1
    given["x"][1, :2] = one, 3
    given["w0"][:, :2] = 1
    got = run(given)["out0"]
    assert (got[0] == one).all() and (got[1] == one + 4).all()


@on_every_backend(steps=STEPS)
def test_r2_steps_of_an_epilogue_are_not_rounded(run: Run) -> None:
    given = zeros(run.work, rows=2)
    given["x"][:, :2] = 2048, 1
    given["w0"][:, :2] = 1
    given["bias0_0"][:] = 1
    given["residual0_2"][:] = 1
    assert (run(given)["out0"] == 2052).all()  # 2051; of 2049, 2050 and 2051 rounded it were 2049


@on_every_backend(gated=GATED)
def test_r2_gate_and_up_are_not_rounded(run: Run) -> None:
    given = zeros(run.work, rows=2)
    given["x"][:, :2] = 512
    given["w0"][:N, 0] = 2.0**-18
    given["w0"][N:, :2] = 512
    assert (run(given)["out0"] == 1024).all()  # 2^-9 * 2^19


@on_every_backend(rotated=ROTATED, eights=ROTATED_EIGHTS)
def test_r2_a_rotation_is_of_what_is_not_rounded(run: Run) -> None:
    given = zeros(run.work, rows=2)
    given["x"][:, :2] = 2048, 1
    given["w0"][:, :2] = 1
    given["cos0"][:] = 1
    given["sin0"][:] = 0.5
    apart = run.work.outputs[0].rope.distance
    assert (run(given)["out0"][:, apart : 2 * apart] == 3074).all()  # 3073.5; of 2048, it were 3072


@on_every_backend(chain=CHAIN)
def test_r2_the_second_sum_of_a_chain_is_not_rounded(run: Run) -> None:
    given = zeros(run.work, rows=4)
    given["x"][:, :2] = 2048, 2
    given["w0"][[0, 1, 2], [0, 0, 1]] = 1
    given["w1"][:] = 1
    given["residual1_1"][:] = 1
    assert (run(given)["out1"] == 2050).all()  # half of 4098, which is no float16, and 1


def _near(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Tell whether numbers differ by no more than float32 sums of a few terms do."""
    return bool(np.abs(got - wanted).max() <= 2.0**-21 * np.abs(wanted).max() * 4)


def _gamma_in_weights(work: Any, given: dict[str, np.ndarray]) -> np.ndarray:
    """Return a norm and matmul by weights that are rounded after gamma was multiplied in."""
    a = {n: v.astype("float64") for n, v in given.items()}
    scale = 1 / np.sqrt((a["x"] ** 2).mean(-1, keepdims=True) + work.norm.eps)
    factor = a["gamma"] + work.norm.unit_offset
    return scale * a["x"] @ (factor * a["w0"]).astype("float16").astype("float64").T


@on_every_backend(rms=RMS_ROWS, layer=LAYER_ROWS)
def test_r3_normalised_rows_are_rounded_or_not_or_gamma_times_the_weights_is(run: Run) -> None:
    _rounded_at_most_there(run)


@on_every_backend(rms=OFFSET_ROWS[0], layer=OFFSET_ROWS[1])
def test_r9_one_and_gamma_are_added_in_float32(run: Run) -> None:
    _rounded_at_most_there(run)


def _rounded_at_most_there(run: Run) -> None:
    """Assert that nothing is rounded to float16 but what R3 names."""
    given = draw(run.work, rows=4)

    def norm_rounded(values: Any, tensor: Any) -> Any:
        return rounded(values, tensor) if tensor.name == "x_norm" else values

    wanted = [run.exact(given)["out0"], run.exact(given, rounding=norm_rounded)["out0"]]
    assert not _near(wanted[0], wanted[1])
    if run.work.norm.kind == "rms":
        wanted.append(_gamma_in_weights(run.work, given))
    got = run(given)["out0"]
    assert any(_near(got, values) for values in wanted)


@on_every_backend(attention=ATTENTION)
def test_r4_scores_are_not_rounded_and_weights_at_most_once(run: Run) -> None:
    given = draw(run.work, batch=1, q_len=5, kv_len=40)
    given["q"] *= np.float16(8)
    given["k"] *= np.float16(8)
    exact = run.exact(given)["out"]
    sizes = run.exact({**given, "v": np.abs(given["v"])})["out"]
    assert (np.abs(run(given)["out"] - exact) <= 2.0**-10 * sizes).all()


@on_every_backend(rms=RMS_ADDED, layer=LAYER_ADDED)
def test_r5_the_sum_in_front_of_a_norm_is_rounded(run: Run) -> None:
    given = zeros(run.work, rows=2)
    given["x"][:] = 2048
    given["residual"][:, ::2] = 1
    given["gamma"][:] = 1
    given["w0"][:, ::2] = 1
    given["w0"][:, 1::2] = -1
    got = run(given)
    assert (got["x_sum"] == 2048).all()
    assert (got["out0"] == 0).all()  # all features are equal


@on_every_backend(half=CHAIN, brain=replace(TWO_MATMULS, dtype="bfloat16").chain)
def test_r6_the_tensor_between_two_matmuls_is_rounded(run: Run) -> None:
    given = zeros(run.work, rows=4)
    one = 2048 if run.work.dtype == "float16" else 256
    given["x"][:, :2] = one, 1
    given["w0"][0, :2] = 1
    given["w1"][:, 0] = 2
    assert (run(given)["out1"] == one).all()


@on_every_backend(half=ADAPTED, brain=replace(ADAPTED, **BRAIN))
def test_r6_the_tensor_of_an_adapter_is_rounded(run: Run) -> None:
    given = zeros(run.work, rows=4)
    one = 2048 if run.work.dtype == "float16" else 256
    given["x"][:, :2] = one, 1
    given["w0_a"][0, :2] = 1
    given["w0_b"][:, 0] = 1
    given["w0"][:, 0] = -2
    assert (run(given)["out0"] == 0).all()  # of 2 * (one + 1) - 2 * one


@on_every_backend(post=POST, kept=POST_SUM_KEPT)
def test_r10_rows_that_a_residual_is_added_to_are_not_rounded(run: Run) -> None:
    given = zeros(run.work, rows=2)
    given["x"][:] = 1
    given["gamma_first"][:] = 2.0**-10 + 1 - run.work.norm.first.unit_offset
    given["residual"][:] = 3 + 2.0**-9
    sums = run(given)["x_sum"]
    assert (sums == 4 + 2.0**-8).all()  # of 1.000476; of 1, to which it is rounded, it were 4


MARKED = {RMS_ADDED: "x_sum", POST: "x_sum", LAYER_ADDED: "x_sum", CHAIN: "out0", ADAPTED: "low0"}


@pytest.mark.parametrize("work", [*MARKED, GATED_SILU, STEPS, ROTATED, ATTENTION])
def test_r8_rounds_marks_what_is_rounded_in_every_kernel(work: Any) -> None:
    assert [t.name for t in work.graph.tensors if t.rounds] == [*filter(None, [MARKED.get(work)])]
