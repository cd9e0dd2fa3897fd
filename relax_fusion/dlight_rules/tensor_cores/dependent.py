"""Kernels that begin before those in front of them end: CUDA's programmatic dependent launch.

A kernel that is launched so may be on the device, and its weights on their way, while the one in
front is still at work.  Then ``griddepcontrol.wait`` waits for all that this has written (PTX ISA,
"Parallel Synchronization and Communication Instructions: griddepcontrol"; CUDA C++ Programming
Guide, "Programmatic Dependent Launch and Synchronization").  CUDA graphs hold such launches from
CUDA 12.3 on.

Every kernel that is launched so waits before it ends, so one that has ended knows that all before
it have.  They let their successor begin behind their wait.  Only the merge of an attention's parts
lets it begin at once: what its function launched before has waited.  So the kernels of a caller
have ended when a function's second kernel begins, and what no kernel of the function writes may be
read in front of a wait; as may what one wrote that is not the one in front.  Norms in front of few
rows gain nothing by it: a matmul whose blocks begin while the kernel in front of the norm is at
work gets multiprocessors one after the other, and a token at batch 8 takes 4 % longer
(`2026-11-29-whole_step.log`).

A launch parameter of TVM makes all kernels of a function such.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import tvm_ffi
from tvm import ir, tirx
from tvm.script import tirx as script
from tvm.target import Target

from ...compute.routing import IN_TURN_ATTR
from ...hardware.target import device_of
from ...matching.expressions import found_in, thread_tag
from ...matching.stages import is_view
from ...tvm_ir import T, structural_equal, structural_map, structural_walk
from ..host_code import launches_threads

LAUNCH_PARAMS = {"tirx.kernel_launch_params": ["tirx.use_programtic_dependent_launch"]}
"""These attributes of a function, in TVM's spelling, ask for a dependent launch."""

BLOCKS = 4
"""A small kernel has at most this many thread blocks for each multiprocessor. That each of many
blocks waits costs time: 9 us of a kernel that dequantises 4096 x 4096 weights, on an H200."""


def hand_over() -> None:
    """Emit what waits for the kernels in front, and lets the next one begin.

    That begins as soon as all blocks of this one are so far, where there is room for it.
    """
    for call in (_wait(), _announce()):
        T.evaluate(call)


def announcing(stmt: tirx.Stmt) -> tirx.Stmt:
    """Let the next kernel begin as soon as all blocks of this one have waited.

    rewrite: ``for i: bind block: S`` -> ``for i: bind block: wait; launch dependents; S``
    """
    return _preceded(stmt, [_wait(), _announce()], [k for k in kernels(stmt) if not _waits(k)])


def waiting_first(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let the first kernel of a function read nothing before those in front of it have ended.

    rewrite: ``for i: bind block: S; wait; T`` -> ``for i: bind block: wait; S; wait; T``
    """
    first = [k for k in kernels(func.body)[:1] if _waits(k)]
    return func.with_body(_preceded(func.body, [_wait()], first)) if first else func


def launched_early(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Make the launches of a function dependent, if one of its kernels waits, or all are small.

    rewrite: ``for i: bind block: S`` -> ``for i: bind block: wait; S``

    Then all kernels wait.  Small ones let the next one begin, too.

    declines when: the target has no dependent launches; TVM makes a view of the function's result;
    the function says so (`IN_TURN_ATTR`).
    """
    if IN_TURN_ATTR in (func.attrs or {}):
        return func
    found = kernels(func.body)
    if not device_of(target).capabilities.dependent_launch or not all(
        isinstance(kernel, tirx.For) and thread_tag(kernel) == "blockIdx.x" for kernel in found
    ):
        return func
    body = func.body
    if not _waits(body):
        small = _are_small(found, BLOCKS * device_of(target).sm_count)
        if not small or is_view(func):
            return func
        body = announcing(body)
    body = _preceded(body, [_wait()], [k for k in kernels(body) if not _waits(k)])
    return func.with_body(body).with_attrs(LAUNCH_PARAMS)


def kernels(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements that are launched, in order."""
    found: list[tirx.Stmt] = []

    def enter(inner: tirx.Stmt) -> tvm_ffi.WalkResult | None:
        if not launches_threads(inner):
            return None
        found.append(inner)
        return tvm_ffi.WalkResult.SKIP

    structural_walk(stmt, ((tirx.For, tirx.AttrStmt), enter), order="pre")
    return found


def _are_small(found: Sequence[tirx.Stmt], most: int) -> bool:
    """Tell whether kernels have so few blocks that the next one finds room beside each."""
    loops = [[f for f in found_in(k, tirx.For) if "blockIdx" in thread_tag(f)] for k in found]
    if not all(isinstance(f.extent, tirx.IntImm) for grid in loops for f in grid):
        return False
    return bool(loops) and all(prod(int(f.extent) for f in grid) <= most for grid in loops)


def _preceded(stmt: tirx.Stmt, calls: Sequence[tirx.Expr], where: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Put calls in front of kernels."""

    def begun(loop: tirx.For) -> tirx.For:
        if not any(loop.same_as(kernel) for kernel in where):
            return loop
        body = tirx.SeqStmt([*map(tirx.Evaluate, calls), loop.body])
        return tirx.For(
            *(loop.loop_var, loop.min, loop.extent, loop.kind, body),
            thread_binding=loop.thread_binding,
            annotations=loop.annotations,
        )

    return structural_map(stmt, (tirx.For, begun))


def _wait() -> tirx.Expr:
    return script.ptx["griddepcontrol.wait"]()


def _announce() -> tirx.Expr:
    return script.ptx["griddepcontrol.launch_dependents"]()


def _waits(stmt: tirx.Stmt) -> bool:
    return any(structural_equal(call, _wait()) for call in found_in(stmt, ir.Call))
