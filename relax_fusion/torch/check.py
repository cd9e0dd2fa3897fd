"""Compares compiled pieces with PyTorch, call by call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import warn

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest difference of a result, by its dtype, in parts of its largest element.

It is about a hundred roundings in float32 and ten in half precision; integers must be equal.
"""


class Checked:
    """A piece that is run in PyTorch, too, and warns where results differ."""

    def __init__(self, name: str, program: Callable[..., Any], eager: Callable[..., Any]):
        self._name, self._program, self._eager = name, program, eager

    def __call__(self, *args: Any) -> Any:
        """Return the compiled piece's results."""
        # a cache that is written gets the same rows again, from what it held before
        found = self._program(*args)
        with torch.no_grad():
            expected = self._eager(*args)
        pairs = zip(_several(found), _several(expected), strict=True)
        for n, (got, want) in enumerate(pairs):
            if why := _difference(got, want):
                text = f"relax_fusion: result {n} of {self._name} differs from PyTorch's: {why}"
                warn(text)
        return found


def _several(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """Return how two results differ; nothing where they agree."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {list(got.shape)} for {want.dtype} {list(want.shape)}"
    if not want.dtype.is_floating_point:
        return "" if torch.equal(got, want) else f"{int((got != want).sum())} elements"
    if not torch.equal(got.isnan(), want.isnan()):
        return "NaN at other places"
    finite = want.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return "infinities at other places"
    if not finite.any():
        return ""
    error = float((got[finite].double() - want[finite].double()).abs().max())
    scale = float(want[finite].double().abs().max())
    if error <= TOLERANCE[want.dtype] * max(scale, torch.finfo(want.dtype).tiny):
        return ""
    return f"by {error:.2g}, where the largest element is {scale:.2g}"
