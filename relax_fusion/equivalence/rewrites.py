"""Checking a rewrite: expressions before and after it, on the same inputs, ordinary and hard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import ir, relax

from .comparison import TOLERANCE
from .inputs import LENGTHS
from .interpreter import Interpreter, Value, stored
from .operators import Array, Misfit, Uninterpreted
from .shrinking import MOST_ELEMENTS, SMALL
from .sizes import WHOLE, Shrink, Sizes, variables

KINDS = ("ordinary", "positive", "zeros", "not a number", "large", "infinite")
"""What inputs are: zeros, NaN and infinities stand among ordinary numbers; the last two only where
results are to be the same bit by bit."""

_SPECIAL = {"zeros": 0.0, "not a number": np.nan, "infinite": -np.inf}

Bound = tuple[relax.Var, relax.Expr]


@dataclass(frozen=True)
class Rewrite:
    """What is computed before and after."""

    leaves: Sequence[relax.Var]
    """What both are computed of."""
    before: Sequence[Bound]
    after: Sequence[Bound]
    """Bindings, in order."""
    results: tuple[relax.Expr, relax.Expr]
    """The result of either."""
    exact: bool
    """Whether NaN and infinities are to be the same, too."""

    def difference(self) -> str | None:
        """Say on which inputs the results differ; None if on none.

        Raises `Uninterpreted` if an operator has no meaning here, or all sizes are too large.
        """
        tried = 0
        for sizes in self._sizes():
            for kind in KINDS if self.exact else KINDS[:-2]:
                try:
                    told = self._at(sizes, kind)
                except Misfit:
                    break
                tried += 1
                if told is not None:
                    return f"{told}; inputs: {kind}"
        if not tried:
            raise Uninterpreted("sizes that are too large to compute")
        return None

    def _sizes(self) -> Iterator[Sizes]:
        vars_ = [*self.leaves, *(v for v, _ in (*self.before, *self.after))]
        dims = [d for v in vars_ for d in _dims(v)]
        symbols = sorted(variables(dims), key=str)
        for lengths in (LENGTHS, LENGTHS[::-1], (1,)):
            named = {v: lengths[i % len(lengths)] for i, v in enumerate(symbols)}
            for shrink in (WHOLE, Shrink(64, 64), Shrink(64, 8)):
                sizes = Sizes(named, shrink)
                elements = [math.prod(sizes.shape(_dims(v))) for v in vars_]
                if max(elements, default=0) <= (SMALL if symbols else MOST_ELEMENTS // 8):
                    yield sizes
                    break

    def _at(self, sizes: Sizes, kind: str) -> str | None:
        rng = np.random.default_rng(len(kind))
        values = {leaf: _drawn(rng, leaf, sizes, kind) for leaf in self.leaves}
        old = _computed(self.before, self.results[0], values, sizes)
        new = _computed(self.after, self.results[1], values, sizes)
        return _told(old, new, self.exact)


def _dims(var: relax.Var) -> list[ir.Expr]:
    shape = var.ty.shape if isinstance(var.ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        raise Uninterpreted(f"a tensor of type {var.ty}")
    return list(shape.values)


def _computed(
    bindings: Sequence[Bound], result: relax.Expr, given: Mapping[relax.Var, Value], sizes: Sizes
) -> Array:
    worker, values = Interpreter(), dict(given)
    worker.run(bindings, values, sizes)
    return np.asarray(worker.value(result, values, sizes))


def _drawn(rng: np.random.Generator, leaf: relax.Var, sizes: Sizes, kind: str) -> Array:
    shape, dtype = sizes.shape(_dims(leaf)), str(leaf.ty.dtype)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if "int" in dtype:
        return stored(rng.integers(0, 4, shape), dtype, rounds=False)
    made = rng.standard_normal(shape)
    made = np.abs(made) + 0.1 if kind == "positive" else made * (1e3 if kind == "large" else 1)
    special = _SPECIAL.get(kind)
    return made if special is None else np.where(rng.random(shape) < 0.1, special, made)


def _told(before: Array, after: Array, exact: bool) -> str | None:
    if before.shape != after.shape:
        return f"shapes are {list(before.shape)} and {list(after.shape)}"
    if before.dtype.kind != "f":
        return None if np.array_equal(before, after) else "numbers differ"
    finite = np.isfinite(before)
    scale = float(np.max(np.abs(before[finite]), initial=0.0)) or 1.0
    checked = np.ones_like(finite) if exact else finite
    close = np.isclose(after, before, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
    if np.all(close | ~checked):
        return None
    with np.errstate(invalid="ignore"):
        off = np.nanmax(np.abs(after - before), initial=0.0, where=finite)
    return f"results differ by {off / scale:.3g} of the largest"
