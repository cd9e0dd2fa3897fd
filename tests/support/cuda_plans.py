"""Plans and workloads of the matmul kernel in CUDA C++ that the estimator's tests share."""

from __future__ import annotations

from dataclasses import replace

from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul
from relax_fusion.estimator.families.cuda_matmul.tiles import CudaPlan
from relax_fusion.workload import NormMatmul, Projection, Rope, WeightLayout

from .estimator_cases import gated_ffn, norm_matmul

FAMILY = CudaMatmul()
ALONE, GATED = norm_matmul(norm=None), gated_ffn()
INTEGERS = replace(norm_matmul(dtype="int8", norm=None), out_dtype="int32")
TF32 = replace(norm_matmul(dtype="float32", norm=None), allow_tf32=True)
WORKS = {"qkv": ALONE, "gate_up": GATED}
OTHERS = {"int8": INTEGERS, "tf32": TF32}


def plan(block_m: int, block_n: int, **fields: int) -> CudaPlan:
    """Return a plan of 4 stages and a warp group that multiplies."""
    numbers = {"num_stages": 4, "num_warps": 8, **fields}
    return CudaPlan(block_m, block_n, 64, family="cuda", **numbers)


SMALL = plan(64, 64)
WIDE = plan(128, 256, num_warps=12, groups_n=2)
TURNED = plan(128, 256, num_warps=12, groups_m=2, swapped=1)


def rotated(rope: Rope, n: int = 256, *steps: str, layout: WeightLayout = "nk") -> NormMatmul:
    """Return a matmul whose results are rotated, of n features."""
    return replace(ALONE, outputs=(Projection(n, layout, steps, rope),))


ROPE = Rope(128, 256, "float16")
