"""The matmul kernel in CUDA C++ as what is compiled and launched."""

from __future__ import annotations

from functools import lru_cache

from ..estimator.families.cuda_matmul.tiles import PART, block_k, smem_bytes
from ..launch.cuda_source import CUDASource
from ..launch.kernel import LaunchOptions, TensorMapLayout
from ..workload.dtypes import DTYPE_BYTES
from .text import MatmulForm

_NAMES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
}
TF32 = 11
"""The one of `_DRIVER_TYPES` that a copy rounds float32 to."""

_DRIVER_TYPES = {"float16": 6, "bfloat16": 9, "float32": TF32, "int8": 0, "uint8": 0}
"""Of ``CUtensorMapDataType``, in which integers of a byte have no sign."""

_SWIZZLE_128B = 3
"""Of ``CUtensorMapSwizzle``."""


WGMMA_CAPABILITY = 90
"""The only one with ``wgmma``."""


@lru_cache(maxsize=1024)
def matmul_source(form: MatmulForm) -> CUDASource:
    """Return the source of the kernel for a form, and how it is launched."""
    plan, name, k = form.plan, _NAMES[form.dtype], block_k(form.dtype)
    weight = (k, PART) if form.turned else (plan.box_n, k)
    boxes = [weight, weight, (plan.box_m, k), *[weight, weight] * (form.products - 1)]
    maps = [f"tensordesc<{name}[{', '.join(map(str, box))}]>" for box in boxes]
    result, vector = f"*{_NAMES[form.result_dtype]}", f"*{_NAMES[form.vector_dtype]}"
    pointers = (result, *[vector] * form.vectors, *[result] * form.has_residual)
    others = (*maps[:2], *pointers, "i32") * (form.products - 1)
    return CUDASource(
        entry="matmul",
        text=form.text,
        capability=WGMMA_CAPABILITY,
        params=(*maps[:3], *pointers, *("i32",) * 3, *others),
        block=(32 * plan.num_warps, 1, 1),
        shared_bytes=smem_bytes(plan, 2 if form.activation else 1),
        options=LaunchOptions(plan.cluster, dependent_launch=form.dependent),
        tensor_maps=tuple(
            TensorMapLayout(box, DTYPE_BYTES[form.dtype], _DRIVER_TYPES[form.dtype], _SWIZZLE_128B)
            for box in boxes
        ),
    )
