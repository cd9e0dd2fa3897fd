"""Copies on a GPU, of which TVM's rules move one element a thread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tvm import s_tir, tirx
from tvm.target import Target

from ..hardware.target import is_cuda
from ..matching.expressions import found_in, is_if_then_else, substitute, variables_of
from ..tvm_ir import Analyzer, SBlock, TensorLoad, structural_map
from . import verbs
from .safe_rule import SafeRule

_BYTES = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
"""Types of which TVM writes vectors of all widths."""

_VECTOR, _THREADS = 16, 256
"""Bytes that a thread of a GPU moves at once; threads of a block."""


class CopyRule(SafeRule):
    """Move vectors of 16 bytes where a PrimFunc only copies, to one tensor or by cases to several.

    rewrite::

        for i, h, d in T.grid(n, 3, 128):    ->    for it in ...:  # a block and a thread of the GPU
            if h < 2: a[i, h, d] = x[i, h, d]          for d in T.vectorized(8):
            else: b[i, 0, d] = x[i, h, d]                  if ...: a[i, h, d] = x[i, h, d]

    leaves:
        rows of a tensor are no whole vectors, or begin within one; the first element that is read
        depends on sizes that only the run knows; a case or a place depends on the lane otherwise
        than by one step along the last axis.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Return the schedule, None where vectors are not all that is moved, or not on CUDA."""
        blocks = verbs.blocks_of(func)
        if not is_cuda(target) or not blocks or not all(map(_only_copies, blocks)):
            return None
        sch = s_tir.Schedule(func)
        for name in verbs.block_names(func)[:-1]:
            sch.compute_inline(sch.get_sblock(name))
        main = structural_map(sch.mod["main"], (tirx.BufferStore, _by_cases), order="post")
        sch = s_tir.Schedule(main)
        block = sch.get_sblock(blocks[-1].name_hint)
        lanes = _lanes(sch.get(block))
        if lanes == 1 or len(sch.get_loops(block)) != len(blocks[-1].iter_vars):
            return None
        *outer, last = sch.get_loops(block)
        last, lane = sch.split(last, [None, lanes])
        grid, thread = sch.split(sch.fuse(*outer, last), [None, _THREADS])
        sch.bind(grid, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
        sch.vectorize(lane)
        return sch


def _only_copies(block: SBlock) -> bool:
    """Tell whether a block stores elements of other tensors, whose places no tensor says."""
    spatial = all(v.iter_type == tirx.IterVar.DataPar for v in block.iter_vars)
    values = [v for s in found_in(block.body, tirx.BufferStore) for v in _choices(s.value)]
    plain = all(isinstance(v, TensorLoad) and str(v.ty.dtype) in _BYTES for v in values)
    return spatial and plain and len(found_in(block.body, TensorLoad)) == len(values) > 0


def _choices(value: tirx.Expr) -> list[tirx.Expr]:
    """Return the values between which conditions choose."""
    if not is_if_then_else(value):
        return [value]
    return [v for side in value.args[1:] for v in _choices(side)]


def _by_cases(store: tirx.BufferStore) -> tirx.Stmt:
    """Store each of the values that a condition chooses by itself: TVM has no wide choice."""
    if not is_if_then_else(store.value):
        return store
    case, *sides = store.value.args
    stores = (tirx.BufferStore(store.buffer, side, store.indices) for side in sides)
    return tirx.IfThenElse(case, *map(_by_cases, stores))


def _lanes(block: SBlock) -> int:
    """Return the elements of a vector that divide the rows of all tensors, 1 if none does."""
    lane = block.iter_vars[-1]
    stores, loads = (found_in(block.body, kind) for kind in (tirx.BufferStore, TensorLoad))
    accesses = [(s.buffer, s.indices) for s in stores] + [(v.source, v.indices) for v in loads]
    if not all(indices for _, indices in accesses):  # a tensor of one number
        return 1
    cases = [case.condition for case in found_in(block.body, tirx.IfThenElse)]
    begins = [Analyzer().simplify(indices[-1] - lane.var) for _, indices in accesses]
    rest = [*cases, *begins, *(i for _, indices in accesses for i in indices[:-1])]
    sizes = [lane.dom.extent, *(buffer.ty.shape[-1] for buffer, _ in accesses)]
    if any(lane.var in variables_of(e) for e in rest) or not _are_known(block, loads):
        return 1
    if not all(isinstance(size, tirx.IntImm) for size in sizes):
        return 1
    widest = max(_BYTES[str(buffer.ty.dtype)] for buffer, _ in accesses)
    lanes = math.gcd(_VECTOR // widest, *map(int, sizes))
    while not all(Analyzer().can_prove_equal(tirx.floormod(b, lanes), 0) for b in begins):
        lanes //= 2
    return lanes


def _are_known(block: SBlock, loads: Sequence[TensorLoad]) -> bool:
    """Tell whether places of loads begin at one that is known: terms with sizes have an index, too.

    TVM loads vectors only where it can prove that they align, which it cannot of what the host
    computes: a product of sizes may be that.
    """
    first = {v.var: tirx.IntImm("int64", 0) for v in block.iter_vars}
    places = (_place(load.indices, load.source.ty.shape) for load in loads)
    return not any(variables_of(Analyzer().simplify(substitute(p, first))) for p in places)


def _place(indices: Iterable[tirx.Expr], shape: Iterable[tirx.Expr]) -> tirx.Expr:
    """Return the place of an element in memory, in elements."""
    place = tirx.IntImm("int64", 0)
    for index, size in zip(indices, shape, strict=True):
        place = place * size + index
    return place
