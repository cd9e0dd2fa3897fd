"""Reading a PrimFunc that somebody else made: its blocks as stages, each a formula of one buffer.

TVM's legaliser and FuseTIR emit one root block of loop nests, each around one block that stores one
element, without conditions and over whole buffers.  Anything else is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import relax, tirx

from ..tvm_ir import Analyzer, SBlockRealize, structural_equal
from .expressions import is_number, variables_of


@dataclass(frozen=True)
class Stage:
    """One block: ``buffer[indices] = value`` for all values of its variables."""

    name: str
    """Of the block."""
    buffer: tirx.Var
    """What it writes."""
    spatial: tuple[tirx.Var, ...]
    reduced: tuple[tirx.Var, ...]
    """Its variables: those of the result's elements, in the order of the result's dimensions, and
    those that are summed over."""
    extents: Mapping[tirx.Var, tirx.Expr]
    """Of all these variables."""
    value: tirx.Expr
    """What is stored; for a reduction, the update."""
    init: tirx.Expr | None
    """Where a reduction starts."""


def is_view(func: tirx.PrimFunc) -> bool:
    """Tell whether a function copies a tensor in order; TVM looks at functions of blocks alone."""
    return isinstance(func.body, SBlockRealize) and relax.analysis.has_reshape_pattern(func)


def read_stages(func: tirx.PrimFunc) -> list[Stage] | None:
    """Return the stages of a PrimFunc in order; None if it has any other statement."""
    if not isinstance(func.body, SBlockRealize) or func.body.iter_values:
        return None
    root = func.body.block
    if root.match_buffers or root.init is not None:
        return None
    nests = root.body.seq if isinstance(root.body, tirx.SeqStmt) else [root.body]
    stages = []
    for nest in nests:
        stage = _read_nest(nest)
        if stage is None:
            return None
        stages.append(stage)
    written = [stage.buffer for stage in stages]
    return stages if len(set(written)) == len(written) else None


def _read_nest(stmt: tirx.Stmt) -> Stage | None:
    loops: dict[tirx.Var, tirx.Expr] = {}
    while isinstance(stmt, tirx.For):
        if stmt.kind != tirx.ForKind.SERIAL or not is_number(stmt.min, 0) or stmt.annotations:
            return None
        loops[stmt.loop_var] = stmt.extent
        stmt = stmt.body
    if not isinstance(stmt, SBlockRealize) or not is_number(stmt.predicate, 1):
        return None
    block = stmt.block
    store = block.body
    if not isinstance(store, tirx.BufferStore) or block.alloc_buffers or block.match_buffers:
        return None
    extents: dict[tirx.Var, tirx.Expr] = {}
    used = variables_of((*store.indices, store.value))
    every = zip(block.iter_vars, stmt.iter_values, strict=True)
    own = [(a, at) for a, at in every if a.var in used or not is_number(a.dom.extent, 1)]
    axes = [axis for axis, _ in own]  # the block of a number has one that nothing reads
    for axis, value in own:
        if not _covers_its_loop(axis, value, loops):
            return None
        extents[axis.var] = axis.dom.extent
    spatial = tuple(store.indices)
    reduced = tuple(a.var for a in axes if a.iter_type == tirx.IterVar.CommReduce)
    known = {a.var for a in axes if a.iter_type == tirx.IterVar.DataPar}
    if set(spatial) != known or len(spatial) != len(known) or len(extents) != len(axes):
        return None
    if len(reduced) + len(spatial) != len(extents) or not _whole(store.buffer, spatial, extents):
        return None
    init = block.init.value if isinstance(block.init, tirx.BufferStore) else None
    if (block.init is None) != (init is None) or bool(reduced) != (init is not None):
        return None
    return Stage(block.name_hint, store.buffer, spatial, reduced, extents, store.value, init)


def _covers_its_loop(
    axis: tirx.IterVar, value: tirx.Expr, loops: Mapping[tirx.Var, tirx.Expr]
) -> bool:
    """Tell whether a block variable is simply its loop, over its whole domain."""
    if not is_number(axis.dom.min, 0):
        return False
    if isinstance(value, tirx.IntImm):
        return int(value) == 0 and is_number(axis.dom.extent, 1)
    return value in loops and structural_equal(loops[value], axis.dom.extent)


def _whole(
    buffer: tirx.Var, spatial: Sequence[tirx.Var], extents: Mapping[tirx.Var, tirx.Expr]
) -> bool:
    """Tell whether every element of the buffer is written."""
    shape = buffer.ty.shape
    return len(shape) == len(spatial) and all(
        structural_equal(extents[v], d) or Analyzer().can_prove_equal(extents[v], d)
        for v, d in zip(spatial, shape, strict=True)
    )
