"""Which launches compute a contraction (norm -> matmuls -> epilogues, gated pair) under a plan.

A plan of back end "triton" names a family of :mod:`.kernels` and its tiles.  The norm is part of
the matmul's kernel where the family can do that and nothing else wants its results; else it is a
launch of its own in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tvm import ir

from ..errors import LoweringError
from ..estimator.families.triton_matmul.tiles import norm_inside
from ..estimator.tile_plan import TilePlan
from ..hardware import DeviceSpec
from ..launch.arguments import Workspace
from ..workload import DynamicDim, GatedFFN, Norm, NormMatmul
from .hopper import persistent_steps, stream_steps
from .kernels.gemv import gemv
from .kernels.matmul_pointer import matmul_pointer
from .kernels.row_norm import row_norm
from .operands import Operands, Product, read_operands
from .steps import GROUP_M, NOTHING_FIXED, Contraction, FixedWeights, Step, ceil_div, given_or

SWAP_COLUMNS = 64
"""Columns of a pointer tile up to which the weight is the left operand of the tensor cores, whose
least height is 64: then rows of x that are few are not padded."""

NORM_WARPS = ((1024, 8), (None, 4))
"""Warps of `row_norm` by rows: few rows are a matter of latency, many of bandwidth (measured at
4096 columns)."""


def contraction_steps(
    work: NormMatmul | GatedFFN,
    plan: TilePlan,
    inputs: Sequence[ir.Expr],
    most_rows: int | None,
    dev: DeviceSpec,
    workspaces: dict[str, Workspace],
    fixed: FixedWeights = NOTHING_FIXED,
) -> list[Step]:
    """Return the launches that compute `work`, in order.

    Parameters
    ----------
    work : NormMatmul or GatedFFN
        What to compute; one that the family `TritonMatmul` does not refuse.
    plan : TilePlan
        Family and tiles.
    inputs : sequence of relax.Expr
        In the order of `relax_fusion.compute.contraction.contraction_prim_func`.
    most_rows : int, optional
        Rows up to which the plan serves.
    dev : DeviceSpec
        Where it will run.
    workspaces : dict
        Gets the workspaces, for the plans of other ranges to use the same.
    fixed : FixedWeights
        Those of `inputs` that no kernel writes.
    """
    found = read_operands(work, inputs)
    rows = found.x.ty.shape.values[0]
    rows = rows if isinstance(work.rows, DynamicDim) else int(rows)
    c = Contraction(work, plan, rows, most_rows, dev, workspaces, fixed)
    if work.norm is None or norm_inside(work, plan):
        norm = work.norm
        return [s for p in found.products for s in _matmul(c, p, found.x, found, norm)]
    y: Any = found.normed or c.workspace("norm", (rows, work.k), work.dtype)
    rest = [s for p in found.products for s in _matmul(c, p, y, found, None)]
    return [_row_norm(c, work.norm, found, y), *rest]


def _row_norm(c: Contraction, norm: Norm, found: Operands, y: Any) -> Step:
    """Return the launch that normalises every row."""
    width, few = c.work.k, c.most_rows
    warps = next(w for most, w in NORM_WARPS if most is None or (few or most) < most)
    args = {
        "x_ptr": found.x,
        "residual_ptr": given_or(found.residual, found.x),
        "gamma_ptr": found.gamma,
        "beta_ptr": given_or(found.beta, found.gamma),
        "y_ptr": y,
        "sum_ptr": given_or(found.total, y),
        "M": c.m,
        "eps": float(norm.eps),
    }
    constants = {
        "WIDTH": width,
        "BLOCK": 1 << (width - 1).bit_length(),
        "ROWS": 1,
        "NORM": norm.kind,
        "HAS_RESIDUAL": found.residual is not None,
        "HAS_BETA": found.beta is not None,
        "STORE_SUM": found.total is not None,
        "PDL": c.dependent,
        "EARLY": c.dependent and c.few_rows,
        **_offset(norm),
    }
    return Step(row_norm, (c.rows,), args, constants, c.options(num_warps=warps, num_stages=3))


def _offset(norm: Norm | None) -> dict[str, bool]:
    """Return the constant of a kernel that multiplies by ``1 + gamma``."""
    return {"UNIT_OFFSET": True} if norm is not None and norm.unit_offset else {}


def _matmul(
    c: Contraction, p: Product, x: Any, found: Operands, norm: Norm | None
) -> Iterator[Step]:
    """Yield the launches of one product of x, which `norm` inside normalises."""
    family = c.plan.family
    if family == "gemv":
        yield _gemv(c, p, x, found, norm)
    elif family == "pointer":
        yield from _pointer(c, p, x, found, norm)
    elif family == "stream":
        yield from stream_steps(c, p, x)
    elif family == "persistent":
        yield from persistent_steps(c, p, x)
    else:
        raise LoweringError(f"plan {c.plan.key}: no kernel family {family!r}")


def _gemv(c: Contraction, p: Product, x: Any, found: Operands, norm: Norm | None) -> Step:
    beta = found.beta if norm else None
    args = {
        "x_ptr": x,
        "gamma_ptr": found.gamma if norm else x,
        "beta_ptr": given_or(beta, x),
        "w_ptr": p.weight,
        "up_ptr": given_or(p.up, p.weight),
        **p.pointers(x),
        "M": c.m,
        "eps": float(norm.eps) if norm else 0.0,
    }
    constants = {
        **p.constants,
        "K": c.work.k,
        "NORM": norm.kind if norm else "none",
        "HAS_BETA": beta is not None,
        "BLOCK_N": c.plan.block_n,
        "BLOCK_K": c.plan.block_k,
        "PDL": c.dependent,
        "EARLY": c.early(p, x),
        **_offset(norm),
    }
    grid = (ceil_div(p.n, c.plan.block_n), c.rows)
    return Step(gemv, grid, args, constants, c.options())


def _pointer(
    c: Contraction, p: Product, x: Any, found: Operands, norm: Norm | None
) -> Iterator[Step]:
    plan = c.plan
    kind, eps = (norm.kind, float(norm.eps)) if norm else ("none", 0.0)
    args = {
        "x_ptr": x,
        "gamma_ptr": found.gamma if norm else x,
        "w_ptr": p.weight,
        "up_ptr": given_or(p.up, p.weight),
        **p.pointers(x),
        "workspace_ptr": c.parts(p) if plan.split_k > 1 else x,
        "M": c.m,
        "eps": eps,
    }
    constants = {
        **p.constants,
        "K": c.work.k,
        "NORM": kind,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "SPLIT_K": plan.split_k,
        "GROUP_M": GROUP_M,
        "SWAP": plan.block_n <= SWAP_COLUMNS,
        "NUM_STAGES": plan.num_stages,
        "PDL": c.dependent,
        **_offset(norm),
    }
    tiles = ceil_div(c.rows, plan.block_m) * ceil_div(p.n, plan.block_n)
    yield Step(matmul_pointer, (tiles, plan.split_k), args, constants, c.options())
    if plan.split_k > 1:
        yield c.split_reduce(p, kind, eps)
