"""Sums of products of words by the instruction that a processor has for them.

TVM computes bfloat16 as float32 on a CPU, and has no vectors of it there: the instruction is called
by a function in LLVM's language, whose parameters are words, and which LLVM inlines.
"""

from __future__ import annotations

from tvm import ir, tirx
from tvm.target import Target

from ...compute.dot_words import WORD
from ...estimator.families.cpu_dots import Word, instruction_of, word_of
from ...estimator.tile_plan import TilePlan
from ...hardware.instructions import Dot
from ...hardware.target import device_of
from ...matching.expressions import loads_of, ramp, substitute, variables_of
from ...tvm_ir import SBlock, SBlockRealize, structural_map
from .panels import along

_LLVM_TYPES = {"bfloat16": "bfloat", "float32": "float", "int32": "i32", "int16": "i16"}

SOURCE = """\
declare {sums} @llvm.{intrinsic}({taken}{elements}, {elements})
define {sums} @{function}({sums} %sum, {words} %x, {words} %w) {{
  %a = bitcast {words} %{first} to {elements}
  %b = bitcast {words} %{second} to {elements}
  %r = call {sums} @llvm.{intrinsic}({given}{elements} %a, {elements} %b)
{added}}}
"""


def multiply_words(
    func: tirx.PrimFunc, plan: TilePlan, dtype: str, target: Target
) -> tirx.PrimFunc:
    """Return `func` with its vectors of products added up by the instruction, if there is one.

    rewrite: ``vector for l: sum[l] += products(x, w[l])`` -> ``sum = dot(sum, x in all lanes, w)``
    """
    word = word_of(plan.family, dtype)
    dot = None if word is None else instruction_of(word, device_of(target))
    if word is None or dot is None or dot.n != plan.lanes:
        return func

    def visit(loop: tirx.For) -> tirx.Stmt:
        is_vector = loop.kind == tirx.ForKind.VECTORIZED and isinstance(loop.body, SBlockRealize)
        is_sum = is_vector and _is_sum(loop.body.block)
        return _multiplied(loop, plan.lanes, name_of(dot, word)) if is_sum else loop

    def with_source(block: SBlock) -> SBlock:
        if block.name_hint != "root":
            return block
        source = ir.StringImm(source_of(dot, word))
        body = tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", source, block.body)
        return SBlock([], [], [], "root", body, alloc_buffers=block.alloc_buffers)

    body = structural_map(func.body, (tirx.For, visit))
    return func.with_body(structural_map(body, (SBlock, with_source)))


def name_of(dot: Dot, word: Word) -> str:
    """Return the name of the function that calls an instruction: one for each order of operands."""
    return f"relax_fusion_{dot.name}_{dot.n}_{word.rows}"


def source_of(dot: Dot, word: Word) -> str:
    """Return the function that calls an instruction, in LLVM's language."""
    sums = f"<{dot.n} x {_LLVM_TYPES[word.sums]}>"
    added = "  %s = add {0} %sum, %r\n  ret {0} %s\n" if not dot.adds else "  ret {0} %r\n"
    return SOURCE.format(
        sums=sums,
        words=f"<{dot.n} x i32>",
        elements=f"<{dot.n * dot.k} x {_LLVM_TYPES.get(dot.dtype, 'i8')}>",
        intrinsic=dot.intrinsic,
        function=name_of(dot, word),
        first="x" if dot.dtype == word.rows else "w",
        second="w" if dot.dtype == word.rows else "x",
        taken=f"{sums}, " * dot.adds,
        given=f"{sums} %sum, " * dot.adds,
        added=added.format(sums),
    )


def _is_sum(block: SBlock) -> bool:
    """Tell whether a block adds products of words to a sum."""
    value = block.body.value if isinstance(block.body, tirx.BufferStore) else None
    words = loads_of(value.b) if isinstance(value, tirx.Add) else []
    return bool(words) and {str(load.ty.dtype) for load in words} == {WORD}


def _multiplied(vector: tirx.For, lanes: int, function: str) -> tirx.Stmt:
    """Return the sum of a vector that a loop over its lanes describes."""
    realize, lane = vector.body, vector.loop_var
    block, zero = realize.block, tirx.IntImm("int64", 0)
    places = dict(zip((v.var for v in block.iter_vars), realize.iter_values, strict=True))
    store = block.body
    value = substitute(store.value, places)
    words = {load.source: load for load in loads_of(value.b)}
    x, w = sorted(words.values(), key=lambda load: lane in variables_of(load))
    operands = along(value.a, lane, lanes), tirx.Broadcast(x, lanes), along(w, lane, lanes)
    total = tirx.call_pure_extern(f"{value.ty.dtype}x{lanes}", function, *operands)
    *outer, last = (substitute(substitute(i, places), {lane: zero}) for i in store.indices)
    body = tirx.BufferStore(store.buffer, total, [*outer, ramp(last, lanes)])
    return SBlockRealize([], True, SBlock([], [], [], block.name_hint, body))
