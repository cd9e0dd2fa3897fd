"""Whether what a rule made of a model's function compiles, and on this CPU computes the same."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from tvm import tirx
from tvm.target import Target

from relax_fusion.hardware.target import is_cpu, is_cuda
from tests.fuzz import rules
from tests.fuzz.processes import in_processes
from tests.support import generic_cases as cases

MOST_BYTES = 64 * 2**20
"""Buffers of a function that is run."""

SECONDS = 120


class Numbers:
    """Checks kernels of one target, each in a process of its own."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.checked = 0

    def check(self, func: tirx.PrimFunc, kernel: tirx.PrimFunc) -> str:
        """Return what is wrong with a kernel of a function, if anything is."""
        if is_cpu(self.target):
            if bytes_of(func) > MOST_BYTES:
                return ""
            work = partial(difference, func=func)
        elif is_cuda(self.target):
            work = partial(compile_error, target=self.target)
        else:
            return ""
        ((_, wrong),) = in_processes(work, [kernel], SECONDS)
        self.checked += 1
        return wrong


def bytes_of(func: tirx.PrimFunc) -> int:
    buffers = [p for p in func.params if tirx.is_buffer_var(p)]
    sizes = [cases.numpy_dtype(str(p.ty.dtype)).itemsize for p in buffers]
    return sum(math.prod(cases.shape_of(p)) * n for p, n in zip(buffers, sizes, strict=True))


def compile_error(kernel: tirx.PrimFunc, target: Target) -> str:
    cases.compiled(kernel, target)
    return ""


def difference(kernel: tirx.PrimFunc, func: tirx.PrimFunc) -> str:
    """Return how the results of a kernel differ from those of the function's own loops.

    Inputs are small integers, mostly zeros: sums of their products have no rounding in any order,
    not even in float16, so that only what is rounded behind them may differ.
    """
    given = [(cases.shape_of(p), str(p.ty.dtype)) for p in rules.inputs(func)]
    smallest = min((size for shape, _ in given for size in shape), default=1)
    arrays = [few_integers(*what, seed, smallest) for seed, what in enumerate(given)]
    try:
        want = rules.run(func, func, arrays)
    except Exception:  # TVM does not compile its own function
        return ""
    rules.compare(rules.run(kernel, func, arrays), want, want)
    return ""


def few_integers(shape: tuple[int, ...], dtype: str, seed: int, rows: int) -> np.ndarray:
    """Return integers from -1 to 1, of which about 64 in a row are paired with another's.

    Those of integer types can be indices of a dimension of `rows`.
    """
    rng = np.random.default_rng(seed)
    if dtype in ("int32", "int64"):
        return rng.integers(0, max(1, rows), shape).astype(dtype)
    if "float" not in dtype:
        return cases.array(shape, dtype, seed)
    part = min(1.0, 8 / math.sqrt(max(1, shape[-1] if shape else 1)))
    values = np.where(rng.random(shape) < part, rng.integers(-1, 2, shape), 0)
    return np.asarray(values).astype(cases.numpy_dtype(dtype))
