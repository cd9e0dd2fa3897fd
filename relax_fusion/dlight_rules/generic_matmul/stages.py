"""The formulas of stages, put one in another."""

from __future__ import annotations

from collections.abc import Mapping

import tvm_ffi
from tvm import ir, tirx

from ...matching.expressions import loads_of, substitute
from ...matching.stages import Stage

MOST_NODES = 4096
"""Loads that a formula may come to have when the stages before it are put in their places."""


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
        value = tvm_ffi.structural_map(value, (ir.TensorLoad, formula))
