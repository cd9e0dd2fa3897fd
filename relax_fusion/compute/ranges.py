"""One function out of several schedules of it, chosen by the values of dynamic dimensions."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, s_tir, tirx

from ..errors import LoweringError
from ..tvm_ir import SBlock, SBlockRealize, structural_map


def stitch(funcs: Sequence[tuple[tirx.Expr | None, tirx.PrimFunc]]) -> tirx.PrimFunc:
    """Return a function that runs the first of `funcs` whose condition holds.

    rewrite::

        f0(a, b): root0                  ->    f(a, b):
        f1(a, b): root1                            if dim <= 16: root0
                                                   else: root1

    It has the parameters and the attributes of the first function.

    `funcs`: conditions, in sizes of the first function, and the function for each; the last is None
    and its function serves the rest.  All have the same signature; each body is one root block.
    They may share variables, as schedules of one function do.
    Raises `LoweringError` if the conditions are not as described, or the signatures differ.
    """
    conditions = [when for when, _ in funcs]
    if not conditions or [when is None for when in conditions] != [*[False] * len(funcs[1:]), True]:
        raise LoweringError(f"stitch: the conditions {conditions} must end in None, and only there")
    first = funcs[0][1]
    bodies = [first.body, *(_body_over(first, func) for _, func in funcs[1:])]
    body = bodies[-1]
    for when, earlier in reversed(list(zip(conditions[:-1], bodies[:-1], strict=True))):
        # Every thread of a kernel goes the same way; said aloud, TVM puts barriers inside.
        body = tirx.IfThenElse(tirx.op.tvm_thread_invariant(when), earlier, body)
    if len(bodies) == 1:
        return first
    return first.with_body(root_of(body))


def root_of(body: tirx.Stmt, buffers: Sequence[tirx.Var] = ()) -> tirx.Stmt:
    """Return the root block of a function, with its statements and what they share."""
    root = SBlock([], [], [], "root", body, alloc_buffers=buffers)
    return SBlockRealize([], True, root)


def unless_empty(func: tirx.PrimFunc, dim: tirx.Expr) -> tirx.PrimFunc:
    """Return a function that does nothing where a dynamic `dim` is 0.

    TVM launches one thread block where a grid has none; it would read and write what is not there.

    rewrite: ``f(a, b): root`` -> ``f(a, b): if dim > 0: root``
    """
    if isinstance(dim, tirx.IntImm):
        return func
    some = tirx.op.tvm_thread_invariant(dim > tirx.IntImm("int64", 0))
    return func.with_body(root_of(tirx.IfThenElse(some, func.body, None)))


def _body_over(first: tirx.PrimFunc, func: tirx.PrimFunc) -> tirx.Stmt:
    """Return the body of `func` over the parameters of `first`, with variables of its own."""
    func = s_tir.renew_defs(func)
    if len(func.params) != len(first.params):
        raise LoweringError(
            f"stitch: a function of {len(func.params)} parameters cannot join one of "
            f"{len(first.params)}"
        )
    mapping: dict[tirx.Var, tirx.Var] = {}
    for ours, theirs in zip(first.params, func.params, strict=True):
        mapping[theirs] = ours
        mapping.update(_matching_sizes(ours, theirs))
    return structural_map(func.body, (ir.Var, lambda var: mapping.get(var, var)))


def _matching_sizes(ours: tirx.Var, theirs: tirx.Var) -> dict[tirx.Var, tirx.Var]:
    """Pair the symbolic sizes of two parameters."""
    buffers = [tirx.is_buffer_var(ours), tirx.is_buffer_var(theirs)]
    if not any(buffers):
        return {}
    if not all(buffers) or ours.ty.dtype != theirs.ty.dtype:
        raise LoweringError(f"stitch: the parameters {ours.name} and {theirs.name} differ in type")
    pairs = list(zip(ours.ty.shape, theirs.ty.shape, strict=False))
    same_rank = len(ours.ty.shape) == len(theirs.ty.shape)
    if not same_rank or any(type(a) is not type(b) for a, b in pairs):
        raise LoweringError(f"stitch: the parameters {ours.name} and {theirs.name} differ in shape")
    fixed = [(int(a), int(b)) for a, b in pairs if isinstance(a, tirx.IntImm)]
    if any(a != b for a, b in fixed):
        raise LoweringError(f"stitch: the parameters {ours.name} and {theirs.name} differ in shape")
    return {b: a for a, b in pairs if isinstance(a, ir.Var)}
