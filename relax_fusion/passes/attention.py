"""FuseAttentionChain: attention, as an operator or written out, becomes one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import tvm
from tvm import ir, relax

from ..chains import binary, scaled
from ..errors import Reason
from ..lowering import FuseOptions, fuse
from ..pattern import (
    BlockView,
    KernelArg,
    KernelOut,
    Match,
    PrimExpr,
    Refused,
    as_dim,
    check_dtype,
    check_vdevices,
    dtype_of,
    guard,
    known_shape,
    same_shape,
    shape_of,
    static,
)
from ..projections import check_inner
from ..workload import Attention, Causal, HeadLayout

PATTERN = "FuseAttentionChain"

_CAUSAL: dict[str | None, Causal] = {
    None: "none",
    "TopLeft": "top_left",
    "BottomRight": "bottom_right",
}
_SEQUENCE_AXIS = {"bsnh": 1, "bnsh": 2}
_HEAD_AXIS = {"bsnh": 2, "bnsh": 1}
_SWAP_HEADS = [0, 2, 1, 3]


@dataclass(frozen=True)
class _Operand:
    """A query, key or value with the data movement in front of it taken away.

    `layout` orders `expr`; `groups` query heads share one head of it; `length` is set where only
    the first positions are read; `covers` are the bindings that are no longer needed.
    """

    expr: relax.Expr
    layout: HeadLayout
    groups: int = 1
    length: PrimExpr | None = None
    covers: tuple[relax.Var, ...] = ()


@dataclass(frozen=True)
class _Chain:
    """An attention before its operands are looked through."""

    spelling: str
    q: relax.Expr
    k: relax.Expr
    v: relax.Expr
    layout: HeadLayout
    scale: float
    causal: Causal
    bias: relax.Expr | None
    covers: tuple[relax.Var, ...]
    k_axes: tuple[int, ...] | None = None
    rank: int = 4


@tvm.transform.module_pass(opt_level=0, name=PATTERN)
@dataclass(frozen=True)
class FuseAttentionChain:
    """Fuse ``softmax(scale * q @ k^T + mask) @ v``.

    rewrite::

        k2 = R.repeat(R.strided_slice(cache_k, [1], [0], [n]), g, axis=2)    # both optional
        o  = R.nn.attention(q, k2, v2, scale=c, causal_mask="BottomRight")
            ->
        o  = R.call_tir(fuse_attention_chain_..., (q, cache_k, cache_v, n))

        s = R.add(R.multiply(R.matmul(q, R.permute_dims(k, [0, 1, 3, 2])), c), mask)
        o = R.matmul(R.nn.softmax(R.astype(s, "float32")), v)
            ->
        o = R.call_tir(fuse_attention_chain_..., (q, k, v, mask))

    Transposes between ``[b, s, n, h]`` and ``[b, n, s, h]`` around the chain are absorbed.  Rows
    that see no key come out as zeros.

    declines when:
        the softmax is not over the last axis; scores are read elsewhere; heads of k and v do not
        divide those of q; heads or features are dynamic; a window is asked for; the mask does not
        broadcast to ``[b, n, s_q, s_k]``; the mask is bottom-right causal with fewer keys than
        queries (front ends disagree on what that means); dtypes or virtual devices differ.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    options: FuseOptions = field(default_factory=FuseOptions)

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Rewrite every function of `mod`."""
        return fuse(mod, PATTERN, self.match, self.options)

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the attention whose result `var` is."""
        chain = _operator(view, var) or _written_out(view, var)
        return self._build(view, var, chain) if chain is not None else None

    def _build(self, view: BlockView, var: relax.Var, chain: _Chain) -> Match:
        q = _through_transpose(view, _Operand(chain.q, chain.layout))
        k, v = _cached(view, chain)
        work, kv_len = self._workload(view, chain, (q, k, v), var)
        args = [KernelArg(o.expr, _four_shape(o.expr)) for o in (q, k, v)]
        if chain.bias is not None:
            args.append(KernelArg(chain.bias, _mask_shape(chain.bias, chain.rank)))
        covers = (*q.covers, *k.covers, *v.covers, *chain.covers)
        tensors = [a.expr for a in args]
        if work.kv_prefix:
            args.append(KernelArg(kv_len))
        check_vdevices(tensors)
        out, out_layout, out_covers = _out_transpose(view, var, chain.layout)
        work = replace(work, out_layout=out_layout)
        covers = tuple(dict.fromkeys((*covers, *out_covers)))
        check_inner(view, covers, {out})
        shape = tuple(_four_shape(out))
        outs = (KernelOut(out, shape, work.out_dtype),)
        return Match(PATTERN, chain.spelling, covers, tuple(args), outs, work)

    def _workload(
        self,
        view: BlockView,
        chain: _Chain,
        operands: tuple[_Operand, _Operand, _Operand],
        var: relax.Var,
    ) -> tuple[Attention, PrimExpr]:
        """Check sizes and dtypes and describe the attention."""
        q, k, v = operands
        dtype = check_dtype(dtype_of(q.expr), "the query")
        for name, operand in (("key", k), ("value", v)):
            got = dtype_of(operand.expr)
            guard(got == dtype, Reason.DTYPE, f"the {name} is {got}, the query {dtype}")
        _check_shapes(chain, operands)
        qs, ks, vs = (_four_shape(o.expr) for o in operands)
        batch, q_len = qs[0], qs[_SEQUENCE_AXIS[q.layout]]
        heads = static(qs[_HEAD_AXIS[q.layout]], "the number of query heads")
        kv_heads = static(ks[_HEAD_AXIS[k.layout]], "the number of key heads")
        guard(
            heads == kv_heads * k.groups,
            Reason.SHAPE,
            f"{heads} query heads over {kv_heads} key heads repeated {k.groups} times",
        )
        kv_len = k.length if k.length is not None else ks[_SEQUENCE_AXIS[k.layout]]
        causal = chain.causal
        q_dim, kv_dim = as_dim(q_len, dict(self.options.bounds)), as_dim(kv_len)
        if causal == "bottom_right" and isinstance(q_dim, int) and isinstance(kv_dim, int):
            guard(q_dim <= kv_dim, Reason.SHAPE, f"{q_dim} queries over {kv_dim} keys, bottom right")
        work = Attention(
            batch=as_dim(batch, dict(self.options.bounds)),
            q_len=q_dim,
            kv_len=as_dim(kv_len, dict(self.options.bounds)),
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=static(qs[3], "the head dimension"),
            v_dim=static(vs[3], "the value dimension"),
            scale=chain.scale,
            causal=causal,
            bias_dims=_bias_dims(chain, (batch, heads, q_len, kv_len)),
            dtype=dtype,
            out_dtype=check_dtype(dtype_of(var), "the result"),
            q_layout=q.layout,
            kv_layout=k.layout,
            kv_prefix=k.length is not None,
            bias_dtype=check_dtype(dtype_of(chain.bias), "the mask") if chain.bias is not None else "float32",
        )
        return work, kv_len


