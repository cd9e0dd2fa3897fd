"""Generated text as functions of Triton."""

from __future__ import annotations

import hashlib
import linecache
from functools import lru_cache

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ..math import activate
from .text import KernelText


@triton.jit
def finite(x):
    """Return 0 for minus infinity, and anything else as it is."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def ratio(x, y):
    """Return ``x / y``, and 0 for a divisor of 0."""
    return tl.where(y == 0.0, y, x / tl.where(y == 0.0, 1.0, y))


@triton.jit
def quotient(x, y):
    """Return ``x / y`` rounded down; Triton's ``//`` rounds towards 0."""
    return x // y - tl.where(x % y < 0, 1, 0)


@triton.jit
def remainder(x, y):
    """Return what ``y * quotient(x, y)`` leaves of ``x``; Triton's ``%`` can be less than 0."""
    return (x % y + y) % y


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Return the maximum along an axis; that of NaN is NaN."""
    return tl.reduce(x, AXIS, _larger)


@lru_cache(maxsize=4096)
def function_of(kernel: KernelText) -> JITFunction:
    """Return a kernel that can be compiled, or called.

    Its source is found by Python's `inspect`, as that of a function in a file.
    """
    digest = hashlib.sha256(kernel.text.encode()).hexdigest()[:16]
    file = f"<generated {kernel.name} {digest}>"
    lines = kernel.text.splitlines(keepends=True)
    linecache.cache[file] = (len(kernel.text), None, lines, file)
    known = {"tl": tl, "triton": triton, "__name__": __name__}
    for given in (activate, finite, ratio, quotient, remainder, largest):
        known[given.__name__] = given
    exec(compile(kernel.text, file, "exec"), known)
    return known[kernel.name]
