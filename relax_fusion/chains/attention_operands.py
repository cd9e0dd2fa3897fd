"""Operands and result of an attention, without the data movement around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from ..errors import Reason
from ..pattern import BlockView, PrimExpr, Refused, guard
from ..shapes import known_shape, same_shape, shape_of
from ..workload import HeadLayout
from .attention import AttentionChain

SEQUENCE_AXIS = {"bsnh": 1, "bnsh": 2}
HEAD_AXIS = {"bsnh": 2, "bnsh": 1}
_SWAP_HEADS = [0, 2, 1, 3]


@dataclass(frozen=True)
class Operand:
    """A query, key or value with the data movement in front of it taken away.

    `layout` orders `expr`; `groups` query heads share one head of it; `length` is set where only
    the first positions are read; `covers` are the bindings that are no longer needed.
    """

    expr: relax.Expr
    layout: HeadLayout
    groups: int = 1
    length: PrimExpr | None = None
    covers: tuple[relax.Var, ...] = ()


def key_value(view: BlockView, chain: AttentionChain) -> tuple[Operand, Operand]:
    """Look through what stands in front of key and value, as far as both have it in common."""
    k, v = Operand(chain.k, chain.layout), Operand(chain.v, chain.layout)
    if chain.k_axes is not None:
        k = _key_layout(k, chain.k_axes)
    if k.layout != v.layout or len(shape_of(v.expr) or ()) == 4:
        v = through_transpose(view, v) if k.layout != v.layout else v
    if k.layout == v.layout == "bnsh":
        swapped = through_transpose(view, k), through_transpose(view, v)
        if swapped[0].layout == swapped[1].layout:
            k, v = swapped
    guard(k.layout == v.layout, Reason.LAYOUT, f"key is {k.layout}, value {v.layout}")
    for step in (_through_repeat, _through_prefix):
        k_next, v_next = step(view, k), step(view, v)
        if k_next is not None and v_next is not None and _agree(k_next, v_next):
            k, v = k_next, v_next
    return k, v


def _key_layout(k: Operand, axes: tuple[int, ...]) -> Operand:
    """Undo the transpose that turns the key into the right operand of q @ k^T."""
    if axes in ((0, 1, 3, 2), (0, 2, 1)):
        return k
    if axes == (0, 2, 3, 1):
        return replace(k, layout="bsnh")
    raise Refused(Reason.LAYOUT, f"the key is transposed by {list(axes)}")


def _agree(k: Operand, v: Operand) -> bool:
    if k.groups != v.groups or (k.length is None) != (v.length is None):
        return False
    return k.length is None or same_shape((k.length,), (v.length,))


def through_transpose(view: BlockView, operand: Operand) -> Operand:
    """Read the operand of a head-sequence transpose that only this chain reads."""
    call = view.call(operand.expr, "relax.permute_dims")
    if call is None or not _absorbed(view, operand.expr) or call.attrs.axes is None:
        return operand
    if [int(a) for a in call.attrs.axes] != _SWAP_HEADS:
        return operand
    layout: HeadLayout = "bsnh" if operand.layout == "bnsh" else "bnsh"
    covers = (operand.expr, *operand.covers)
    return replace(operand, expr=call.args[0], layout=layout, covers=covers)


def _absorbed(view: BlockView, expr: relax.Expr) -> bool:
    """Tell whether nothing but this chain needs `expr`, so that its kernel can do without it."""
    return view.only_user(expr) is not None and view.is_free(expr)


def _through_repeat(view: BlockView, operand: Operand) -> Operand | None:
    """Read one head in place of the copies that a repeat made of it."""
    call = view.call(operand.expr, "relax.repeat")
    if call is None or len(shape_of(operand.expr) or ()) != 4:
        return None
    if not _absorbed(view, operand.expr) or call.attrs.axis is None:
        return None
    if int(call.attrs.axis) % 4 != HEAD_AXIS[operand.layout]:
        return None
    covers = (operand.expr, *operand.covers)
    groups = int(call.attrs.repeats)
    return replace(operand, expr=call.args[0], groups=groups, covers=covers)


def _through_prefix(view: BlockView, operand: Operand) -> Operand | None:
    """Read a cache in place of the copy of its first positions."""
    call = view.call(operand.expr, "relax.strided_slice")
    if call is None or len(shape_of(operand.expr) or ()) != 4:
        return None
    if not _absorbed(view, operand.expr):
        return None
    axes, begin, end = (_values(a) for a in call.args[1:4])
    strides = _values(call.args[4]) if len(call.args) > 4 else [1]
    along = [int(a) % 4 for a in axes] == [SEQUENCE_AXIS[operand.layout]]
    whole = len(begin) == 1 and same_shape(begin, (0,)) and same_shape(strides, (1,))
    if not along or not whole or len(end) != 1:
        return None
    # The end may lie beyond the cache, where the slice stops; its type has the true length.
    length = known_shape(operand.expr, "the cache slice")[SEQUENCE_AXIS[operand.layout]]
    covers = (operand.expr, *operand.covers)
    return replace(operand, expr=call.args[0], length=length, covers=covers)


def _values(expr: relax.Expr) -> list[PrimExpr]:
    """Return the elements of a tuple of primitive values."""
    fields = expr.fields if isinstance(expr, relax.Tuple) else expr.values
    return list(fields)


def result_transpose(
    view: BlockView, var: relax.Var, layout: HeadLayout
) -> tuple[relax.Var, HeadLayout, tuple[relax.Var, ...]]:
    """Write the result as the transpose after it wants it."""
    user = view.only_user(var)
    call = view.call(user, "relax.permute_dims") if user is not None else None
    swaps = call is not None and [int(a) for a in call.attrs.axes or ()] == _SWAP_HEADS
    if user is None or not swaps or not view.is_free(user):
        return var, layout, ()
    return user, "bsnh" if layout == "bnsh" else "bnsh", (user,)


def reserved_names(kv_len: PrimExpr) -> tuple[str, ...]:
    """Return the names of sizes that the kernel of a cache's prefix has beside the workload's."""
    return ("kv_capacity", "kv_len") if isinstance(kv_len, tirx.IntImm) else ("kv_capacity",)


def four_shape(expr: relax.Expr) -> tuple[PrimExpr | int, ...]:
    """Return a shape of four dimensions; three are batch, sequence, features of a single head."""
    shape = known_shape(expr, "an operand of the attention")
    guard(len(shape) in (3, 4), Reason.SHAPE, f"an operand of rank {len(shape)}")
    return tuple(shape) if len(shape) == 4 else (shape[0], 1, shape[1], shape[2])


def check_operand_shapes(chain: AttentionChain, operands: tuple[Operand, Operand, Operand]) -> None:
    """Refuse operands that the matmuls would broadcast: the kernel takes them as they are."""
    for operand in operands:
        rank = len(known_shape(operand.expr, "an operand of the attention"))
        guard(rank == chain.rank, Reason.SHAPE, f"an operand of rank {rank} among {chain.rank}")
    q, k, v = (four_shape(o.expr) for o in operands)
    for name, first, second in (
        ("batch sizes of query and key", q[:1], k[:1]),
        ("features of query and key", q[3:], k[3:]),
        ("batch, positions and heads of key and value", k[:3], v[:3]),
    ):
        differ = f"{name} differ: {list(first)} and {list(second)}"
        guard(same_shape(first, second), Reason.SHAPE, differ)


def mask_shape(bias: relax.Expr, rank: int) -> tuple[PrimExpr | int, ...]:
    """Return the four dimensions of a mask, lined up with scores of `rank` as an add does it."""
    shape = known_shape(bias, "the mask")
    guard(len(shape) <= rank, Reason.SHAPE, f"a mask of rank {len(shape)} on scores of rank {rank}")
    full = (*(1,) * (rank - len(shape)), *shape)
    return full if rank == 4 else (full[0], 1, full[1], full[2])


def mask_dims(
    chain: AttentionChain, full: Sequence[PrimExpr | int]
) -> tuple[bool, bool, bool, bool] | None:
    """Tell which dimensions of a mask have their full size, refusing others than full and 1."""
    if chain.bias is None:
        return None
    shape = mask_shape(chain.bias, chain.rank)
    dims = []
    for got, want, name in zip(shape, full, ("batch", "heads", "queries", "keys"), strict=True):
        is_full = same_shape((got,), (want,))
        is_one = same_shape((got,), (1,))
        guard(is_full or is_one, Reason.SHAPE, f"the mask has {got} {name}, the scores {want}")
        dims.append(is_full and not is_one)
    return (dims[0], dims[1], dims[2], dims[3])
