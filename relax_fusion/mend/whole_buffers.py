"""Buffers between the steps of a PrimFunc, of which TVM allocates a part that depends on a loop."""

from __future__ import annotations

from collections.abc import Collection

from tvm import ir, tirx

from ..matching.expressions import found_in
from ..transforms.modules import functions_of, module_pass, with_functions
from ..tvm_ir import SBlock, SBlockRealize, structural_map

EXPLICIT = "explicit_read_region"
"""Attribute of a block: which of its reads TVM has to take as they are told."""


@module_pass
class ReadWholeBuffers:
    """Let blocks that divide an index by a symbolic size read all of a buffer of their function.

    rewrite: ``T.reads(t[n - v % (m // 2) * 2])`` -> ``T.reads(t[0:n])``, with an attribute

    Another step writes all of it.  TVM's CompactBufferRegion unites what steps access, for the
    size of the buffer, and lets a loop's variable stay in what it cannot bound: the code then has
    a variable that nothing defines.

    declines when:
        sizes are numbers, or the buffer belongs to a loop or to the threads of a GPU.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without such a block stays the same object."""
        functions = functions_of(mod, tirx.PrimFunc).items()
        return with_functions(mod, {gvar: _with_whole(func) for gvar, func in functions})


def _with_whole(func: tirx.PrimFunc) -> tirx.PrimFunc:
    root = func.body.block if isinstance(func.body, SBlockRealize) else None
    kept = [b for b in root.alloc_buffers if b.scope() == "global"] if root is not None else []
    dynamic = [b for b in kept if not all(isinstance(d, tirx.IntImm) for d in b.ty.shape)]
    if not dynamic:
        return func
    body = structural_map(func.body, (SBlock, lambda block: _reader(block, dynamic)), order="post")
    return func if body.same_as(func.body) else func.with_body(body)


def _reader(block: SBlock, buffers: Collection[tirx.Var]) -> SBlock:
    """Return a block that says of what it reads with divided indices that it is all."""
    reads = list(block.reads)
    whole = [n for n, r in enumerate(reads) if r.source in buffers and _divides(r)]
    if not whole or EXPLICIT in block.annotations:
        return block
    for number in whole:
        buffer = reads[number].source
        reads[number] = tirx.BufferRegion(
            buffer,
            [ir.Range.from_min_extent(tirx.const(0, str(d.ty.dtype)), d) for d in buffer.ty.shape],
        )
    return SBlock(
        *(block.iter_vars, reads, block.writes, block.name_hint, block.body, block.init),
        *(block.alloc_buffers, block.match_buffers),
        {**block.annotations, EXPLICIT: whole},
    )


def _divides(region: tirx.BufferRegion) -> bool:
    """Tell whether an index is divided by what is no number."""
    kinds = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
    divisions = [e for kind in kinds for r in region.region for e in found_in(r.min, kind)]
    return any(not isinstance(e.b, tirx.IntImm) for e in divisions)
