"""The matmul kernel in CUDA C++ as what is compiled and launched."""

from __future__ import annotations

from functools import lru_cache

from ..estimator.families.cuda_matmul.tiles import BLOCK_K, PART, smem_bytes
from ..launch.cuda_source import CUDASource
from ..launch.kernel import LaunchOptions, TensorMapLayout
from .text import MatmulForm

_NAMES = {"float16": "fp16", "bfloat16": "bf16"}
_DRIVER_TYPES = {"float16": 6, "bfloat16": 9}
"""Of ``CUtensorMapDataType``."""

_SWIZZLE_128B = 3
"""Of ``CUtensorMapSwizzle``."""


WGMMA_CAPABILITY = 90
"""The only one with ``wgmma``."""


@lru_cache(maxsize=1024)
def matmul_source(form: MatmulForm) -> CUDASource:
    """Return the source of the kernel for a form, and how it is launched."""
    plan, name = form.plan, _NAMES[form.dtype]
    weight = (BLOCK_K, PART) if form.turned else (plan.box_n, BLOCK_K)
    rows = (plan.box_m, BLOCK_K)
    added = [weight, rows] if form.adapter_steps else []
    first, other = [weight, weight, rows, *added], [weight, weight, *added]
    boxes = first + other * (form.products - 1)
    maps = [f"tensordesc<{name}[{', '.join(map(str, box))}]>" for box in boxes]
    pointers = (f"*{name}",) * (1 + form.vectors + form.has_residual)
    others = (*maps[len(first) : len(first) + len(other)], *pointers, "i32") * (form.products - 1)
    return CUDASource(
        entry="matmul",
        text=form.text,
        capability=WGMMA_CAPABILITY,
        params=(*maps[: len(first)], *pointers, *("i32",) * 3, *others),
        block=(32 * plan.num_warps, 1, 1),
        shared_bytes=smem_bytes(plan, 2 if form.activation else 1),
        options=LaunchOptions(plan.cluster, dependent_launch=form.dependent),
        tensor_maps=tuple(
            TensorMapLayout(box, 2, _DRIVER_TYPES[form.dtype], _SWIZZLE_128B) for box in boxes
        ),
    )
