"""Chains of two matmuls with inputs and a float64 reference, for any target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.workload import DynamicDim, MatmulChain
from relax_fusion.workload.reference import Rounding, evaluate, kept

from .accuracy import nudged, rms
from .workloads import Arrays, inputs, results


@dataclass(frozen=True)
class ChainCase:
    """A workload, and the values of its rows and its batch, where they are dynamic."""

    work: MatmulChain
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


HALF = MatmulChain(21, 48, 24, 40, ("nk", "nk"), (), (), "float16", "float16")
MMA = TilePlan(
    *(32, 32, 32),
    reg_m=16,
    reg_n=16,
    lanes=8,
    num_stages=3,
    num_warps=2,
    family="mma",
)


def tensor_core_chains() -> dict[str, tuple[ChainCase, TilePlan]]:
    """Return cases for tensor cores, each with a plan whose tiles do not divide its sizes."""
    wide = replace(MMA, reg_m=32, num_warps=1)
    steps = {"inner": ("bias", 0.5, "silu"), "outer": ("bias", "residual")}
    works: dict[str, tuple[MatmulChain, TilePlan]] = {
        "transposed": (HALF, MMA),
        "as_they_lie": (replace(HALF, layouts=("kn", "kn")), MMA),
        "mixed": (
            replace(HALF, layouts=("nk", "kn"), k=40, r=48, n=56),
            replace(wide, reg_n=32, num_stages=4),
        ),
        "lora": (
            replace(HALF, rows=50, r=8, n=72, k=136, outer=(2.0, "residual")),
            replace(wide, block_n=80),
        ),
        "all_steps": (
            replace(
                HALF,
                dtype="bfloat16",
                out_dtype="bfloat16",
                r=20,
                layouts=("kn", "nk"),
                k=36,
                n=36,
                **steps,
            ),
            replace(MMA, lanes=4, num_stages=2),
        ),
        "batched": (
            replace(HALF, batch=2, layouts=("kn", "kn"), r=72, rows=17),
            replace(MMA, block_m=16, num_warps=1, block_n=48),
        ),
        "dynamic": (replace(HALF, rows=DynamicDim("rows")), MMA),
    }
    return {name: (ChainCase(work, 35), plan) for name, (work, plan) in works.items()}
