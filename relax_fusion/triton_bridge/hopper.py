"""Launches of the kernel for Hopper, `matmul_persistent`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tvm import tirx

from ..estimator.families.triton_matmul.tiles import accumulator_columns
from ..launch.arguments import TensorMap
from .kernels.matmul_persistent import matmul_persistent
from .kernels.products import Tensors
from .operands import Product, given_or
from .steps import Contraction, Step, ceil_div, forms_of, tensors_of


def persistent_steps(c: Contraction, products: Sequence[Product], x: Any) -> Iterator[Step]:
    """Yield the launch for many rows."""
    plan = c.plan
    columns, second, step = _columns(c, products[0])
    args = _arguments(c, products, x)
    forms, tiles = forms_of(products, step)
    constants = c.constants(block_n=columns, second=second)
    grid = (_least(ceil_div(c.rows, plan.block_m) * tiles, c.dev.sm_count),)
    # Half of the plan's warps are the kernel's own; those of the other half are specialised
    options = c.options(num_warps=plan.num_warps // 2)
    yield Step(matmul_persistent, grid, args, {**forms, "C": constants}, options)


def _arguments(c: Contraction, products: Sequence[Product], x: Any) -> dict[str, Any]:
    """Return the arguments, with operands as tensor maps that the host encodes."""
    columns, second, _ = _columns(c, products[0])

    def weight_map(p: Product, weight: Any, features: int) -> TensorMap:
        # Pairs of rotated features lie side by side in runs of their distance
        box = min(features, p.half) if p.half > 1 else features
        shape = (box, c.plan.block_k) if p.layout == "nk" else (c.plan.block_k, box)
        return TensorMap(weight, shape)

    def tensors(p: Product) -> Tensors:
        up = weight_map(p, given_or(p.up, p.weight), second) if second else None
        return p.tensors(None, weight_map(p, p.weight, columns), up)

    found = tensors_of(map(tensors, products))
    return {"x": TensorMap(x, (c.plan.block_m, c.plan.block_k)), "M": c.m, **found}


def _columns(c: Contraction, p: Product) -> tuple[int, int, int]:
    """Return the columns of both accumulators, and by how many a tile is behind the one before."""
    gated = p.up is not None
    columns, second = accumulator_columns(c.plan, gated=gated, rotated=p.half > 1)
    return columns, second, columns if gated else columns + second


def _least(a: Any, b: int) -> Any:
    return min(a, b) if isinstance(a, int) else tirx.min(a, tirx.IntImm("int64", b))
