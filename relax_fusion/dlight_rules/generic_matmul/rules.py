"""Rules for PrimFuncs that no pass of ours made."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir import dlight as dl
from tvm.target import Target

from ...errors import Decline
from ...hardware.target import is_cpu, is_gpu, without_tensor_cores
from ...matching.expressions import loads_of
from ...transforms.lay_out_weights import LAID_ATTR
from ...tvm_ir import Analyzer, SBlockRV, TensorLoad
from .. import verbs
from ..safe_rule import SafeRule, apply_tvm_rule
from .kernel import matmul_kernel
from .layout import product
from .matmul import generic_matmul

SERIAL_ELEMENTS = 16384
"""Elements below which a loop stays on one core: about the 5 us that waking the pool takes."""


class GenericMatmulRule(SafeRule):
    """Schedule a matmul that a pass of ours did not make as one that it did.

    It can be one of TVM's legaliser, with or without what FuseTIR put around it: batches, either
    operand transposed, casts or a dequantisation in front, any element-wise steps behind.  Sums are
    kept in float32.

    rewrite::

        for b, i, j, k: y[b, i, j] += x[b, i, k] * w[j, k]    ->    the kernel of FusedRule
        for b, i, j: z[b, i, j] = f(y[b, i, j])                     for [b * i, k] x [n, k]

    leaves:
        float64 matmuls, those whose k or n is only known at run time, and those of integers that no
        tensor cores take: other types than int8 and uint8, sums of another type than int32.  Steps
        whose formulas, each put in the next, would become more code than compiles in seconds.

    Parameters
    ----------
    allow_tf32 : bool
        Whether tensor cores may multiply float32 as tf32, where they do.
    """

    def __init__(self, allow_tf32: bool = False) -> None:
        self.allow_tf32 = allow_tf32

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return the schedule of a new function of the same signature."""
        if LAID_ATTR in (func.attrs or {}):  # by `laid_kernel`
            return s_tir.Schedule(func, enable_check=False)
        form = generic_matmul(func)
        if form is None or not (is_gpu(target) or is_cpu(target)):
            return None
        kernel = matmul_kernel(func, form, target, self.allow_tf32)
        return kernel if isinstance(kernel, Decline) else s_tir.Schedule(kernel)


class ScalarMatmulRule(SafeRule):
    """TVM's matmul rule, kept away from its tensor-core branch.

    On float16 with ``sm_70`` to ``sm_90`` that branch ends in a segmentation fault inside Tensorize
    for every shape that is not tiny, static ones included (seen with TVM 0.26 and 0.27), and a
    segmentation fault cannot be caught.  On an older architecture the same rule makes a correct
    schedule of scalar tiles, so that is what it is told.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | Decline | None:
        """Return TVM's scalar schedule of a matmul, None if the function is no matmul."""
        return apply_tvm_rule(dl.gpu.Matmul(), func, without_tensor_cores(target))


class CPUSpatialRule(SafeRule):
    """Spread element-wise PrimFuncs over the cores of a CPU; TVM leaves them on one.

    rewrite::

        for i, j: t[i, j] = f(x[i, j])    ->    parallel for ij: y[i, j] = g(f(x[i, j]))
        for i, j: y[i, j] = g(t[i, j])

    A step is computed in its reader's loop unless it would be computed more often there.
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Return the schedule, None unless every block is one element-wise statement of a CPU."""
        if not is_cpu(target):
            return None
        sch = s_tir.Schedule(func)
        blocks = [sch.get_sblock(name) for name in verbs.block_names(func)]
        if not blocks or not all(_is_spatial(sch, block) for block in blocks):
            return None
        for block in blocks:
            if is_used_once(sch, block):
                verbs.inline_if_possible(sch, block)
        for block in map(sch.get_sblock, verbs.block_names(sch.mod["main"])):
            loops = sch.get_loops(block)
            extents = [verbs.extent(sch, loop) for loop in loops]
            if len(loops) < 2 or is_small(extents):
                continue
            sch.parallel(sch.fuse(*loops[:-1]))
        return sch


def _is_spatial(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    found = sch.get(block)
    spatial = all(iv.iter_type == tirx.IterVar.DataPar for iv in found.iter_vars)
    loops = sch.get_loops(block)
    one_store = isinstance(found.body, tirx.BufferStore)
    return spatial and one_store and len(loops) == len(found.iter_vars)


def is_used_once(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Tell whether each element of a step is read once by one other; or is only moved."""
    readers = [sch.get(reader) for reader in sch.get_consumers(block)]
    if len(readers) != 1:
        return False
    made, (reader,) = sch.get(block), readers
    if isinstance(made.body.value, TensorLoad):
        return True
    buffer, sizes = (
        made.body.buffer,
        [product([v.dom.extent for v in found.iter_vars]) for found in (made, reader)],
    )
    loads = [load for load in loads_of(reader.body.value) if load.source.same_as(buffer)]
    return len(loads) == 1 and Analyzer().can_prove(sizes[1] <= sizes[0])


def is_small(extents: list[int | None]) -> bool:
    """Tell whether loops are not worth more than one core."""
    total = 1
    for e in extents:
        if e is None:
            return False
        total *= e
    return total < SERIAL_ELEMENTS
