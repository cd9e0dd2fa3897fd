"""Kernels that begin before those in front of them end: CUDA's programmatic dependent launch.

Where a function launches a norm and then products, or several products, the blocks of one can be on
the device, and weights on their way, while the kernel in front is still at work.  Then
``griddepcontrol.wait`` waits for all that it has written (PTX ISA, "Parallel Synchronization and
Communication Instructions: griddepcontrol"; CUDA C++ Programming Guide, "Programmatic Dependent
Launch and Synchronization").  CUDA graphs hold such launches from CUDA 12.3 on.

A launch parameter of TVM makes all kernels of a function such.  So every one of them waits, the
first one too: what is read in front of a wait must have been there before the *function* began.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx
from tvm.script import tirx as script
from tvm.target import Target

from ...hardware.target import device_of
from ...matching.expressions import found_in, thread_tag

LAUNCH_PARAMS = {"tirx.kernel_launch_params": ["tirx.use_programtic_dependent_launch"]}
"""What TVM reads from the attributes of a function, in its spelling."""


def is_possible(target: Target) -> bool:
    """Tell whether a target has dependent launches."""
    return device_of(target).capabilities.dependent_launch


def wait() -> tirx.Expr:
    """Return the instruction that waits for the kernels in front."""
    return script.ptx["griddepcontrol.wait"]()


def announcing(kernel: tirx.Stmt) -> tirx.Stmt:
    """Let the next kernel begin as soon as all blocks of this one have.

    rewrite: ``for i: bind block: S`` -> ``for i: bind block: wait; launch dependents; S``
    """
    return _preceded(kernel, [wait(), script.ptx["griddepcontrol.launch_dependents"]()])


def launched_early(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the launches of a function dependent, if one of its kernels waits; then all do.

    rewrite: ``for i: bind block: S`` -> ``for i: bind block: wait; S``
    """
    if not _waits(func.body):
        return func
    return func.with_body(_preceded(func.body, [wait()])).with_attrs(LAUNCH_PARAMS)


def _preceded(stmt: tirx.Stmt, calls: list[tirx.Expr]) -> tirx.Stmt:
    """Put calls in front of every kernel that does not wait."""

    def begun(loop: tirx.For) -> tirx.For:
        if thread_tag(loop) != "blockIdx.x" or _waits(loop):
            return loop
        body = tirx.SeqStmt([*(tirx.Evaluate(call) for call in calls), loop.body])
        return tirx.For(
            *(loop.loop_var, loop.min, loop.extent, loop.kind, body),
            thread_binding=loop.thread_binding,
            annotations=loop.annotations,
        )

    return tvm_ffi.structural_map(stmt, (tirx.For, begun))


def _waits(stmt: tirx.Stmt) -> bool:
    return any(tvm_ffi.structural_equal(call, wait()) for call in found_in(stmt, ir.Call))
