"""The formulas of stages: replacing variables and loads in them, and one formula in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm_ffi
from tvm import ir, tirx

from ...matching.stages import Stage, loads_of

MOST_NODES = 4096
"""Loads that a formula may come to have when the stages before it are put in their places."""


def substitute(value: tirx.Expr, mapping: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr:
    """Return `value` with variables replaced."""
    return tvm_ffi.structural_map(value, (ir.Var, lambda var: mapping.get(var, var)))


def map_loads(value: tirx.Expr, new: Callable[[ir.TensorLoad], tirx.Expr]) -> tirx.Expr:
    """Return `value` with every load replaced by what `new` makes of it."""
    return tvm_ffi.structural_map(value, (ir.TensorLoad, new))


def variables_of(value: tirx.Expr) -> set[tirx.Var]:
    """Return the variables in `value`, the buffers among them."""
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(value, (ir.Var, found.append))
    return set(found)


def inlined(value: tirx.Expr, before: Mapping[tirx.Var, Stage]) -> tirx.Expr | None:
    """Put the formulas of element-wise stages in the place of loads of their buffers.

    rewrite: ``b[i] + 1`` with ``b[i] = a[i] * 2`` -> ``a[i] * 2 + 1``

    Parameters
    ----------
    before : mapping of tirx.Var to Stage
        Stages by the buffer that they write; none is a reduction.

    Returns
    -------
    tirx.Expr or None
        None if it would have more than `MOST_NODES` loads.
    """

    def formula(load: ir.TensorLoad) -> tirx.Expr:
        stage = before.get(load.source)
        if stage is None:
            return load
        return substitute(stage.value, dict(zip(stage.spatial, load.indices, strict=True)))

    while True:
        loads = loads_of(value)
        if len(loads) > MOST_NODES:
            return None
        if not any(load.source in before for load in loads):
            return value
        value = map_loads(value, formula)
