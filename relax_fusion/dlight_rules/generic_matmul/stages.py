"""The formulas of stages, put one in another."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import ir, tirx

from ...matching.expressions import found_in, loads_of, substitute
from ...matching.stages import Stage
from ...tvm_ir import TensorLoad, structural_map

MOST_CODE = 512
"""Reads of arguments in the code of a formula in which the stages before it are put in their
places; compiling more takes seconds."""

TANH_CODE = 8
"""How often the code of tanh, a polynomial over another, reads its argument."""


def inlined(value: tirx.Expr, before: Mapping[tirx.Var, Stage]) -> tirx.Expr | None:
    """Put the formulas of element-wise stages in the place of loads of their buffers.

    rewrite: ``b[i] + 1`` with ``b[i] = a[i] * 2`` -> ``a[i] * 2 + 1``

    Parameters
    ----------
    before : mapping of tirx.Var to Stage
        Stages by the buffer that they write, in their order; none is a reduction.

    Returns
    -------
    tirx.Expr or None
        None if its code would read its arguments more than `MOST_CODE` times: each use of a stage
        repeats what the stage computes.
    """
    code: dict[tirx.Var, int] = {}
    for buffer, stage in before.items():
        code[buffer] = _code(stage.value, code)
    if _code(value, code) > MOST_CODE:
        return None

    def formula(load: TensorLoad) -> tirx.Expr:
        stage = before.get(load.source)
        if stage is None:
            return load
        return substitute(stage.value, dict(zip(stage.spatial, load.indices, strict=True)))

    while any(load.source in before for load in loads_of(value)):
        value = structural_map(value, (TensorLoad, formula))
    return value


def _code(value: tirx.Expr, code: Mapping[tirx.Var, int]) -> int:
    """Return how often the code of a formula reads; `code` says it of the buffers before."""
    reads = sum(code.get(load.source, 1) for load in loads_of(value))
    names = (getattr(call.op, "name", "") for call in found_in(value, ir.Call))
    return reads * TANH_CODE ** sum(name == "tirx.tanh" for name in names)
