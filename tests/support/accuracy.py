"""How far a result may be from float64: as far as rounding its inputs would move it.

No other library's error is the measure.  It depends on the instructions that the processor has, and
a peer that happens to be exact would fail what is right.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np


def rms(values: np.ndarray) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype="float64"))))


def eps_of(dtype: str) -> float:
    """Return the distance from 1 to the next number of a dtype."""
    return float(ml_dtypes.finfo(dtype).eps)


def nudged(values: np.ndarray, dtype: str, seed: int | np.random.Generator = 0) -> np.ndarray:
    """Return numbers in float64, each off by about half a rounding step of `dtype`."""
    noise = np.random.default_rng(seed).standard_normal(values.shape)
    return values.astype("float64") * (1 + eps_of(dtype) / 2 * noise)


def assert_accurate(
    got: np.ndarray, exact: np.ndarray, moved: np.ndarray, dtype: str, terms: int = 0
) -> None:
    """Check a result against float64.

    Where each of `terms` additions rounds by half a step at most, evenly spread, their errors grow
    to ``sqrt(terms / 6)`` steps: the sums in between are smaller than the last.  Twice what that
    and the rounded inputs make is allowed, and one rounding step of the result.  Errors are root
    mean squares, because the largest of a few thousand is a matter of luck.

    Parameters
    ----------
    got : numpy.ndarray
        The result.
    exact, moved : numpy.ndarray
        What float64 makes of the inputs, and of inputs that are `nudged`; several of the latter,
        along an axis in front, where there are too few elements for a mean.
    dtype : str
        In which the result was computed.
    terms : int
        Length of the longest sum that is added up in `dtype`; 0 where sums are wider.
    """
    assert got.shape == exact.shape and np.isfinite(got).all()
    error, inputs, step = rms(got - exact), rms(moved - exact), eps_of(dtype) * rms(exact)
    limit = 2 * math.sqrt(1 + terms / 6) * inputs + step
    assert error <= limit, f"error {error:.3g}, limit {limit:.3g}, of the inputs {inputs:.3g}"
