"""Small workloads and plans of the matmul kernel for Hopper, and their operands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np

from relax_fusion.estimator import Problem, violations
from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul
from relax_fusion.estimator.families.cuda_matmul.tiles import CudaPlan
from relax_fusion.hardware import DeviceSpec
from relax_fusion.workload import (
    Adapter,
    DynamicDim,
    GatedFFN,
    NormMatmul,
    Projection,
    Rope,
    WeightLayout,
)
from relax_fusion.workload.reference import evaluate, numpy_dtype

from ..support.accuracy import eps_of
from ..support.emulated import H200, How, emulated
from ..support.workloads import Arrays, shape_of

ROWS, K, N = DynamicDim("rows"), 136, 136
SMALL = replace(H200, sm_count=4)
"""A device on which a thread block has several tiles."""

HOWS = (How(), How(late=True), How(seed=1), How(seed=2, late=True), How(seed=3))


def plan(block_m: int, block_n: int, **fields: int) -> CudaPlan:
    """Return a plan with two stages for each set of warp groups."""
    sets = fields.get("groups_k", 1)
    groups = prod(fields.get(name, 1) for name in ("groups_m", "groups_n", "groups_k", "turns"))
    given = {"num_stages": 2 * sets, "num_warps": 4 * (groups + 1), **fields}
    given.setdefault("block_k", 64)
    return CudaPlan(block_m, block_n, family="cuda", **given)


def matmul(
    *steps: Any, k: int = K, n: int = N, dtype: str = "float16", layout: WeightLayout = "nk"
) -> NormMatmul:
    """Return a matmul with steps."""
    work = NormMatmul(ROWS, k, (Projection(n, layout, steps),), None, dtype, dtype)
    return replace(work, allow_tf32=dtype == "float32")


def integers(*steps: Any, out: str = "int32", dtype: str = "int8", k: int = 272) -> NormMatmul:
    """Return a matmul of integers with steps."""
    return replace(matmul(*steps, dtype=dtype, k=k), out_dtype=out)


def several(*widths: int) -> NormMatmul:
    """Return matmuls of the same rows with biases, which a launch computes together."""
    outputs = tuple(Projection(n, "nk", ("bias",)) for n in widths)
    return NormMatmul(ROWS, K, outputs, None, "float16", "float16")


def rotated(
    *outputs: tuple[int, Rope | None], dtype: str = "float16", layout: WeightLayout = "nk"
) -> NormMatmul:
    """Return matmuls with biases, of whose features some turn."""
    found = tuple(Projection(n, layout, ("bias",), rope) for n, rope in outputs)
    return NormMatmul(ROWS, K, found, None, dtype, dtype)


def adapted(*ranks: int, steps: tuple[Any, ...] = (), **changes: Any) -> NormMatmul:
    """Return matmuls with adapters, of as many weights as there are ranks."""
    fields = {"k": K, "n": N, "dtype": "float16", "layout": "nk", "a": "nk", **changes}
    each = (Adapter(rank, fields["a"], fields.get("scale", 0.5)) for rank in ranks)
    outputs = (Projection(fields["n"], fields["layout"], steps, adapter=a) for a in each)
    return NormMatmul(ROWS, fields["k"], tuple(outputs), None, fields["dtype"], fields["dtype"])


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
        wrong = [*violations(self.plan, self.work, H200)]
        return family.refuses(Problem(self.work, H200)) is None and not wrong

    def inputs(self) -> dict[str, np.ndarray]:
        """Return operands of few bits, whose products and sums float32 holds."""
        rng, drawn = np.random.default_rng(len(self.work.graph.inputs)), {}
        for operand in self.work.graph.inputs:
            shape = shape_of(operand, {"rows": self.rows, "positions0": self.rows // 2})
            dtype, name = numpy_dtype(operand.dtype), operand.name
            if dtype.kind in "iu":  # words hold all that there are
                info, whole = np.iinfo(dtype), self.is_whole or name.startswith("w")
                least, most = (info.min, info.max) if whole else (max(info.min, -8), 8)
                drawn[name] = rng.integers(least, most, shape, dtype, endpoint=True)
                continue
            values = rng.integers(-7, 8, shape) / 8
            values *= 1 / 8 if name.startswith("w") else 1
            if name.endswith("_scale"):
                values = 2.0 ** rng.integers(-7, -3, shape)
            drawn[name] = values.astype(dtype)
        return drawn

    @property
    def is_whole(self) -> bool:
        return self.work.out_dtype == "int32"

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
        if self.is_whole:
            np.testing.assert_array_equal(got, exact, err_msg="wrong at")
            return
        step = eps_of(self.work.out_dtype) * 2.0 ** np.floor(
            np.log2(np.maximum(np.abs(exact), 2**-14))
        )
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
    "groups_tall": Case(matmul("bias", 0.5, "residual"), plan(24, 128, groups_n=2), 90),
    "groups_wide": Case(matmul("bias", dtype="bfloat16"), plan(80, 64, groups_m=2)),
    "groups_swapped": Case(
        matmul("bias", "residual"), plan(128, 48, swapped=1, groups_m=2, blocks=1), 150
    ),
    "stages_of_residuals": Case(
        matmul("residual"), plan(192, 136, swapped=1, groups_m=3, num_stages=3), 250
    ),
    "three_groups": Case(gated(bias=False), plan(16, 192, groups_n=3)),
    "sharing_weights": Case(matmul("bias"), plan(16, 64, cluster_m=2)),
    "sharing_both": Case(matmul("residual"), plan(32, 64, cluster_m=2, cluster_n=2)),
    "sharing_swapped": Case(gated(), plan(64, 32, swapped=1, cluster_m=2), 150),
    "split": Case(matmul("bias", "residual", k=520), plan(16, 64, split_k=2)),
    "sets": Case(matmul("bias", "residual", k=456), plan(24, 64, groups_k=2)),
    "sets_split": Case(matmul(k=400), plan(16, 64, groups_k=3, split_k=2)),
    "split_swapped": Case(matmul("residual", k=328), plan(64, 16, swapped=1, split_k=4)),
    "split_groups": Case(gated(), plan(32, 64, groups_m=2, split_k=2)),
    "turns": Case(matmul("bias", "gelu"), plan(16, 64, turns=2, num_stages=3)),
    "turns_few_steps": Case(matmul(k=64), plan(16, 64, turns=2, num_stages=3)),
    "turns_swapped": Case(gated(), plan(64, 32, swapped=1, turns=2, cluster_m=2), 150),
    "three_weights": Case(several(136, 72, 200), plan(16, 64)),
    "three_weights_swapped": Case(several(40, 8, 24), plan(64, 16, swapped=1)),
    "turned": Case(matmul("bias", layout="kn"), plan(16, 128, groups_n=2)),
    "turned_gate": Case(gated(layout="kn"), plan(16, 64)),
    "int8": Case(integers(), plan(16, 64, block_k=128)),
    "uint8_parts": Case(integers(dtype="uint8"), plan(48, 128, block_k=128)),
    "int8_swapped": Case(integers(), plan(128, 48, block_k=128, swapped=1, groups_m=2), 150),
    "int8_split": Case(integers(k=1040), plan(24, 64, block_k=128, split_k=4)),
    "int8_sharing": Case(integers(), plan(16, 64, block_k=128, cluster_m=2)),
    "int8_scaled": Case(
        integers("scale", 0.5, "bias", "residual", out="float32"), plan(32, 64, block_k=128)
    ),
    "int8_to_float16": Case(
        integers("scale", "bias", "silu", out="float16"), plan(16, 128, block_k=128, groups_n=2)
    ),
    "uint8_to_bfloat16": Case(
        integers("scale", out="bfloat16", dtype="uint8"), plan(64, 32, block_k=128, swapped=1)
    ),
    "tf32": Case(matmul(*EVERY_STEP, dtype="float32"), plan(40, 64, block_k=32)),
    "tf32_parts": Case(matmul("residual", dtype="float32"), plan(16, 128, block_k=32)),
    "tf32_swapped": Case(
        matmul(*EVERY_STEP, dtype="float32"), plan(64, 40, block_k=32, swapped=1), 150
    ),
    "tf32_turns": Case(
        matmul("bias", dtype="float32"), plan(16, 64, block_k=32, turns=2, num_stages=3)
    ),
    "tf32_split": Case(matmul("bias", k=140, dtype="float32"), plan(8, 64, block_k=32, split_k=4)),
    "tf32_gated": Case(
        gated(dtype="float32", out_dtype="float32", allow_tf32=True), plan(16, 64, block_k=32)
    ),
    "tf32_to_float16": Case(
        replace(matmul("bias", dtype="float32"), out_dtype="float16"), plan(16, 64, block_k=32)
    ),
    "float16_to_float32": Case(replace(matmul("bias", "scale"), out_dtype="float32"), plan(24, 64)),
    "bfloat16_to_float32": Case(
        replace(matmul("bias", dtype="bfloat16", n=140), out_dtype="float32"),
        plan(64, 24, swapped=1),
    ),
    "turned_up_first": Case(gated(layout="kn", gate_first=False), plan(24, 64, split_k=2)),
    "unaligned": Case(matmul(*EVERY_STEP, n=131), plan(40, 128)),
    "unaligned_swapped": Case(matmul("residual", n=70), plan(64, 40, swapped=1)),
    "unaligned_sharing": Case(matmul("residual", n=131), plan(32, 64, cluster_m=2, cluster_n=2)),
    "unaligned_split": Case(matmul("bias", "residual", k=520, n=132), plan(16, 64, split_k=2)),
    "unaligned_three": Case(several(135, 72, 1), plan(16, 64)),
    "unaligned_gate": Case(replace(gated(), n=75), plan(16, 64)),
    "unaligned_turns": Case(matmul("bias", n=131), plan(16, 64, turns=2, num_stages=3)),
    "unaligned_words": Case(
        replace(matmul("bias", n=133, dtype="bfloat16"), out_dtype="float32"),
        plan(64, 24, swapped=1),
    ),
    "unaligned_int8": Case(
        replace(integers(), outputs=(Projection(133, "nk"),)), plan(16, 64, block_k=128)
    ),
    "unaligned_adapter": Case(adapted(16, n=131), plan(16, 64)),
    "adapter": Case(adapted(16), plan(16, 64)),
    "adapter_steps": Case(adapted(72, steps=EVERY_STEP), plan(40, 128)),
    "adapter_swapped": Case(
        adapted(8, steps=("residual",), dtype="bfloat16", a="kn"), plan(64, 40, swapped=1)
    ),
    "adapter_split": Case(adapted(16, steps=("bias",), k=328), plan(16, 64, split_k=4)),
    "adapter_shared": Case(adapted(64, scale=1.0), plan(32, 64, cluster_m=2, cluster_n=2)),
    "adapter_turns": Case(adapted(24), plan(16, 64, turns=2, num_stages=3)),
    "adapters": Case(adapted(16, 40, 8, steps=("bias",)), plan(16, 128, groups_n=2)),
    "adapter_turned": Case(adapted(16, layout="kn"), plan(16, 64), early=False),
}

ROPE = Rope(128, 128, "float16")
SMALL_ROPE = Rope(64, 128, "float16")
NEIGHBOURS = replace(SMALL_ROPE, pairing="neighbours")
ROTATED = {
    "rotated": Case(rotated((128, SMALL_ROPE)), plan(16, 64)),
    "rotated_qkv": Case(
        rotated((256, replace(ROPE, features=256)), (128, ROPE), (128, None)), plan(24, 64)
    ),
    "rotated_swapped": Case(
        rotated((192, replace(SMALL_ROPE, dtype="float32")), dtype="bfloat16"),
        plan(64, 32, swapped=1),
    ),
    "rotated_behind_the_last": Case(rotated((128, SMALL_ROPE)), plan(64, 96, swapped=1)),
    "rotated_parts_of_heads": Case(
        rotated((192, replace(SMALL_ROPE, rotary_dim=16))), plan(16, 64)
    ),
    "rotated_in_periods": Case(
        rotated((192, Rope(32, 64, "float16", DynamicDim("s"), period=96))), plan(32, 128)
    ),
    "rotated_by_pair": Case(
        rotated((128, replace(SMALL_ROPE, by_pair=True, positions=7))), plan(16, 64)
    ),
    "rotated_neighbours": Case(rotated((192, NEIGHBOURS), (72, None)), plan(24, 64)),
    "rotated_neighbours_swapped": Case(
        rotated((192, replace(NEIGHBOURS, by_pair=True)), (72, None)), plan(64, 40, swapped=1)
    ),
    "rotated_neighbours_by_pair": Case(
        rotated((128, replace(NEIGHBOURS, by_pair=True, rotary_dim=24, dtype="float32"))),
        plan(40, 128),
    ),
    "rotated_groups": Case(rotated((256, replace(ROPE, features=256))), plan(24, 128, groups_n=2)),
    "rotated_groups_wide": Case(
        rotated((128, ROPE), dtype="float16"), plan(64, 128, swapped=1, groups_n=2)
    ),
    "rotated_turns": Case(
        rotated((256, SMALL_ROPE)), plan(64, 32, swapped=1, turns=2, cluster_m=2), 150
    ),
    "rotated_split": Case(rotated((128, ROPE), (128, None)), plan(24, 64, split_k=2)),
    "rotated_sets": Case(rotated((128, ROPE)), plan(40, 64, groups_k=2)),
    "rotated_split_swapped": Case(rotated((128, NEIGHBOURS)), plan(64, 48, swapped=1, split_k=2)),
    "rotated_sharing": Case(rotated((128, SMALL_ROPE)), plan(16, 128, cluster_m=2, groups_n=2)),
    "rotated_kn": Case(rotated((256, ROPE), layout="kn"), plan(16, 128)),
    "rotated_neighbours_kn": Case(rotated((192, NEIGHBOURS), layout="kn"), plan(24, 64)),
    "rotated_by_other_angles": Case(
        rotated((128, ROPE), (128, replace(SMALL_ROPE, dtype="float32")), (128, SMALL_ROPE)),
        plan(16, 64),
    ),
    "rotated_beside_steps": Case(
        replace(
            rotated((128, ROPE)),
            outputs=(Projection(128, "nk", (), ROPE), Projection(72, "nk", (0.5, "residual"))),
        ),
        plan(24, 64),
    ),
}
"""Features that turn: SMALL_ROPE has pairs 32 apart, ROPE 64, as heads of LLaMA have."""

CASES |= ROTATED