# --- spellings -------------------------------------------------------------------------------


def _operator(view: BlockView, var: relax.Var) -> _Chain | None:
    """Read ``R.nn.attention`` and ``R.nn.attention_bias``."""
    call = view.call(var, "relax.nn.attention", "relax.nn.attention_bias")
    if call is None:
        return None
    attrs = call.attrs
    guard(attrs.window_size is None, Reason.ATTRIBUTE, f"a window of {attrs.window_size} keys")
    head_dim = static(known_shape(call.args[0], "the query")[3], "the head dimension")
    scale = head_dim**-0.5 if attrs.scale is None else float(attrs.scale)
    causal = _CAUSAL[None if attrs.causal_mask is None else str(attrs.causal_mask)]
    bias = call.args[3] if len(call.args) > 3 else None
    if bias is not None:
        rank = len(known_shape(bias, "the mask"))
        guard(rank == 4, Reason.LAYOUT, f"a mask of rank {rank}: its axes are ambiguous")
    q, k, v = call.args[:3]
    name = "attention" if bias is None else "attention_bias"
    return _Chain(name, q, k, v, "bsnh", scale, causal, bias, (var,))


def _written_out(view: BlockView, var: relax.Var) -> _Chain | None:
    """Read matmul, scale, mask, softmax, matmul, with casts between them."""
    last = view.call(var, "relax.matmul")
    if last is None or len(shape_of(last.args[0]) or ()) not in (3, 4):
        return None
    weights, covers = _through_casts(view, last.args[0], (var,))
    softmax = view.call(weights, "relax.nn.softmax")
    if softmax is None:
        return None
    rank = len(known_shape(weights, "the scores"))
    axis = int(softmax.attrs.axis) % rank
    guard(axis == rank - 1, Reason.AXIS, f"the softmax is over axis {axis}, not the last")
    scores, covers = _through_casts(view, softmax.args[0], (weights, *covers))
    scores, bias, covers = _mask(view, scores, covers)
    scores, scale, covers = _scale(view, scores, covers)
    first = view.call(scores, "relax.matmul")
    if first is None:
        return None
    q, k = first.args
    transposed = view.call(k, "relax.permute_dims")
    if transposed is None:
        raise Refused(Reason.LAYOUT, "the key is not transposed by a permute_dims")
    axes = tuple(int(a) for a in transposed.attrs.axes or range(rank)[::-1])
    covers = (k, scores, *covers)
    q, factor, covers = _scale(view, q, covers, rank=rank)
    return _Chain(
        "decomposed",
        q,
        transposed.args[0],
        last.args[1],
        "bnsh",
        scale * factor,
        "none",
        bias,
        covers,
        axes,
        rank,
    )


