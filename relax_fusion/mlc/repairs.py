"""Kernels that TVM and MLC-LLM bring, as CPUs can run them."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import ir, tirx

from ..matching.expressions import found_in, is_number, thread_tag
from ..transforms.modules import functions_of, with_functions


@tvm.transform.module_pass(opt_level=0, name="ReadSingleElements")
@dataclass(frozen=True)
class ReadSingleElements:
    """Read the one element of a dim of size 1, whatever the index says: no other is there.

    rewrite: ``scale[d] for d in 128`` -> ``scale[0]``, where scale is ``T.Buffer((1,), ...)``

    TVM's attention on CPUs over tokens of a cache, for several new ones (``_attention_prefill_cpu``
    in ``nn.llm``), reads a factor of its running softmax so, and what lies behind it in memory.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without such an index stays the same."""
        updated = {}
        for gvar, func in functions_of(mod, tirx.PrimFunc).items():
            body = tvm_ffi.structural_map(func.body, (ir.TensorLoad, _single), order="post")
            if not body.same_as(func.body):
                updated[gvar] = func.with_body(body)
        return with_functions(mod, updated)


def _single(load: ir.TensorLoad) -> tirx.Expr:
    indices = [
        tirx.const(0, str(index.ty.dtype)) if is_number(size, 1) else index
        for index, size in zip(load.indices, load.source.ty.shape, strict=True)
    ]
    if all(tvm_ffi.structural_equal(*pair) for pair in zip(indices, load.indices, strict=True)):
        return load
    return tirx.BufferLoad(load.source, indices)


@tvm.transform.module_pass(opt_level=0, name="RunThreadsInTurn")
@dataclass(frozen=True)
class RunThreadsInTurn:
    """Make kernels that were written for GPUs, threads and all, functions that a CPU runs.

    rewrite::

        for i in T.thread_binding(n, "threadIdx.x"): S(i)    ->    for i in range(n): S(i)
        T.tvm_storage_sync("shared")                         ->    nothing

    In S-TIR a loop over threads is a loop: each thread has its part of every buffer, and blocks say
    what they need.  MLC-LLM routes tokens to experts and multiplies by their weights so, on CPUs as
    well, where TVM refuses threads.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without threads stays the same."""
        updated = {}
        for gvar, func in functions_of(mod, tirx.PrimFunc).items():
            if any(thread_tag(loop) for loop in found_in(func.body, tirx.For)):
                rewrites = ((tirx.For, _in_turn), (ir.Call, _alone))
                body = func.body
                for rewrite in rewrites:
                    body = tvm_ffi.structural_map(body, rewrite, order="post")
                updated[gvar] = func.with_body(body)
        return with_functions(mod, updated)


def _in_turn(loop: tirx.For) -> tirx.For:
    if not thread_tag(loop):
        return loop
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)


def _alone(call: ir.Call) -> tirx.Expr:
    """Return what a call that threads make together is for one that is alone."""
    name = getattr(call.op, "name", "")
    if name == "tirx.tvm_thread_invariant":
        return call.args[0]
    return tirx.const(0, "int32") if name == "tirx.tvm_storage_sync" else call
