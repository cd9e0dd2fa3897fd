"""Projections: a matmul with a two-dimensional weight, transposed or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import relax, te, tirx

from ..tvm_ir import structural_equal
from ..workload import Packed, WeightLayout
from .dequantized import refuse_dequantized
from .packed import PackedWeight, packed_weight
from .pattern import BlockView, KernelArg, PrimExpr, is_call
from .shapes import permutation, shape_of, static


@dataclass(frozen=True)
class Linear:
    """``x @ W``: `x` of shape [..., k], `weight` a two-dimensional tensor in `layout`.

    `packed` is what the weight is decoded from, if it is.
    """

    var: relax.Var
    x: relax.Expr
    weight: relax.Expr
    layout: WeightLayout
    n: PrimExpr | int
    k: int
    covers: tuple[relax.Var, ...]
    packed: PackedWeight | None = None

    @property
    def form(self) -> Packed | None:
        """How the weight is stored, None if its elements lie one after the other."""
        return self.packed.form if self.packed is not None else None

    def weights(self, name: str) -> dict[str, KernelArg]:
        """Return what a kernel reads of the weight, which its graph calls `name`."""
        return self.packed.args(name) if self.packed else {name: KernelArg(self.weight)}


def linear(view: BlockView, var: relax.Expr) -> Linear | None:
    """Recognise the projection that defines `var`.

    Spellings: ``matmul(x, W)``, ``matmul(x, permute_dims(W))``, and the call of an NT matmul
    PrimFunc that TVM's FuseTransposeMatmul leaves.  Refuses one whose weight is decoded first, from
    a format that no kernel reads.
    """
    if not isinstance(var, relax.Var) or var not in view.defs:
        return None
    value = view.definition(var)
    if is_call(value, "relax.call_tir"):
        return _nt_matmul(view, var, value)
    if not is_call(value, "relax.matmul"):
        return None
    x, weight = value.args
    shape = shape_of(weight)
    if shape is None or len(shape) != 2 or len(shape_of(x) or ()) < 2:
        return None
    source, layout, covers = untransposed(view, weight)
    n, k = columns_of(shape[1]), static(shape[0], "its input features")
    packed, decoding = _packed(view, source)
    layout = _as_stored(layout, packed)
    return Linear(var, x, source, layout, n, k, (*decoding, *covers, var), packed)


def columns_of(dim: PrimExpr) -> PrimExpr | int:
    """Return how many output features a weight has, a number where that is known."""
    return static(dim, "the weight's output features") if isinstance(dim, tirx.IntImm) else dim


def _packed(
    view: BlockView, weight: relax.Expr
) -> tuple[PackedWeight | None, tuple[relax.Var, ...]]:
    """Return what a weight is decoded from, and the decoding if nothing else reads it."""
    packed = packed_weight(view, weight)
    if packed is None:
        refuse_dequantized(view, weight)
        return None, ()
    return packed, packed.covers(view)


def _as_stored(layout: WeightLayout, packed: PackedWeight | None) -> WeightLayout:
    """Return the layout of what is stored: decoding may transpose, too."""
    if packed is None or not packed.transposed:
        return layout
    return "kn" if layout == "nk" else "nk"


def untransposed(
    view: BlockView, weight: relax.Expr
) -> tuple[relax.Expr, WeightLayout, tuple[relax.Var, ...]]:
    """Return a weight as it is stored, its layout, and the transposition if nothing else reads it.

    A transposition swaps the last two axes.
    """
    call = view.call(weight, "relax.permute_dims")
    *lead, k, n = range(len(shape_of(weight) or ()))
    if call is None or permutation(call, n + 1) != [*lead, n, k]:
        return weight, "kn", ()
    return call.args[0], "nk", () if view.only_user(weight) is None else (weight,)


def _nt_matmul(view: BlockView, var: relax.Var, call: relax.Call) -> Linear | None:
    """Recognise a call of a PrimFunc that computes ``x @ W^T`` by its body."""
    args = list(call.args[1].fields) if isinstance(call.args[1], relax.Tuple) else []
    if len(args) != 2 or not isinstance(var.ty, relax.TensorType):
        return None
    x, weight = args
    x_shape, w_shape = shape_of(x), shape_of(weight)
    if x_shape is None or w_shape is None or len(w_shape) != 2 or len(x_shape) < 2:
        return None
    body = view.mod[call.args[0]]
    if not isinstance(body, tirx.PrimFunc) or not _computes_nt_matmul(body, len(x_shape)):
        return None
    n, k = columns_of(w_shape[0]), static(w_shape[1], "its features")
    packed, decoding = _packed(view, weight)
    layout = _as_stored("nk", packed)
    return Linear(var, x, weight, layout, n, k, (*decoding, var), packed)


def _computes_nt_matmul(func: tirx.PrimFunc, rank: int) -> bool:
    """Compare a PrimFunc with a freshly made NT matmul of the same parameters."""
    if len(func.params) != 3:
        return False
    shapes = [list(p.ty.shape) for p in func.params if isinstance(p.ty, tirx.BufferType)]
    dtypes = [str(p.ty.dtype) for p in func.params if isinstance(p.ty, tirx.BufferType)]
    if len(shapes) != 3 or len(shapes[0]) != rank or len(shapes[2]) != rank:
        return False
    x = te.placeholder(shapes[0], dtypes[0])
    w = te.placeholder(shapes[1], dtypes[1])
    k = te.reduce_axis((0, shapes[0][-1]), name="k")
    for cast in (False, True):
        value = _row_by_row(x, w, k, dtypes[2] if cast else "")
        stages = [x, w, te.compute(shapes[2], value)]
        wanted = te.create_prim_func(stages, index_dtype_override="int64")
        # As functions: bodies alone may differ in which parameter is which.
        if structural_equal(_plain(func), _plain(wanted), map_free_vars=True):
            return True
    return False


def _plain(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function without attributes."""
    return tirx.PrimFunc(func.params, func.body, func.ret_type)


def _row_by_row(x: te.Tensor, w: te.Tensor, k: tirx.IterVar, cast: str) -> Callable[..., PrimExpr]:
    """Return the elements of ``x @ w^T``, its operands cast where `cast` names a dtype."""

    def element(*idx: PrimExpr) -> PrimExpr:
        a, b = x(*idx[:-1], k), w(idx[-1], k)
        return te.sum(a.astype(cast) * b.astype(cast) if cast else a * b, axis=k)

    return element