def _through_casts(
    view: BlockView, expr: relax.Expr, covers: tuple[relax.Var, ...]
) -> tuple[relax.Expr, tuple[relax.Var, ...]]:
    """Look through casts; scores are kept in float32 whatever they say."""
    while (cast := view.call(expr, "relax.astype")) is not None:
        covers, expr = (expr, *covers), cast.args[0]
    return expr, covers


def _mask(
    view: BlockView, scores: relax.Expr, covers: tuple[relax.Var, ...]
) -> tuple[relax.Expr, relax.Expr | None, tuple[relax.Var, ...]]:
    """Take an additive mask off the scores."""
    for inner, bias in binary(view, scores, "relax.add"):
        base, _ = _through_casts(view, inner, ())
        if view.call(base, "relax.matmul", "relax.multiply", "relax.divide") is not None:
            # The mask is the operand that is not made by a matmul; two such operands are no mask.
            base, inner_covers = _through_casts(view, inner, (scores, *covers))
            if _scores_below(view, base):
                return base, bias, inner_covers
    return scores, None, covers


def _scores_below(view: BlockView, expr: relax.Expr) -> bool:
    inner = scaled(view, expr)
    base, _ = _through_casts(view, inner[0] if inner else expr, ())
    return view.call(base, "relax.matmul") is not None


def _scale(
    view: BlockView, expr: relax.Expr, covers: tuple[relax.Var, ...], rank: int = 0
) -> tuple[relax.Expr, float, tuple[relax.Var, ...]]:
    """Take a constant factor off `expr`; off a tensor of `rank` only if nothing else reads it."""
    found = scaled(view, expr)
    if found is None or (rank and view.only_user(expr) is None):
        return expr, 1.0, covers
    inner, inner_covers = _through_casts(view, found[0], (expr, *covers)) if not rank else (
        found[0],
        (expr, *covers),
    )
    return inner, found[1], inner_covers


# --- operands --------------------------------------------------------------------------------


def _cached(view: BlockView, chain: _Chain) -> tuple[_Operand, _Operand]:
    """Look through what stands in front of key and value, as far as both have it in common."""
    k, v = _Operand(chain.k, chain.layout), _Operand(chain.v, chain.layout)
    if chain.k_axes is not None:
        k = _key_layout(k, chain.k_axes)
    if k.layout != v.layout or len(shape_of(v.expr) or ()) == 4:
        v = _through_transpose(view, v) if k.layout != v.layout else v
    if k.layout == v.layout == "bnsh":
        swapped = _through_transpose(view, k), _through_transpose(view, v)
        if swapped[0].layout == swapped[1].layout:
            k, v = swapped
    guard(k.layout == v.layout, Reason.LAYOUT, f"key is {k.layout}, value {v.layout}")
    for step in (_through_repeat, _through_prefix):
        k_next, v_next = step(view, k), step(view, v)
        if k_next is not None and v_next is not None and _agree(k_next, v_next):
            k, v = k_next, v_next
    return k, v


def _key_layout(k: _Operand, axes: tuple[int, ...]) -> _Operand:
    """Undo the transpose that turns the key into the right operand of q @ k^T."""
    if axes in ((0, 1, 3, 2), (0, 2, 1)):
        return k
    if axes == (0, 2, 3, 1):
        return replace(k, layout="bsnh")
    raise Refused(Reason.LAYOUT, f"the key is transposed by {list(axes)}")


def _agree(k: _Operand, v: _Operand) -> bool:
    if k.groups != v.groups or (k.length is None) != (v.length is None):
        return False
    return k.length is None or same_shape((k.length,), (v.length,))


def _through_transpose(view: BlockView, operand: _Operand) -> _Operand:
    """Read the operand of a head-sequence transpose that only this chain reads."""
    call = view.call(operand.expr, "relax.permute_dims")
    if call is None or view.only_user(operand.expr) is None or call.attrs.axes is None:
        return operand
    if [int(a) for a in call.attrs.axes] != _SWAP_HEADS:
        return operand
    layout: HeadLayout = "bsnh" if operand.layout == "bnsh" else "bnsh"
    covers = (operand.expr, *operand.covers)
    return replace(operand, expr=call.args[0], layout=layout, covers=covers)


