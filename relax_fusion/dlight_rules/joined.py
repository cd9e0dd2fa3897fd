"""Functions whose parts have nothing to do with each other: each part is scheduled by itself."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, s_tir, tirx
from tvm.target import Target

from ..compute.ranges import root_of
from ..errors import Decline, Reason
from ..hardware.target import is_gpu
from ..matching.expressions import found_in, thread_tag
from ..tvm_ir import SBlock, structural_equal, structural_map
from .norms import MOST_ROWS, NormRule
from .row_blocks import is_plain
from .safe_rule import SafeRule


class JoinedRule(SafeRule):
    """Schedule the norms of several tensors, of which none is made of another, as one kernel.

    rewrite::

        for i: s[i], y[i] = f(x[i])    ->    parallel for i: if i < m: s[i], y[i] = f(x[i])
        for j: t[j], z[j] = g(w[j])                          else: t[i - m], z[i - m] = ...

    leaves:
        functions of one part, and those of which `NormRule` does not take every part.  Parts by
        thread blocks of other sizes are kernels of their own.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule, None for a function of one part."""
        parts = _parts(func) if is_plain(func) else []
        if len(parts) < 2:
            return None
        for together in (MOST_ROWS, 2, 1):  # rows of a thread block
            made = [NormRule(together).schedule(part, target) for part in parts]
            roots = [f.mod["main"].body.block for f in made if isinstance(f, s_tir.Schedule)]
            if len(roots) < len(parts):
                return Decline(Reason.SCHEDULE, "a part of it is no norm")
            bodies = [root.body for root in roots]
            if all(_alike(bodies[0], body) for body in bodies[1:]):
                break
        buffers = [buffer for root in roots for buffer in root.alloc_buffers]
        body = side_by_side(bodies, is_gpu(target))
        return s_tir.Schedule(func.with_body(root_of(body, buffers)), enable_check=False)


def _parts(func: tirx.PrimFunc) -> list[tirx.PrimFunc]:
    """Cut a function into those of its statements that share what they make."""
    root = func.body.block
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    read = [{r.source for b in found_in(n, SBlock) for r in (*b.reads, *b.writes)} for n in nests]
    made = {r.source for b in found_in(root, SBlock) for r in b.writes}
    groups: list[tuple[set[tirx.Var], list[int]]] = []
    for index, buffers in enumerate(read):
        shared = [group for group in groups if group[0] & buffers & made]
        kept = [group for group in groups if not any(group is s for s in shared)]
        whole = set.union(buffers, *(g[0] for g in shared))
        groups = [*kept, (whole, [*(i for g in shared for i in g[1]), index])]
    return [
        tirx.PrimFunc(
            [p for p in func.params if p in buffers],
            root_of(_sequence([nests[i] for i in indices]), [*buffers & {*root.alloc_buffers}]),
            func.ret_type,
            func.attrs,
        )
        for buffers, indices in groups
    ]


def side_by_side(bodies: Sequence[tirx.Stmt], on_gpu: bool) -> tirx.Stmt:
    """Return statements with one outer loop, if they are loops that can have one."""
    whole = bodies[0]
    for body in bodies[1:]:
        if not _alike(whole, body):
            return _sequence(list(bodies))
        count = whole.extent
        var = tirx.Var(whole.loop_var.name, whole.loop_var.ty)
        inside = var < count
        condition = tirx.op.tvm_thread_invariant(inside) if on_gpu else inside
        first, second = _at(whole, var, on_gpu), _at(body, var - count, on_gpu)
        both = tirx.IfThenElse(condition, first, second)
        extent, kind, thread = count + body.extent, whole.kind, whole.thread_binding
        whole = tirx.For(var, whole.min, extent, kind, both, thread, whole.annotations)
    return whole


def _alike(one: tirx.Stmt, other: tirx.Stmt) -> bool:
    """Tell whether two loops are spread alike: over cores, or over blocks of as many threads."""
    loops = [one, other]
    if not all(isinstance(loop, tirx.For) and loop.kind != tirx.ForKind.SERIAL for loop in loops):
        return False
    threads = [
        {tag: loop.extent for loop in found_in(outer.body, tirx.For) if (tag := thread_tag(loop))}
        for outer in loops
    ]
    first, second = threads
    same = first.keys() == second.keys() and thread_tag(one) == thread_tag(other)
    return same and all(structural_equal(first[tag], second[tag]) for tag in first)


def _at(loop: tirx.For, index: tirx.Expr, on_gpu: bool) -> tirx.Stmt:
    """Return one iteration of a loop.

    On a GPU, the index has a name: TVM would see that the common loop has another extent, which
    quotients of the index may not divide, and leave out sums over threads.
    """
    named = tirx.Var(loop.loop_var.name, loop.loop_var.ty) if on_gpu else index
    body = structural_map(
        loop.body, (ir.Var, lambda var: named if var.same_as(loop.loop_var) else var)
    )
    return tirx.SeqStmt([tirx.Bind(named, index), body]) if on_gpu else body


def _sequence(statements: list[tirx.Stmt]) -> tirx.Stmt:
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)
