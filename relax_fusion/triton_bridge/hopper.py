"""Launches of the kernels for Hopper: `matmul_stream` and `matmul_persistent`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import tirx

from ..estimator.families.triton_matmul.tiles import accumulator_columns
from ..launch.arguments import TensorMap
from .kernels.matmul_persistent import matmul_persistent
from .kernels.matmul_stream import matmul_stream
from .operands import Product
from .steps import GROUP_M, Contraction, Step, ceil_div, given_or

STREAM_REGISTERS = 128
"""Registers of a thread of `matmul_stream`, so that two of its blocks, or one and the kernel in
front, fit a multiprocessor."""


def stream_steps(c: Contraction, p: Product, x: Any) -> Iterator[Step]:
    """Yield the launches for a few rows: the matmul, and the sum of its parts."""
    plan = c.plan
    columns, _ = _columns(c, p)
    split = plan.split_k > 1
    args = {
        **_maps(c, p, x),
        **p.pointers(p.out),
        "workspace_ptr": c.parts(p) if split else p.out,
        "M": c.m,
    }
    constants = {
        **p.constants,
        "K": c.work.k,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": columns,
        "BLOCK_K": plan.block_k,
        "SPLIT_K": plan.split_k,
        "STAGES": plan.num_stages,
        "PDL": c.dependent,
        "EARLY": c.early(p, x),
    }
    tiles = ceil_div(c.rows, plan.block_m) * ceil_div(p.tiled_columns, columns)
    options = c.options(maxnreg=STREAM_REGISTERS)
    yield Step(matmul_stream, (tiles, plan.split_k), args, constants, options)
    if split:
        yield c.split_reduce(p)


def persistent_steps(c: Contraction, p: Product, x: Any) -> Iterator[Step]:
    """Yield the launch for many rows."""
    plan = c.plan
    columns, second = _columns(c, p)
    args = {**_maps(c, p, x), **p.pointers(p.out), "M": c.m}
    constants = {
        **p.constants,
        "K": c.work.k,
        "BLOCK_N": columns,
        "SECOND": second,
        "BLOCK_K": plan.block_k,
        "GROUP_M": GROUP_M,
        "STAGES": plan.num_stages,
        "PDL": c.dependent,
    }
    step = columns if p.paired else columns + second
    tiles = ceil_div(c.rows, plan.block_m) * ceil_div(p.tiled_columns, step)
    grid = (_least(tiles, c.dev.sm_count),)
    # Half of the plan's warps are the kernel's own; those of the other half are specialised
    options = c.options(num_warps=plan.num_warps // 2)
    yield Step(matmul_persistent, grid, args, constants, options)


def _maps(c: Contraction, p: Product, x: Any) -> dict[str, TensorMap]:
    """Return the operands as tensor maps that the host encodes."""
    columns, second = _columns(c, p)

    def weight_map(weight: Any, features: int) -> TensorMap:
        # Pairs of rotated features lie side by side in runs of their distance
        box = min(features, p.angles.rope.distance) if p.angles and p.rotated else features
        shape = (box, c.plan.block_k) if p.layout == "nk" else (c.plan.block_k, box)
        return TensorMap(weight, shape)

    return {
        "x": TensorMap(x, (c.plan.block_m, c.plan.block_k)),
        "w": weight_map(p.weight, columns),
        "up": weight_map(given_or(p.up, p.weight), second or columns),
    }


def _columns(c: Contraction, p: Product) -> tuple[int, int]:
    return accumulator_columns(c.plan, gated=p.up is not None, rotated=p.rotated)


def _least(a: Any, b: int) -> Any:
    return min(a, b) if isinstance(a, int) else tirx.min(a, tirx.IntImm("int64", b))
