"""Which dtypes the matmul kernel in CUDA C++ takes, and what each asks for.

``wgmma`` multiplies 32 bytes of k of any of them; those of one and of four bytes lie along k.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....hardware.instructions import WARP_GROUP_MMA
from ....workload import INTEGER_DTYPES, GatedFFN
from ...prediction import HALF_DTYPES
from ...shape import matmul_shape
from ..matmuls import MatmulWork
from .tiles import FAMILY, CudaPlan


def refuses_dtypes(work: MatmulWork) -> str | None:
    """Return why no kernel has such operands and results; None if there may be one."""
    dtype, integers = work.dtype, work.dtype in INTEGER_DTYPES
    if dtype not in WARP_GROUP_MMA:
        return f"dtype is {dtype}, family {FAMILY!r} takes {', '.join(WARP_GROUP_MMA)}"
    if dtype == "float32" and not work.allow_tf32:
        return f"dtype is float32, family {FAMILY!r} multiplies it as tf32, which is not allowed"
    if dtype not in HALF_DTYPES and "kn" in matmul_shape(work).layouts:
        return f"weights of {dtype} lie as [k, n], family {FAMILY!r} multiplies them as [n, k]"
    if integers and (isinstance(work, GatedFFN) or work.norm is not None):
        return f"dtype is {dtype}, of which family {FAMILY!r} has matmuls without norms and gates"
    results = result_dtypes(dtype)
    if work.out_dtype not in results:
        stored = f"family {FAMILY!r} stores {', '.join(results)}"
        return f"results are {work.out_dtype}, {stored} of products of {dtype}"
    return None


def result_dtypes(dtype: str) -> tuple[str, ...]:
    """Return the dtypes of results that the kernel stores of operands of `dtype`."""
    if dtype in HALF_DTYPES:
        return (dtype, "float32")
    return ("float32", *HALF_DTYPES, *(["int32"] if dtype in INTEGER_DTYPES else []))


MOST_LINES = 256
"""Of a warp group: the widest ``wgmma``."""


def lines_violations(plan: CudaPlan, dtype: str) -> Iterator[str]:
    """Yield why ``wgmma`` has no such number of wide lines."""
    lines = plan.wide // plan.groups_wide
    if lines > MOST_LINES:
        yield f"a warp group has {lines} lines, at most {MOST_LINES}"
    if dtype in INTEGER_DTYPES and lines % 16 and lines not in (8, 24):  # PTX ISA, ``wgmma``
        yield f"a warp group has {lines} lines; of {dtype}, must be 8, 24 or a multiple of 16"
