"""Sums of pairs of bfloat16 by the instruction that a processor has for them.

TVM computes bfloat16 as float32 on a CPU, and has no vectors of it there: the instruction is called
by a function in LLVM's language, whose parameters are words, and which LLVM inlines.
"""

from __future__ import annotations

from tvm import ir, tirx
from tvm.target import Target

from ...compute.pairs import WORD
from ...hardware.instructions import PAIR_DOT
from ...hardware.target import device_of
from ...matching.expressions import loads_of, ramp, substitute, variables_of
from ...tvm_ir import SBlock, SBlockRealize, structural_map
from .panels import along

FUNCTION = "relax_fusion_dot_of_pairs"

SOURCE = """\
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define <16 x float> @{name}(<16 x float> %sum, <16 x i32> %x, <16 x i32> %w) {{
  %a = bitcast <16 x i32> %x to <32 x bfloat>
  %b = bitcast <16 x i32> %w to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> %sum, <32 x bfloat> %a, <32 x bfloat> %b)
  ret <16 x float> %r
}}
"""


def has_dots(target: Target, lanes: int) -> bool:
    """Tell whether a target adds up vectors of so many pairs by an instruction."""
    return lanes == PAIR_DOT.n and PAIR_DOT in device_of(target).capabilities.matrix_instructions


def multiply_pairs(func: tirx.PrimFunc, lanes: int, target: Target) -> tirx.PrimFunc:
    """Return `func` with its vectors of sums of pairs added up by the instruction, if there is one.

    rewrite: ``vector for l: sum[l] += products(x, w[l])`` -> ``sum = dot(sum, x in all lanes, w)``
    """
    if not has_dots(target, lanes):
        return func

    def visit(loop: tirx.For) -> tirx.Stmt:
        is_vector = loop.kind == tirx.ForKind.VECTORIZED and isinstance(loop.body, SBlockRealize)
        return _multiplied(loop, lanes) if is_vector and _is_sum(loop.body.block) else loop

    def with_source(block: SBlock) -> SBlock:
        if block.name_hint != "root":
            return block
        source = ir.StringImm(SOURCE.format(name=FUNCTION))
        body = tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", source, block.body)
        return SBlock([], [], [], "root", body, alloc_buffers=block.alloc_buffers)

    body = structural_map(func.body, (tirx.For, visit))
    return func.with_body(structural_map(body, (SBlock, with_source)))


def _is_sum(block: SBlock) -> bool:
    """Tell whether a block adds products of pairs to a sum."""
    value = block.body.value if isinstance(block.body, tirx.BufferStore) else None
    words = loads_of(value.b) if isinstance(value, tirx.Add) else []
    return bool(words) and {str(load.ty.dtype) for load in words} == {WORD}


def _multiplied(vector: tirx.For, lanes: int) -> tirx.Stmt:
    """Return the sum of a vector that a loop over its lanes describes."""
    realize, lane = vector.body, vector.loop_var
    block, zero = realize.block, tirx.IntImm("int64", 0)
    places = dict(zip((v.var for v in block.iter_vars), realize.iter_values, strict=True))
    store = block.body
    value = substitute(store.value, places)
    words = {load.source: load for load in loads_of(value.b)}
    x, w = sorted(words.values(), key=lambda load: lane in variables_of(load))
    operands = along(value.a, lane, lanes), tirx.Broadcast(x, lanes), along(w, lane, lanes)
    total = tirx.call_pure_extern(f"float32x{lanes}", FUNCTION, *operands)
    *outer, last = (substitute(substitute(i, places), {lane: zero}) for i in store.indices)
    body = tirx.BufferStore(store.buffer, total, [*outer, ramp(last, lanes)])
    return SBlockRealize([], True, SBlock([], [], [], block.name_hint, body))
