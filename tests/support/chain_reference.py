"""Relax functions evaluated by numpy in float64: what the compiled ones are measured against.

Nothing is rounded between the operators, so a cast is the identity.  Where `evaluate` is given a
generator of noise, it moves what operators make by as much as rounding would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tvm import relax

from relax_fusion.equivalence import interpreter

from .accuracy import nudged


def evaluate(
    func: relax.Function,
    inputs: list[np.ndarray | int],
    kernels: Mapping[str, Callable[..., np.ndarray]] | None = None,
    noise: np.random.Generator | None = None,
) -> list[np.ndarray]:
    """Run `func` on float64 copies of `inputs`; always return a list of results.

    Parameters
    ----------
    func : relax.Function
        The function.
    inputs : list of numpy.ndarray or int
        Its arguments.
    kernels : mapping of str to callable, optional
        What the PrimFuncs of those names compute.
    noise : numpy.random.Generator, optional
        Moves every float that an operator makes by about half a rounding step of its dtype.
    """

    def moved(var: relax.Var, value: Any) -> Any:
        """Move a result; whole numbers are as rounding leaves them."""
        if not isinstance(var.ty, relax.TensorType) or "float" not in str(var.ty.dtype):
            return value
        near = nudged(value, str(var.ty.dtype), noise)
        return np.where(value == np.round(value), value, near)

    return interpreter.evaluate(func, inputs, kernels, None if noise is None else moved)


def size(dim: Any, values: Mapping[Any, int]) -> int:
    """Return the value of a symbolic size."""
    return interpreter.Sizes(values).of(dim)
