"""Small workloads with packed weights, which the matmul kernel for Hopper unpacks in registers."""

from __future__ import annotations

from dataclasses import replace

from relax_fusion.estimator.families.cuda_matmul.tiles import CudaPlan
from relax_fusion.workload import GatedFFN, NormMatmul, Packed

from . import cases
from .cases import EVERY_STEP, Case, gated, matmul, several

Q4 = Packed(4, 32, 7)
Q8 = Packed(8, 32, 127)
INT8 = Packed(8, -1, 0, word="int8", number="int8")


def plan(block_m: int, block_n: int, block_k: int = 64, **fields: int) -> CudaPlan:
    """Return a plan with two stages of `block_k`."""
    return replace(cases.plan(block_m, block_n, **fields), block_k=block_k)


def packed(work: NormMatmul | GatedFFN, form: Packed = Q4, k: int = 192) -> NormMatmul | GatedFFN:
    """Return the workload with packed weights."""
    if isinstance(work, GatedFFN):
        return replace(work, k=k, packed=form)
    return replace(work, k=k, outputs=tuple(replace(p, packed=form) for p in work.outputs))


def bfloat16(form: Packed) -> Packed:
    """Return a format with scales of bfloat16."""
    return replace(form, scale_dtype="bfloat16")


HALF_GATED = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
PACKED = {
    "q4": Case(packed(matmul()), plan(16, 64)),
    "q4_not_early": Case(packed(matmul("bias")), plan(16, 64), early=False),
    "q4_steps_of_128": Case(packed(matmul(), k=384), plan(16, 64, 128)),
    "q4_steps_of_256": Case(packed(matmul("residual"), k=768), plan(16, 64, 256)),
    "q4_bfloat16": Case(packed(matmul(dtype="bfloat16"), bfloat16(Q4)), plan(16, 64)),
    "q4_unaligned": Case(packed(matmul("bias", "residual", n=133)), plan(16, 64)),
    "q4_unaligned_gate": Case(packed(replace(gated(), n=75)), plan(16, 64)),
    "q4_groups_of_64": Case(packed(matmul(), replace(Q4, group=64), 256), plan(16, 64, 128)),
    "q4_groups_of_128": Case(packed(matmul(), Packed(4, 128, 8), 448), plan(16, 64)),
    "q4_one_group": Case(packed(matmul(), Packed(4, -1, 8), 224), plan(16, 64)),
    "q4_bytes": Case(packed(matmul(), Packed(4, 64, 8, word="uint8")), plan(16, 64)),
    "q8": Case(packed(matmul(), Q8), plan(16, 64)),
    "q8_steps_of_128": Case(packed(matmul("bias"), Q8, 256), plan(16, 64, 128)),
    "q8_bfloat16": Case(packed(matmul(dtype="bfloat16"), bfloat16(Q8)), plan(16, 64)),
    "q8_int8": Case(packed(matmul(), INT8, 208), plan(16, 64)),
    "q8_int8_bfloat16": Case(packed(matmul(dtype="bfloat16"), bfloat16(INT8), 208), plan(16, 64)),
    "q4_gate_first": Case(packed(gated()), plan(16, 64)),
    "q4_up_first": Case(packed(gated(gate_first=False)), plan(16, 128, groups_n=2)),
    "q4_gate_and_up": Case(packed(gated(merged=False, **HALF_GATED), bfloat16(Q4)), plan(24, 32)),
    "q4_gated_floats": Case(packed(gated(out_dtype="float32")), plan(48, 64, groups_n=2)),
    "q4_gated_parts": Case(packed(gated(bias=False)), plan(40, 128, groups_n=2)),
    "q4_gated_wide": Case(packed(gated(), k=256), plan(160, 32, 128, groups_m=2)),
    "q4_gated_sharing": Case(packed(gated(), k=256), plan(32, 64, cluster_m=2, cluster_n=2)),
    "q4_gated_turns": Case(packed(gated()), plan(24, 32, turns=2, num_stages=3)),
    "q8_gated": Case(packed(gated(gate_first=False), Q8), plan(16, 32)),
    "q4_parts": Case(packed(matmul(*EVERY_STEP)), plan(40, 128)),
    "q4_groups_tall": Case(packed(matmul("bias", 0.5, "residual")), plan(24, 128, groups_n=2)),
    "q4_groups_wide": Case(packed(matmul("bias"), k=256), plan(80, 64, 128, groups_m=2)),
    "q4_three_groups": Case(packed(gated(bias=False)), plan(16, 96, groups_n=3)),
    "q4_sharing_weights": Case(packed(matmul("bias"), k=256), plan(16, 64, 128, cluster_m=2)),
    "q4_sharing_both": Case(packed(matmul()), plan(32, 64, cluster_m=2, cluster_n=2)),
    "q4_split": Case(packed(matmul("bias", "residual"), k=576), plan(16, 64, split_k=2)),
    "q4_split_groups": Case(packed(gated(), k=768), plan(16, 64, 128, groups_n=2, split_k=4)),
    "q4_sets": Case(packed(matmul("bias", "residual"), k=576), plan(16, 64, groups_k=2)),
    "q4_sets_split": Case(packed(matmul(), k=640), plan(24, 64, 128, groups_k=2, split_k=2)),
    "q4_sets_gated": Case(packed(gated(), k=768), plan(40, 32, 128, groups_k=3)),
    "q4_turns": Case(packed(matmul("bias")), plan(16, 64, turns=2, num_stages=3)),
    "q4_three_weights": Case(packed(several(136, 72, 200)), plan(16, 64)),
}