def _through_repeat(view: BlockView, operand: _Operand) -> _Operand | None:
    """Read one head in place of the copies that a repeat made of it."""
    call = view.call(operand.expr, "relax.repeat")
    if call is None or len(shape_of(operand.expr) or ()) != 4:
        return None
    if view.only_user(operand.expr) is None or call.attrs.axis is None:
        return None
    if int(call.attrs.axis) % 4 != _HEAD_AXIS[operand.layout]:
        return None
    covers = (operand.expr, *operand.covers)
    groups = int(call.attrs.repeats)
    return replace(operand, expr=call.args[0], groups=groups, covers=covers)


def _through_prefix(view: BlockView, operand: _Operand) -> _Operand | None:
    """Read a cache in place of the copy of its first positions."""
    call = view.call(operand.expr, "relax.strided_slice")
    if call is None or len(shape_of(operand.expr) or ()) != 4:
        return None
    if view.only_user(operand.expr) is None:
        return None
    axes, begin, end = (_values(a) for a in call.args[1:4])
    strides = _values(call.args[4]) if len(call.args) > 4 else [1]
    along = [int(a) % 4 for a in axes] == [_SEQUENCE_AXIS[operand.layout]]
    whole = len(begin) == 1 and same_shape(begin, (0,)) and same_shape(strides, (1,))
    if not along or not whole or len(end) != 1:
        return None
    # The end may lie beyond the cache, where the slice stops; its type has the true length.
    length = known_shape(operand.expr, "the cache slice")[_SEQUENCE_AXIS[operand.layout]]
    covers = (operand.expr, *operand.covers)
    return replace(operand, expr=call.args[0], length=length, covers=covers)


def _values(expr: relax.Expr) -> list[PrimExpr]:
    """Return the elements of a tuple of primitive values."""
    fields = expr.fields if isinstance(expr, relax.Tuple) else expr.values
    return list(fields)


def _out_transpose(
    view: BlockView, var: relax.Var, layout: HeadLayout
) -> tuple[relax.Var, HeadLayout, tuple[relax.Var, ...]]:
    """Write the result as the transpose after it wants it."""
    user = view.only_user(var)
    call = view.call(user, "relax.permute_dims") if user is not None else None
    swaps = call is not None and [int(a) for a in call.attrs.axes or ()] == _SWAP_HEADS
    if user is None or not swaps:
        return var, layout, ()
    return user, "bsnh" if layout == "bnsh" else "bnsh", (user,)


# --- shapes ----------------------------------------------------------------------------------


def _four_shape(expr: relax.Expr) -> tuple[PrimExpr | int, ...]:
    """Return a shape of four dimensions; three are batch, sequence, features of a single head."""
    shape = known_shape(expr, "an operand of the attention")
    guard(len(shape) in (3, 4), Reason.SHAPE, f"an operand of rank {len(shape)}")
    return tuple(shape) if len(shape) == 4 else (shape[0], 1, shape[1], shape[2])


def _check_shapes(chain: _Chain, operands: tuple[_Operand, _Operand, _Operand]) -> None:
    """Refuse operands that the matmuls would broadcast: the kernel takes them as they are."""
    for operand in operands:
        rank = len(known_shape(operand.expr, "an operand of the attention"))
        guard(rank == chain.rank, Reason.SHAPE, f"an operand of rank {rank} among {chain.rank}")
    q, k, v = (_four_shape(o.expr) for o in operands)
    for name, first, second in (
        ("batch sizes of query and key", q[:1], k[:1]),
        ("features of query and key", q[3:], k[3:]),
        ("batch, positions and heads of key and value", k[:3], v[:3]),
    ):
        differ = f"{name} differ: {list(first)} and {list(second)}"
        guard(same_shape(first, second), Reason.SHAPE, differ)


def _mask_shape(bias: relax.Expr, rank: int) -> tuple[PrimExpr | int, ...]:
    """Return the four dimensions of a mask, lined up with scores of `rank` as an add does it."""
    shape = known_shape(bias, "the mask")
    guard(len(shape) <= rank, Reason.SHAPE, f"a mask of rank {len(shape)} on scores of rank {rank}")
    full = (*(1,) * (rank - len(shape)), *shape)
    return full if rank == 4 else (full[0], 1, full[1], full[2])


def _bias_dims(
    chain: _Chain, full: Sequence[PrimExpr | int]
) -> tuple[bool, bool, bool, bool] | None:
    """Tell which dimensions of a mask have their full size, refusing others than full and 1."""
    if chain.bias is None:
        return None
    shape = _mask_shape(chain.bias, chain.rank)
    dims = []
    for got, want, name in zip(shape, full, ("batch", "heads", "queries", "keys"), strict=True):
        is_full = same_shape((got,), (want,))
        is_one = same_shape((got,), (1,))
        guard(is_full or is_one, Reason.SHAPE, f"the mask has {got} {name}, the scores {want}")
        dims.append(is_full and not is_one)
    return (dims[0], dims[1], dims[2], dims[3])
