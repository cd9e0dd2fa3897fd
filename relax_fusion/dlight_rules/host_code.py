"""What of a PrimFunc runs on the host, and the rule that leaves none of it there."""

from __future__ import annotations

from collections.abc import Callable

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.target import Target

from ..errors import Decline, Reason
from ..hardware.target import is_gpu
from ..matching.expressions import serial
from ..tvm_ir import SBlock, SBlockRealize, TensorLoad, structural_map, structural_walk
from .empty_loops import with_starts
from .safe_rule import SafeRule, has_blocks

_THREADS = ("thread_extent", "virtual_thread", "tirx.device_entry")
"""Keys of the statements inside which code runs on the device."""


def launches_threads(stmt: tirx.Stmt) -> bool:
    """Tell whether the inside of a statement runs on the device."""
    if isinstance(stmt, tirx.AttrStmt):
        return str(stmt.attr_key) in _THREADS
    return isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.THREAD_BINDING


Functions = Callable[[ir.GlobalVar], object]
"""A function that returns what a variable stands for, None if that is not known."""


def host_accesses(root: object, functions: Functions | None = None) -> list[str]:
    """Return the names of what code of the host reads, writes or calls in memory of the device.

    Those are tensors outside of all threads, and PrimFuncs that access such; without `functions`,
    which returns what a GlobalVar stands for, each call of one counts.  To pass a tensor on to a
    function outside of the module is no access.
    """
    found: dict[str, None] = {}
    seen: set[ir.GlobalVar] = set()

    def enter(stmt: tirx.Stmt) -> tvm_ffi.WalkResult | None:
        return tvm_ffi.WalkResult.SKIP if launches_threads(stmt) else None

    def access(tensor: tirx.Var) -> None:
        if tensor.scope() == "global":
            found[tensor.name] = None

    def call(node: ir.Call) -> tvm_ffi.WalkResult | None:
        if isinstance(node.op, ir.Op):
            return tvm_ffi.WalkResult.SKIP if node.op.name == "tirx.address_of" else None
        if isinstance(node.op, ir.GlobalVar) and node.op not in seen:
            seen.add(node.op)
            callee = functions(node.op) if functions is not None else None
            inside = len(found)
            if isinstance(callee, tirx.PrimFunc):
                walk(callee.body)
            if functions is None or len(found) > inside:
                found[node.op.name_hint] = None
        return None

    def walk(node: object) -> None:
        structural_walk(
            node,
            [
                ((tirx.For, tirx.AttrStmt), enter),
                (tirx.BufferStore, lambda store: access(store.buffer)),
                (TensorLoad, lambda load: access(load.source)),
                (ir.Call, call),
            ],
            order="pre",
        )

    walk(root)
    return list(found)


class SingleThreadRule(SafeRule):
    """Run on one thread of a GPU what no other rule takes, rather than on the host.

    rewrite: ``S1; S2`` -> ``for b in T.thread_binding(1, "blockIdx.x"): ... "threadIdx.x": S1``,
    and the same for ``S2``

    Statements of a function that launch threads themselves stay as they are, and so does memory
    that the others share.

    declines when:
        one statement accesses memory of the device and also calls a packed function or launches
        threads.
    """

    def attempt(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule of any function, with blocks or without."""
        return self.schedule(func, target) if is_gpu(target) else None

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline:
        """Return the function with its statements in kernels, or why one cannot be."""
        func = with_starts(func)
        root = func.body.block if has_blocks(func) else SBlock([], [], [], "root", func.body)
        parts = _parts(root)
        outside = [bool(host_accesses(part)) for part in parts]
        for part, accesses in zip(parts, outside, strict=True):
            if accesses and (reason := _needs_the_host(part)):
                return Decline(Reason.SCHEDULE, reason)
        kernels = [
            _kernel(p) if accesses else p for p, accesses in zip(parts, outside, strict=True)
        ]
        block = SBlock(
            *([], root.reads, root.writes, root.name_hint, tirx.stmt_seq(*kernels)),
            alloc_buffers=root.alloc_buffers,
            match_buffers=root.match_buffers,
            annotations=root.annotations,
        )
        return s_tir.Schedule(func.with_body(SBlockRealize([], True, block)))


def _parts(root: SBlock) -> list[tirx.Stmt]:
    """Return the statements that can be separate kernels: they share no more than global memory."""
    parts = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    shared = [p for p in parts if _is_global(p)]
    others = [p for p in parts if not _is_global(p)]
    local = any(buffer.scope() != "global" for buffer in root.alloc_buffers)
    if local or any(isinstance(p, tirx.AllocBuffer | tirx.Bind) for p in others):
        return [*shared, tirx.stmt_seq(*others)]
    return parts


def _is_global(stmt: tirx.Stmt) -> bool:
    """Tell whether a statement allocates memory that all kernels can access."""
    return isinstance(stmt, tirx.AllocBuffer) and stmt.buffer.scope() == "global"


def _needs_the_host(stmt: tirx.Stmt) -> str:
    """Return what of a statement cannot be code of the device, if anything."""
    found: list[str] = []

    def call(node: ir.Call) -> None:
        if isinstance(node.op, ir.Op) and node.op.name.startswith("tirx.tvm_call_"):
            found.append(f"it accesses tensors and calls {node.args[0]} in one statement")

    def threads(node: tirx.Stmt) -> None:
        if launches_threads(node):
            found.append("it accesses tensors and launches threads in one statement")

    structural_walk(stmt, [(ir.Call, call), ((tirx.For, tirx.AttrStmt), threads)])
    return found[0] if found else ""


def _kernel(stmt: tirx.Stmt) -> tirx.Stmt:
    """Return a kernel of one thread."""
    body = structural_map(stmt, (tirx.For, serial), order="post")
    for tag in ("threadIdx.x", "blockIdx.x"):
        axis = tirx.IterVar(None, tirx.Var(tag, "int32"), tirx.IterVar.ThreadIndex, tag)
        kind = tirx.ForKind.THREAD_BINDING
        body = tirx.For(tirx.Var(tag[:-5], "int32"), 0, 1, kind, body, axis)
    return body
