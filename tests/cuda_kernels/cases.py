"""Small workloads and plans of the matmul kernel for Hopper, and their operands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul
from relax_fusion.estimator.families.cuda_matmul.tiles import CudaPlan
from relax_fusion.hardware import DeviceSpec
from relax_fusion.workload import DynamicDim, GatedFFN, NormMatmul, Projection, WeightLayout
from relax_fusion.workload.reference import evaluate, numpy_dtype

from ..support.accuracy import eps_of
from ..support.emulated import H200, How, emulated
from ..support.workloads import Arrays, shape_of

ROWS, K, N = DynamicDim("rows"), 136, 136
SMALL = replace(H200, sm_count=4)
"""A device on which a thread block has several tiles."""

HOWS = (How(), How(late=True), How(seed=1), How(seed=2, late=True), How(seed=3))


def plan(block_m: int, block_n: int, **fields: int) -> CudaPlan:
    """Return a plan with two stages."""
    groups = fields.get("groups_m", 1) * fields.get("groups_n", 1) * fields.get("turns", 1)
    given = {"num_stages": 2, "num_warps": 4 * (groups + 1), **fields}
    return CudaPlan(block_m, block_n, 64, backend="triton", family="cuda", **given)


def matmul(
    *steps: Any, k: int = K, n: int = N, dtype: str = "float16", layout: WeightLayout = "nk"
) -> NormMatmul:
    """Return a matmul with steps."""
    return NormMatmul(ROWS, k, (Projection(n, layout, steps),), None, dtype, dtype)


def several(*widths: int) -> NormMatmul:
    """Return matmuls of the same rows with biases, which a launch computes together."""
    outputs = tuple(Projection(n, "nk", ("bias",)) for n in widths)
    return NormMatmul(ROWS, K, outputs, None, "float16", "float16")


def gated(merged: bool = True, gate_first: bool = True, **changes: Any) -> GatedFFN:
    """Return two matmuls with biases, and their product."""
    types = {"dtype": "float16", "out_dtype": "float16", "bias": True, **changes}
    layout = types.pop("layout", "nk")
    return GatedFFN(ROWS, K, N, layout, merged, gate_first, "silu", None, **types)


@dataclass(frozen=True)
class Case:
    """A workload under a plan, with some rows."""

    work: NormMatmul | GatedFFN
    plan: CudaPlan
    rows: int = 43
    dev: DeviceSpec = SMALL
    early: bool = True

    @property
    def is_allowed(self) -> bool:
        family = CudaMatmul()
        wrong = [*family.violations(self.plan, self.work, H200)]
        return family.refuses(self.work, H200) is None and not wrong

    def inputs(self) -> dict[str, np.ndarray]:
        """Return operands of few bits, whose products and sums float32 holds."""
        rng, drawn = np.random.default_rng(len(self.work.graph.inputs)), {}
        for operand in self.work.graph.inputs:
            shape, name = shape_of(operand, {"rows": self.rows}), operand.name
            if np.dtype(operand.dtype).kind in "iu":  # words
                limits = np.iinfo(operand.dtype)
                drawn[name] = rng.integers(limits.min, limits.max, shape, operand.dtype, True)
                continue
            if name.endswith("_scale"):
                drawn[name] = (2.0 ** rng.integers(-7, -3, shape)).astype(
                    numpy_dtype(operand.dtype)
                )
                continue
            values = rng.integers(-7, 8, shape) / 8
            values *= 1 / 8 if name.startswith("w") else 1
            drawn[operand.name] = values.astype(numpy_dtype(operand.dtype))
        return drawn

    def exact(self) -> dict[str, np.ndarray]:
        return _exact(self)

    def run(self, how: How) -> Arrays:
        return emulated(self.work, self.plan, self.inputs(), how, self.dev, self.early)

    def check(self, how: How) -> None:
        """Check one rounding of results, and what activations may err by (F7 of numerics.md)."""
        got, exact = self.run(how), self.exact()
        for name, result in got.items():
            self._check(result, exact[name])

    def _check(self, got: np.ndarray, exact: np.ndarray) -> None:
        assert got.shape == exact.shape and len(got) == self.rows
        step = eps_of(self.work.dtype) * 2.0 ** np.floor(np.log2(np.maximum(np.abs(exact), 2**-14)))
        errs = 0.0 if self.is_linear else 2.0**-18 * np.abs(exact) + 2.0**-20
        error = np.abs(got.astype("float64") - exact)
        assert (error <= step / 2 + errs).all(), f"wrong at {np.argwhere(error > step / 2 + errs)}"

    @property
    def is_linear(self) -> bool:
        if isinstance(self.work, GatedFFN):
            return False
        steps = [step for product in self.work.outputs for step in product.epilogue]
        return all(step in ("bias", "residual") or isinstance(step, float) for step in steps)


@cache
def _exact(case: Case) -> dict[str, np.ndarray]:
    return evaluate(case.work.graph, case.inputs())


EVERY_STEP = ("bias", "silu", "scale", 0.75, "bias", "residual")
CASES = {
    "plain": Case(matmul(), plan(16, 64)),
    "not_early": Case(matmul("bias"), plan(16, 64), early=False),
    "parts": Case(matmul(*EVERY_STEP), plan(40, 128)),
    "swapped": Case(matmul(*EVERY_STEP, dtype="bfloat16"), plan(64, 40, swapped=1)),
    "swapped_parts": Case(matmul("residual"), plan(128, 24, swapped=1), 150),
    "gate_first": Case(gated(), plan(16, 64)),
    "up_first": Case(gated(gate_first=False), plan(16, 64)),
    "gate_and_up": Case(gated(merged=False), plan(16, 64)),
    "gated_swapped": Case(gated(dtype="bfloat16", out_dtype="bfloat16"), plan(64, 16, swapped=1)),
    "groups_tall": Case(matmul("bias", 0.5, "residual"), plan(24, 128, groups_n=2)),
    "groups_wide": Case(matmul("bias", dtype="bfloat16"), plan(80, 64, groups_m=2)),
    "groups_swapped": Case(
        matmul("bias", "residual"), plan(128, 48, swapped=1, groups_m=2, blocks=1), 150
    ),
    "three_groups": Case(gated(bias=False), plan(16, 192, groups_n=3)),
    "sharing_weights": Case(matmul("bias"), plan(16, 64, cluster_m=2)),
    "sharing_both": Case(matmul("residual"), plan(32, 64, cluster_m=2, cluster_n=2)),
    "sharing_swapped": Case(gated(), plan(64, 32, swapped=1, cluster_m=2), 150),
    "split": Case(matmul("bias", "residual", k=520), plan(16, 64, split_k=2)),
    "split_swapped": Case(matmul("residual", k=328), plan(64, 16, swapped=1, split_k=4)),
    "split_groups": Case(gated(), plan(32, 64, groups_m=2, split_k=2)),
    "turns": Case(matmul("bias", "residual"), plan(16, 64, turns=2, num_stages=3)),
    "turns_few_steps": Case(matmul(k=64), plan(16, 64, turns=2, num_stages=3)),
    "turns_swapped": Case(gated(), plan(64, 32, swapped=1, turns=2, cluster_m=2), 150),
    "three_weights": Case(several(136, 72, 200), plan(16, 64)),
    "three_weights_swapped": Case(several(40, 8, 24), plan(64, 16, swapped=1)),
    "turned": Case(matmul("bias", layout="kn"), plan(16, 128, groups_n=2)),
    "turned_gate": Case(gated(layout="kn"), plan(16, 64)),
    "turned_up_first": Case(gated(layout="kn", gate_first=False), plan(24, 64, split_k=2)),
}
