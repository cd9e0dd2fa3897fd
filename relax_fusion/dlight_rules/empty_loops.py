"""Loops that never run, of which TVM's rules make divisions by zero."""

from __future__ import annotations

import contextlib
from collections import Counter

from tvm import ir, s_tir, tirx

from ..matching.expressions import variables_of
from ..transforms.fixed_arguments import CALLS
from ..tvm_ir import SBlock, SBlockRealize, structural_map, structural_walk
from . import verbs
from .safe_rule import SCHEDULE_ERRORS


def without_empty_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` without loops of no iterations, and without what only they had use for.

    rewrite::

        for i in 0: S(i)                             ->    nothing
        for i in n: for k in 0: y[i] += f(i, k)      ->    for i in n: y[i] = 0

    A reduction of nothing still has a result; TVM initialises it in the first iteration, so that it
    is whatever the memory held.
    """
    starts: list[SBlockRealize] = []

    def block(node: SBlockRealize) -> SBlockRealize:
        start = _start_only(node)
        if start is not None:
            starts.append(start)
        return start or node

    def loop(node: tirx.For) -> tirx.Stmt:
        if _is_nothing(node.body):
            return node.body
        if not isinstance(node.extent, tirx.IntImm) or node.extent.value > 0:
            return node
        inner = node.body
        while isinstance(inner, tirx.For):
            inner = inner.body
        only_starts = any(inner.same_as(s) for s in starts) and not _reads(node.body, node.loop_var)
        return node.body if only_starts else tirx.Evaluate(0)

    def sequence(node: tirx.SeqStmt) -> tirx.Stmt:
        kept = [part for part in node.seq if not _is_nothing(part)]
        return node if len(kept) == len(node.seq) else tirx.stmt_seq(*kept or [tirx.Evaluate(0)])

    rewrites = [(SBlockRealize, block), (tirx.For, loop), (tirx.SeqStmt, sequence)]
    body = structural_map(func.body, rewrites, order="post")
    return func if body.same_as(func.body) else func.with_body(_without_unread(body))


def with_starts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` with reductions of a length that only the run knows started before their loops.

    rewrite::

        for i, k in (8, n): y[i] += f(i, k)     ->    for i in 8:
                                                          y[i] = 0
                                                          for k in n: y[i] += f(i, k)

    TVM starts them in the first iteration, and there may be none.  What TVM cannot schedule stays.
    """
    starts = [
        block.name_hint
        for block in verbs.blocks_of(func)
        if block.init is not None
        and any(
            v.iter_type == tirx.IterVar.CommReduce and not isinstance(v.dom.extent, tirx.IntImm)
            for v in block.iter_vars
        )
    ]
    if not starts:
        return func
    try:
        return _started(s_tir.Schedule(func, error_render_level="none"), starts)
    except SCHEDULE_ERRORS:
        return func


def _started(sch: s_tir.Schedule, names: list[str]) -> tirx.PrimFunc:
    for name in names:
        block = sch.get_sblock(name)
        for loop in reversed(sch.get_loops(block)):
            with contextlib.suppress(s_tir.ScheduleError):  # a loop around it counts terms too
                sch.decompose_reduction(block, loop)
                break
    return sch.mod["main"]


def _without_unread(body: tirx.Stmt) -> tirx.Stmt:
    """Drop memory of a function that nobody reads, and the statements that write nothing else."""
    if not isinstance(body, SBlockRealize):
        return body
    root = body.block
    parts = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    buffers = list(root.alloc_buffers)
    while True:
        named = [variables_of(part) for part in parts]
        times = Counter(buffer for names in named for buffer in buffers if buffer in names)
        unread = {buffer for buffer in buffers if times[buffer] == 1}
        kept = [p for p, names in zip(parts, named, strict=True) if not _fills(p, names & unread)]
        if len(kept) == len(parts):
            break
        parts = kept
    buffers = [buffer for buffer in buffers if times[buffer]]
    block = SBlock(
        *([], root.reads, root.writes, root.name_hint),
        tirx.stmt_seq(*parts or [tirx.Evaluate(0)]),
        alloc_buffers=buffers,
        match_buffers=root.match_buffers,
        annotations=root.annotations,
    )
    return SBlockRealize([], body.predicate, block)


def _fills(stmt: tirx.Stmt, unread: set[ir.Var]) -> bool:
    """Tell whether all that a statement does is to store into one of `unread`."""
    stores: list[ir.Var] = []
    others: list[ir.Call] = []

    def call(node: ir.Call) -> None:
        if not isinstance(node.op, ir.Op) or node.op.name.startswith(CALLS):
            others.append(node)

    def store(node: tirx.BufferStore) -> None:
        stores.append(node.buffer)

    structural_walk(stmt, [(ir.Call, call), (tirx.BufferStore, store)])
    return bool(stores) and not others and all(buffer in unread for buffer in stores)


def _reads(stmt: tirx.Stmt, var: ir.Var) -> bool:
    return any(var.same_as(v) for v in tirx.analysis.undefined_vars(stmt))


def _start_only(node: SBlockRealize) -> SBlockRealize | None:
    """Return the initialisation of a reduction of nothing, None for any other block."""
    block = node.block
    pairs = list(zip(block.iter_vars, node.iter_values, strict=True))
    reduced = [v.dom.extent for v, _ in pairs if v.iter_type == tirx.IterVar.CommReduce]
    if block.init is None or not any(isinstance(n, tirx.IntImm) and n.value <= 0 for n in reduced):
        return None
    kept = [(v, at) for v, at in pairs if v.iter_type != tirx.IterVar.CommReduce]
    start = SBlock(
        *([v for v, _ in kept], [], block.writes, block.name_hint, block.init),
        alloc_buffers=block.alloc_buffers,
        match_buffers=block.match_buffers,
        annotations=block.annotations,
    )
    return SBlockRealize([at for _, at in kept], node.predicate, start)


def _is_nothing(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm)
