"""Chains of two matmuls with inputs and a float64 reference, for any target."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from relax_fusion.workload import Chain
from relax_fusion.workload.reference import Rounding, evaluate, kept

from .accuracy import nudged, rms
from .workloads import Arrays, inputs, results


@dataclass(frozen=True)
class ChainCase:
    """A workload, and the values of its rows and its batch, where they are dynamic."""

    work: Chain
    dynamic_rows: int = 0
    dynamic_batch: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dynamic dimensions, by name."""
        return {"rows": self.dynamic_rows, "batch": self.dynamic_batch}

    def out_shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        return results(self.work, self.sizes)[0][0]

    def inputs(self) -> Arrays:
        """Return the operands by name, in order."""
        return inputs(self.work, self.sizes, seed=5)

    def reference(self, arrays: Arrays, dtype: str, rounding: Rounding = kept) -> np.ndarray:
        """Compute the result with sums in `dtype`, the intermediate rounded to the workload's."""
        return evaluate(self.work.graph, arrays, dtype, rounding)["out1"]

    def check(self, arrays: Arrays, got: np.ndarray) -> None:
        """Hold the result to twice the error of float32 sums, and one rounding step.

        Both are measured against float64 with the intermediate rounded as a tensor would be.  The
        error is numpy's, or that of inputs that are off by half a step of float32, whichever is
        larger: a few elements may be exact by chance.
        """
        exact = self.reference(arrays, "float64")
        others = [self.reference(arrays, "float32").astype(got.dtype)]
        for seed in range(4):
            rng = np.random.default_rng(seed)
            moved = {name: nudged(values, "float32", rng) for name, values in arrays.items()}
            others.append(self.reference(moved, "float64"))
        assert got.shape == exact.shape and str(got.dtype) == self.work.out_dtype
        step = float(ml_dtypes.finfo(got.dtype).eps) * rms(exact)
        error, limit = rms(got - exact), 2 * max(rms(o - exact) for o in others) + step
        assert error <= limit, f"error {error:.3g}, limit {limit:.3g}"
