"""What the kernels of TIR for a norm and matmuls, or gated projections, have in common on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from ...hardware import DeviceSpec
from ...workload import INTEGER_DTYPES, GatedFFN, NormMatmul, Packed
from ..limits import block_limits, tile_extents, vector_loads
from ..prediction import ceil_div
from ..shape import MatmulShape, matmul_shape
from ..steps import Footprint
from ..tile_plan import TilePlan
from .tensor_cores import tiles as mma

MatmulWork: TypeAlias = NormMatmul | GatedFFN

DOT_PRODUCTS, FMA_TILES = SCALAR_FAMILIES = ("dot_products", "fma_tiles")
"""The names of the families of matmuls on GPUs without tensor cores."""

MAX_PADDING = 0.05
"""Part of a dimension that a tile may compute in vain (MCFuser's third rule)."""

THREAD_OVERHEAD_REGISTERS = 32
"""Addresses, loop counters and staged loads of a GPU thread.  Assumed: what nvcc reports for a
matmul kernel, less its accumulators and operands, lies between 20 and 40."""


def columns_fit(shape: MatmulShape, block_n: int) -> bool:
    """Tell whether `block_n` pads n by no more than `MAX_PADDING`, or is the least tile."""
    padded = sum(ceil_div(n, block_n) * block_n for n in shape.n_parts)
    return block_n <= 32 or padded <= shape.n * (1 + MAX_PADDING)


def matmul_limits(
    foot: Footprint, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, *, is_static: bool = False
) -> Iterator[str]:
    """Yield what a block has not, which loads do not fit, and what no kernel of TIR can do."""
    yield from block_limits(foot, plan, work, dev, is_static=is_static)
    yield from vector_loads(plan, work.dtype, tile_extents(plan, matmul_shape(work).layouts))
    if work.k == 1:
        # TVM 0.27 mixes index types when it simplifies a bound reduction of one element.
        yield "the reduction has 1 element, backend 'tir' needs 2 on a GPU"


def refuses_integers(work: MatmulWork, kernels: str) -> str | None:
    """Return that kernels of float32 sums do not add up integers."""
    if work.dtype not in INTEGER_DTYPES:
        return None
    known = " and ".join(map(repr, mma.FAMILIES))
    what = f"dtype is {work.dtype}, {kernels} add up float32"
    needs = "adding up integers needs tensor cores (CUDA, sm_80 or newer)"
    return f"{what}; {needs}: families {known}, or dot products"


def packed_form(work: MatmulWork) -> Packed | None:
    """Return how the weights are stored; None if their elements lie one after the other."""
    return work.packed if isinstance(work, GatedFFN) else work.outputs[0].packed


def refuses_scattered(work: MatmulWork) -> str | None:
    """Return that no kernel for a GPU has weights whose words it would not read along k.

    The rule for matmuls that no pass made takes them to tensor cores.
    """
    form = packed_form(work)
    if form is None:
        return None
    if not form.is_in_order:
        return "words lie across k, or have zeros apart; fused kernels of a GPU take words along k"
    if form.fields == 1 and "kn" in matmul_shape(work).layouts:
        return "bytes lie across k; fused kernels of a GPU take bytes along k"
    return None
