"""Which launches compute a contraction (norm -> matmuls -> epilogues, gated pair) under a plan.

A plan of back end "triton" names a family of :mod:`.kernels` and its tiles.  The norm is part of
the matmul's kernel where the family can do that and nothing else wants its results; else it is a
launch of its own in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tvm import ir

from ..errors import LoweringError
from ..estimator.families.triton_matmul.tiles import DOTS, norm_inside
from ..estimator.tile_plan import TilePlan
from ..hardware import DeviceSpec
from ..launch.arguments import Workspace
from ..workload import DynamicDim, GatedFFN, Norm, NormMatmul
from . import launches
from .cuda import cuda_steps
from .kernels.gemv import gemv
from .kernels.matmul_pointer import matmul_pointer
from .kernels.row_norm import row_norm
from .operands import Operands, Product, given_or, read_operands

SWAP_COLUMNS = 64
"""Up to this many columns of a pointer tile, the weight is the left operand of the tensor cores,
whose least height is 64: then rows of x that are few are not padded."""

NORM_TILES = ((1024, 2, 1), (4096, 1, 4), (None, 1, 8))
"""Rows and warps of a program of `row_norm`, by the columns up to which they serve: the fastest on
the H200, or within .3 us of it, for 16 to 8192 rows of 576, 1024, 2048 and 4096 columns."""


def contraction_steps(
    work: NormMatmul | GatedFFN,
    plan: TilePlan,
    inputs: Sequence[ir.Expr],
    most_rows: int | None,
    dev: DeviceSpec,
    workspaces: dict[str, Workspace],
    fixed: launches.FixedWeights = launches.NOTHING_FIXED,
) -> list[launches.AnyStep]:
    """Return the launches that compute `work`, in order.

    `inputs` are in the order of ``work.graph``, and `fixed` tells which of them no kernel writes;
    the plan serves up to `most_rows` rows.  `workspaces` gets the workspaces, for the plans of
    other ranges to use the same.
    """
    found = read_operands(work, inputs)
    rows = found.x.ty.shape.values[0]
    rows = rows if isinstance(work.rows, DynamicDim) else int(rows)
    c = launches.Contraction(work, plan, rows, most_rows, dev, workspaces, fixed)
    if work.norm is None or norm_inside(work, plan):
        others = replace(found, normed=None)  # the first launch stores it
        return [
            step
            for number, products in enumerate(found.launches)
            for step in _matmul(c, products, found.x, others if number else found, work.norm)
        ]
    known = found.normed or (found.total if work.norm.kind == "none" else None)
    y: Any = known or c.workspace("norm", (rows, work.k), work.dtype)
    rest = [s for p in found.launches for s in _matmul(c, p, y, found, None)]
    return [_row_norm(c, work.norm, found, y), *rest]


def _row_norm(c: launches.Contraction, norm: Norm, found: Operands, y: Any) -> launches.Step:
    """Return the launch that normalises every row."""
    width = c.work.k
    rows, warps = next(tile for most, *tile in NORM_TILES if most is None or width <= most)
    args = {
        "x_ptr": found.x,
        "residual_ptr": given_or(found.residual, found.x),
        "gamma_ptr": given_or(found.gamma, found.x),
        "beta_ptr": given_or(found.beta, given_or(found.gamma, found.x)),
        "y_ptr": y,
        "sum_ptr": given_or(found.total, y),
        "first_ptr": found.first,
        "M": c.m,
        "eps": float(norm.eps),
    }
    constants: dict[str, Any] = {
        "WIDTH": width,
        "BLOCK": 1 << (width - 1).bit_length(),
        "ROWS": rows,
        "NORM": norm.kind,
        "HAS_RESIDUAL": found.residual is not None,
        "HAS_BETA": found.beta is not None,
        "STORE_SUM": found.total is not None,
        "PDL": c.dependent,
        "EARLY": c.dependent and c.few_rows,
        "UNIT_OFFSET": norm.unit_offset,
    }
    if norm.each:
        constants["EACH"] = norm.each
    if norm.first is not None:
        constants |= {"FIRST_EPS": norm.first.eps, "FIRST_OFFSET": norm.first.unit_offset}
    grid = (launches.ceil_div(c.rows, rows),)
    return launches.Step(row_norm, grid, args, constants, c.options(num_warps=warps, num_stages=3))


def _matmul(
    c: launches.Contraction, products: Sequence[Product], x: Any, found: Operands, norm: Norm | None
) -> Iterator[launches.AnyStep]:
    """Yield the launches of products of x, which `norm` inside normalises."""
    family = c.plan.family
    if family in DOTS:
        yield _gemv(c, products, x, found, norm)
    elif family == "pointer":
        yield from _pointer(c, products, x, found, norm)
    elif family == "cuda":
        yield from cuda_steps(c, products, x)
    else:
        raise LoweringError(f"plan {c.plan.key}: no kernel family {family!r}")


def _gemv(
    c: launches.Contraction, products: Sequence[Product], x: Any, found: Operands, norm: Norm | None
) -> launches.Step:
    args = {
        "x_ptr": x,
        "gamma_ptr": found.gamma if norm else None,
        "beta_ptr": found.beta if norm else None,
        "M": c.m,
        "eps": float(norm.eps) if norm else 0.0,
        "normed_ptr": found.normed if norm else None,
        **launches.tensors_of(p.tensors() for p in products),
    }
    beta = bool(norm and norm.beta)
    forms, tiles = launches.forms_of(products, c.plan.block_n)
    constants = c.constants(early=c.early(products, x), has_beta=beta, **_norm(norm))
    grid = (tiles, launches.ceil_div(c.rows, c.plan.block_m))
    return launches.Step(gemv, grid, args, {**forms, "C": constants}, c.options())


def _pointer(
    c: launches.Contraction, products: Sequence[Product], x: Any, found: Operands, norm: Norm | None
) -> Iterator[launches.Step]:
    plan, split = c.plan, c.plan.split_k > 1
    eps = float(norm.eps) if norm else 0.0
    args = {
        "x_ptr": x,
        "gamma_ptr": found.gamma if norm else None,
        "M": c.m,
        "eps": eps,
        **launches.tensors_of(p.tensors(c.parts(p) if split else None) for p in products),
    }
    constants = c.constants(swap=plan.block_n <= SWAP_COLUMNS, **_norm(norm))
    forms, tiles = launches.forms_of(products, plan.block_n)
    grid = (launches.ceil_div(c.rows, plan.block_m) * tiles, plan.split_k)
    yield launches.Step(matmul_pointer, grid, args, {**forms, "C": constants}, c.options())
    if split:
        yield c.split_reduce(products, constants.norm, eps)


def _norm(norm: Norm | None) -> dict[str, Any]:
    """Return the constants of a kernel that normalises."""
    return {"norm": norm.kind, "unit_offset": norm.unit_offset} if norm is not None else {}
