"""The matmul kernel in CUDA C++ as what is compiled and launched."""

from __future__ import annotations

from functools import lru_cache

from ..estimator.families.cuda_matmul.tiles import LINE_K, PART, smem_bytes
from ..launch.cuda_source import CUDASource
from ..launch.kernel import LaunchOptions, TensorMapLayout
from .text import MatmulForm

_TYPES = {
    "float16": ("fp16", 6, 2),
    "bfloat16": ("bf16", 9, 2),
    "uint8": ("u8", 0, 1),
    "int8": ("i8", 0, 1),
    "uint16": ("u16", 1, 2),
    "uint32": ("u32", 2, 4),
}
"""Names in a kernel's parameters, values of ``CUtensorMapDataType``, and bytes."""

_SWIZZLES = {32: 1, 64: 2, 128: 3}
"""Of ``CUtensorMapSwizzle``, by the bytes of a line."""


WGMMA_CAPABILITY = 90
"""The only one with ``wgmma``."""


@lru_cache(maxsize=1024)
def matmul_source(form: MatmulForm) -> CUDASource:
    """Return the source of the kernel for a form, and how it is launched."""
    plan, name = form.plan, _TYPES[form.dtype][0]
    rows, weight = _layout((plan.box_m, LINE_K), form.dtype), _weight(form)
    layouts = [weight, weight, rows, *[weight, weight] * (form.products - 1)]
    maps = [_described(layout) for layout in layouts]
    scales = 0 if form.packed is None else 2 if form.activation else 1
    pointers = (f"*{name}",) * (1 + scales + form.vectors + form.has_residual)
    others = (*maps[:2], *pointers, "i32") * (form.products - 1)
    return CUDASource(
        entry="matmul",
        text=form.text,
        capability=WGMMA_CAPABILITY,
        params=(*maps[:3], *pointers, *("i32",) * 3, *others),
        block=(32 * plan.num_warps, 1, 1),
        shared_bytes=smem_bytes(plan, 2 if form.activation else 1, form.packed),
        options=LaunchOptions(plan.cluster, dependent_launch=form.dependent),
        tensor_maps=tuple(layouts),
    )


def _weight(form: MatmulForm) -> TensorMapLayout:
    """Return what one copy brings of a weight."""
    if form.packed is not None:
        return _layout((form.plan.box_n, form.units), form.packed.word)
    return _layout((LINE_K, PART) if form.turned else (form.plan.box_n, LINE_K), form.dtype)


def _layout(box: tuple[int, int], dtype: str) -> TensorMapLayout:
    """Return the layout of a box, with the swizzle that is as wide as its lines."""
    _, driver_type, size = _TYPES[dtype]
    return TensorMapLayout(box, size, driver_type, _SWIZZLES[box[1] * size])


def _described(layout: TensorMapLayout) -> str:
    """Return the type of a parameter that is a tensor map."""
    name = next(n for n, driver_type, _ in _TYPES.values() if driver_type == layout.element_type)
    return f"tensordesc<{name}[{', '.join(map(str, layout.block))}]>"
