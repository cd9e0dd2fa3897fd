"""What a PrimFunc launches, and where: branches, and scheduled TIR for the sizes that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, s_tir, tirx

from ..estimator.tile_plan import PLAN_ATTR
from ..tvm_ir import structural_map
from ..workload.json import WORKLOAD_ATTR
from .kernel import CompiledKernel


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel, one to three numbers of programs, and its run-time arguments."""

    kernel: CompiledKernel
    grid: Sequence[Any]
    args: Sequence[Any]


@dataclass(frozen=True)
class Branch:
    """Launches that run one after the other where `when` holds (the last branch: in any case)."""

    when: Any
    launches: Sequence[Launch]


def every_launch(branches: Sequence[Branch]) -> list[Launch]:
    """Return the launches of all branches."""
    return [launch for branch in branches for launch in branch.launches]


PLACE = ir.StringImm("the kernels that are not Triton's")
"""What stands for these kernels until they are put in."""


@dataclass(frozen=True)
class Others:
    """A scheduled function for the sizes that no launch of Triton is for.

    Parameters
    ----------
    func : tirx.PrimFunc
        Its parameters are `inputs`, then the outputs.
    inputs : sequence of Expr
        What it is handed: tensors, and numbers.
    """

    func: tirx.PrimFunc
    inputs: Sequence[ir.Expr]


def with_others(func: tirx.PrimFunc, inputs: Sequence[ir.Expr], others: Others) -> tirx.PrimFunc:
    """Return `func`, which is handed `inputs` first, with the body of `others` at its `PLACE`."""
    theirs = s_tir.renew_defs(others.func)
    mine = dict(zip(inputs, func.params, strict=False))
    given = [*(mine[v] for v in others.inputs), *func.params[len(mine) :]]
    places = dict(zip(theirs.params, given, strict=False))
    for var, place in list(places.items()):
        if tirx.is_buffer_var(var):
            sizes = zip(var.ty.shape, place.ty.shape, strict=True)
            places |= {size: actual for size, actual in sizes if isinstance(size, ir.Var)}
    body = structural_map(theirs.body, (ir.Var, lambda v: places.get(v, v)))

    def put(stmt: tirx.Evaluate) -> tirx.Stmt:
        found = isinstance(stmt.value, ir.StringImm) and stmt.value.value == PLACE.value
        return body if found else stmt

    whole = structural_map(func.body, (tirx.Evaluate, put))
    done = others.func.without_attr(PLAN_ATTR).without_attr(WORKLOAD_ATTR)
    return func.with_body(whole).with_attrs({**dict(done.attrs), **dict(func.attrs)})
