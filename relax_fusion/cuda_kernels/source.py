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
    plan, k = form.plan, block_k(form.dtype)
    weight = _layout((k, PART) if form.turned else (form.run, k), form.dtype)
    rows = _layout((plan.box_m, k), form.dtype)
    added = [weight, rows] if form.adapter_steps else []
    added += [_layout((plan.box_m, PART), form.dtype)] if form.copies_residual else []
    of_each = [[weight, weight, *[rows] * (i == 0), *added] for i in range(form.products)]
    result, vector = f"*{_NAMES[form.result_dtype]}", f"*{_NAMES[form.vector_dtype]}"
    read = [result] * (form.has_residual - form.copies_residual)
    pointers = (result, *[vector] * form.vectors, *read)
    angle = f"*{_NAMES[form.rotated.dtype]}" if form.rotated else ""
    params = [
        kind
        for i, layouts in enumerate(of_each)
        for turning in [(angle, angle, "i32") if form.turns(i) else ()]
        for maps in [(kind for _, kind in layouts)]
        for kind in (*maps, *pointers, *turning, *("i32",) * (1 if i else 3))
    ]
    return CUDASource(
        entry="matmul",
        text=form.text,
        capability=WGMMA_CAPABILITY,
        params=tuple(params),
        block=(32 * plan.num_warps, 1, 1),
        shared_bytes=smem_bytes(plan, form.weights, form.half > 0),
        options=LaunchOptions(plan.cluster, dependent_launch=form.dependent),
        tensor_maps=tuple(layout for layouts in of_each for layout, _ in layouts),
    )


def _layout(box: tuple[int, int], dtype: str) -> tuple[TensorMapLayout, str]:
    """Return how a box is copied, and the type of the parameter that is its map."""
    layout = TensorMapLayout(box, DTYPE_BYTES[dtype], _DRIVER_TYPES[dtype], _SWIZZLE_128B)
    return layout, f"tensordesc<{_NAMES[dtype]}[{', '.join(map(str, box))}]>"
