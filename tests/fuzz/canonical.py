"""The canonical passes on random functions: the same numbers, and nothing to do the second time."""

from __future__ import annotations

import numpy as np
from tvm import ir, relax
from tvm.ir.transform import Pass

from relax_fusion.algebra import AlgebraOptions, SimplifyAlgebra
from relax_fusion.canonical import (
    FuseNormRotation,
    MendImports,
    MergeDuplicates,
    MoveNorms,
    MoveReshapes,
    MoveSlices,
    MoveTransposes,
    MoveViews,
    PadRotations,
    RecogniseOperators,
    SplitProjections,
)
from relax_fusion.equivalence.operators import Misfit, Uninterpreted

from . import evaluation
from .bindings import Function, writes
from .matches import TOLERANCE, Wrong

STAGE: tuple[Pass, ...] = (
    *(MendImports(), MergeDuplicates(), MoveReshapes(), MoveTransposes()),
    *(
        RecogniseOperators(),
        PadRotations(),
        MoveSlices(),
        SplitProjections(),
        MoveNorms(),
        MoveViews(),
        SimplifyAlgebra(AlgebraOptions(validate="strict")),
        FuseNormRotation(),
    ),
)
"""In the order of the pipeline."""


def canonical(mod: ir.IRModule, once: bool = True) -> ir.IRModule:
    """Run the passes in order; a second run of each has to find nothing if once is enough."""
    for made in STAGE:
        mod = made(mod)
        relax.analysis.well_formed(mod)  # raises
        if once and not made(mod).same_as(mod):
            raise Wrong(f"a second run of {made.info.name} changes the module")
    return mod


def check(function: Function, seed: int) -> str:
    """Compare a function with its canonical form; return what came of it.

    Raises
    ------
    Wrong
        If they compute different numbers, or a second run finds something.
    """
    try:
        before = function.module()
    except ValueError:  # sizes that TVM infers in another form the next time
        return "not typed"
    # Where something is written, a second run may see that less shares its memory
    once = not any(writes(value) for _, value, _ in function.bindings)
    after = canonical(before, once)
    if after.same_as(before):
        return "unchanged"
    sizes = evaluation.sizes_of(before["main"])
    try:
        args = evaluation.arguments(before["main"], sizes, seed)
        args = [_special(a, seed) if seed % 4 == 0 else a for a in args]
        wanted = evaluation.run(before["main"], sizes, args)
    except (Misfit, Uninterpreted, ValueError, IndexError, TypeError, ZeroDivisionError):
        return "not computed"
    try:
        made = evaluation.run(after["main"], evaluation.sizes_of(after["main"]), args, mod=after)
    except Uninterpreted:  # a kernel of sizes that are computed
        return "not computed"
    pairs = zip((*wanted[0], *wanted[1]), (*made[0], *made[1]), strict=True)
    for number, (a, b) in enumerate(pairs):
        told = _compared(np.asarray(a), np.asarray(b))
        if told is not None:
            raise Wrong(f"result {number} {told}")
    return "compared"


def _special(array: np.ndarray, seed: int) -> np.ndarray:
    """Put what is no number, and zeros, among numbers."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        return array
    rng = np.random.default_rng(seed)
    kinds = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], array.shape)
    return np.where(rng.random(array.shape) < 0.1, kinds, array)


def _compared(old: np.ndarray, new: np.ndarray) -> str | None:
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"is {new.dtype} {list(new.shape)}, not {old.dtype} {list(old.shape)}"
    if old.dtype.kind != "f":
        return None if np.array_equal(old, new) else "differs"
    finite = old[np.isfinite(old)]
    scale = float(np.max(np.abs(finite), initial=0.0)) or 1.0
    if np.allclose(new, old, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True):
        return None
    return f"is off, by {np.nanmax(np.abs(old - new)) / scale:.3g} of its largest"
