"""Rates that give measured times best: Gauss-Newton steps on the logarithms of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

KNEE, PRIOR, FARTHEST = 0.12, 0.02, 3.0
"""The error beyond which a square becomes a line; the weight of what a rate was before; and the
most that the logarithm of a rate changes."""


def least_errors(errors: Callable[[Any], Any], weights: Any, count: int) -> Any:
    """Return the changes of `count` logarithms of rates that make the sum of errors least.

    What no error tells stays where it is.

    `errors`: takes an array of changes, and returns the logarithms of prices over times.
    `weights` (array of float): how much each error counts.
    """

    def cost(e: Any, x: Any) -> float:
        size = np.abs(e)
        each = np.where(size < KNEE, size * size, KNEE * (2 * size - KNEE))
        return float(weights @ each + PRIOR * x @ x)

    x, unit = np.zeros(count), np.eye(count)
    e, damping = errors(x), 1e-2
    for _ in range(30):
        slopes = slopes_of(errors, x)
        bent = weights / np.maximum(1, np.abs(e) / KNEE)
        matrix = (slopes * bent[:, None]).T @ slopes + PRIOR * unit
        downhill = (slopes * bent[:, None]).T @ e + PRIOR * x
        for _ in range(8):
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), downhill)
            there = np.clip(x - np.clip(step, -0.5, 0.5), -FARTHEST, FARTHEST)
            if cost(errors(there), there) < cost(e, x) * (1 - 1e-5):
                x, e, damping = there, errors(there), damping / 3
                break
            damping *= 4
        else:
            return x
    return x


def slopes_of(errors: Callable[[Any], Any], x: Any) -> Any:
    """Return how much each error (rows) changes with each logarithm (columns)."""
    here = errors(x)
    return np.stack([(errors(x + 1e-3 * one) - here) / 1e-3 for one in np.eye(len(x))], axis=1)
