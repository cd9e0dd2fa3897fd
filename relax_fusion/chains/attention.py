"""Attention, as an operator or written out, before its operands are looked through."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from ..errors import Reason
from ..pattern import BlockView, Refused, guard
from ..shapes import known_shape, shape_of, static
from ..workload import Causal, HeadLayout
from .constants import binary, scaled

_CAUSAL: dict[str | None, Causal] = {
    None: "none",
    "TopLeft": "top_left",
    "BottomRight": "bottom_right",
}


@dataclass(frozen=True)
class AttentionChain:
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


def attention_chain(view: BlockView, var: relax.Var) -> AttentionChain | None:
    """Recognise the attention whose result `var` is, in either spelling."""
    return _operator(view, var) or _written_out(view, var)


def _operator(view: BlockView, var: relax.Var) -> AttentionChain | None:
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
    return AttentionChain(name, q, k, v, "bsnh", scale, causal, bias, (var,))


def _written_out(view: BlockView, var: relax.Var) -> AttentionChain | None:
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
    return AttentionChain(
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
    if found is None or (rank and (view.only_user(expr) is None or not view.is_free(expr))):
        return expr, 1.0, covers
    inner, inner_covers = (
        _through_casts(view, found[0], (expr, *covers))
        if not rank
        else (
            found[0],
            (expr, *covers),
        )
    )
    return inner, found[1], inner_covers
