"""Kernels of matrices on parameters that hold them some other way: views, and batches of them."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import ir, tirx
from tvm.target import Target

from ...errors import Decline, Reason
from ...hardware.target import is_cpu
from ...matching.expressions import serial, substitute
from ...tvm_ir import Analyzer, SBlock, SBlockRealize, structural_map
from .layout import View, unravel
from .matmul import GenericMatmul

GRID_Z = 65535
"""Largest extent of ``blockIdx.z`` (CUDA, ROCm and Vulkan allow no more)."""

Views = Mapping[tirx.Var, View]
Sizes = Mapping[tirx.Var, tirx.Expr]
ZERO = tirx.IntImm("int64", 0)


def through_views(
    body: tirx.Stmt, form: GenericMatmul, bound: tuple[Views, Sizes], target: Target
) -> tirx.Stmt | Decline:
    """Let a scheduled kernel of matrices read and write the parameters of the generic function.

    rewrite::

        S(x[i, k])    ->    for z: bind blockIdx.z:
                                x = decl_buffer((m, k), data=x3.data, elem_offset=z * m * k)
                                S(x[i, k])

    Parameters
    ----------
    body : tirx.Stmt
        The scheduled body, a root block.
    bound : tuple of mappings
        The view that each matrix is, and the value of each symbolic size.
    """
    views, sizes = bound
    if not form.batch:
        return _declared(body, views, sizes)
    count = form.size(form.batch)
    matrix = tirx.Var("v_matrix", "int64")
    axis = tirx.IterVar(ir.Range.from_min_extent(ZERO, count), matrix, tirx.IterVar.DataPar)
    where = {**sizes, **unravel(form.extents, form.batch, matrix)}
    if is_cpu(target):
        body = _declared(structural_map(body, (tirx.For, serial)), views, where)
        index = tirx.Var("matrix", "int64")
        one = SBlockRealize([index], True, SBlock([axis], [], [], "matrix", body))
        return tirx.For(index, ZERO, count, tirx.ForKind.PARALLEL, one)
    scopes = {buffer.ty.storage_scope for buffer in body.block.alloc_buffers}
    if scopes & {"", "global"} or not isinstance(body.block.body, tirx.For):
        return Decline(Reason.SCHEDULE, "a matmul of several kernels is not for a batch")
    return _grid(SBlock([axis], [], [], "matrix", _declared(body, views, where)), count)


def _grid(matrix: SBlock, count: tirx.Expr) -> tirx.Stmt:
    """Launch a kernel for each of `count` matrices, in several launches if they may be many."""
    index, axis = (tirx.Var(name, "int64") for name in ("matrix", "blockIdx.z"))
    thread = tirx.IterVar(None, axis, tirx.IterVar.ThreadIndex, "blockIdx.z")
    bind = tirx.ForKind.THREAD_BINDING
    if isinstance(count, tirx.IntImm) and int(count) <= GRID_Z:
        one = SBlockRealize([index], True, matrix)
        return tirx.For(index, ZERO, count, bind, one, thread)
    part = tirx.Var("part", "int64")
    first = part * GRID_Z
    here = tirx.min(tirx.IntImm("int64", GRID_Z), count - first)
    one = SBlockRealize([first + index], True, matrix)
    grid = tirx.For(index, ZERO, here, bind, one, thread)
    parts = (count + (GRID_Z - 1)) // GRID_Z
    return tirx.For(part, ZERO, parts, tirx.ForKind.SERIAL, grid)


def _declared(body: tirx.Stmt, views: Views, sizes: Sizes) -> tirx.Stmt:
    """Declare each view in front of `body`, and give every size its value.

    rewrite: ``S(x[i, j])`` -> ``x = decl_buffer((b * s, k), data=x3.data); S(x[i, j])``
    """
    analyzer = Analyzer()
    mapping: dict[tirx.Var, tirx.Expr] = dict(sizes)
    declared = []
    for var, view in views.items():
        rows, columns = (substitute(d, sizes) for d in var.ty.shape)
        stride = view.stride
        compact = analyzer.can_prove_equal(stride, columns) or analyzer.can_prove_equal(rows, 1)
        new = tirx.decl_buffer(
            (rows, columns),
            var.ty.dtype,
            var.name,
            strides=None if compact else (stride, tirx.IntImm("int64", 1)),
            elem_offset=analyzer.simplify(substitute(view.offset, sizes)),
            layout=None,
        )
        mapping[var] = new
        declared.append(tirx.DeclBuffer(new, data=view.source.data))
    return tirx.SeqStmt([*declared, substitute(body, mapping)])
