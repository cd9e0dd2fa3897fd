"""The matmul kernel in CUDA C++ as what is compiled and launched."""

from __future__ import annotations

from functools import lru_cache

from ..estimator.families.cuda_matmul.tiles import PART, block_k, smem_bytes
from ..launch.cuda_source import CUDASource
from ..launch.kernel import LaunchOptions, TensorMapLayout
from ..workload.reference import numpy_dtype
from .kernel_text import MatmulForm

_NAMES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "int8": "i8",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "int32": "i32",
}
TF32 = 11
"""The one of `_DRIVER_TYPES` that a copy rounds float32 to."""

_DRIVER_TYPES = {
    "float16": 6,
    "bfloat16": 9,
    "float32": TF32,
    "int8": 0,
    "uint8": 0,
    "uint16": 1,
    "uint32": 2,
}
"""Of ``CUtensorMapDataType``, in which integers of a byte have no sign."""

_SWIZZLES = {32: 1, 64: 2, 128: 3}
"""Of ``CUtensorMapSwizzle``, by the bytes of a line."""


WGMMA_CAPABILITY = 90
"""The only one with ``wgmma``."""


@lru_cache(maxsize=1024)
def matmul_source(form: MatmulForm) -> CUDASource:
    """Return the source of the kernel for a form, and how it is launched."""
    plan, k = form.plan, block_k(form.dtype)
    weight, rows = _weight(form), _layout((plan.box_m, k), form.dtype)
    added = [weight, rows] if form.adapter_steps else []
    added += [_layout((plan.box_m, PART), form.dtype)] if form.copies_residual else []
    of_each = [[weight, weight, *[rows] * (i == 0), *added] for i in range(form.products)]
    result, vector = f"*{_NAMES[form.result_dtype]}", f"*{_NAMES[form.vector_dtype]}"
    scales = form.weights if form.packed is not None else 0
    read = [result] * (form.has_residual - form.copies_residual)
    pointers = (result, *[vector] * (scales + form.vectors), *read)
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
        shared_bytes=smem_bytes(plan, form.weights, form.packed, form.half > 0),
        options=LaunchOptions(plan.cluster, dependent_launch=form.dependent),
        tensor_maps=tuple(layout for layouts in of_each for layout, _ in layouts),
    )


def _weight(form: MatmulForm) -> tuple[TensorMapLayout, str]:
    """Return what one copy brings of a weight."""
    if form.packed is not None:
        return _layout((form.run, form.units), form.packed.word)
    k = block_k(form.dtype)
    return _layout((k, PART) if form.turned else (form.run, k), form.dtype)


def _layout(box: tuple[int, int], dtype: str) -> tuple[TensorMapLayout, str]:
    """Return how a box is copied, by lines as wide as a swizzle, and the type of its parameter."""
    size = numpy_dtype(dtype).itemsize
    layout = TensorMapLayout(box, size, _DRIVER_TYPES[dtype], _SWIZZLES[box[1] * size])
    return layout, f"tensordesc<{_NAMES[dtype]}[{', '.join(map(str, box))}]>"
