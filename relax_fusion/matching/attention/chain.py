"""Attention, as an operator or written out, before its operands are looked through."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax

from ...errors import Reason
from ...tvm_ir import GenericConst
from ...workload import Causal, HeadLayout
from ..pattern import BlockView, PrimExpr, Refused, guard
from ..shapes import known_shape, same_shape, shape_of, static
from .operands import Operand, operand, packed
from .score_operators import scores_of
from .scores import Addend, Scores, Shift
from .softmax import softmax_of

NAMES = ("the query", "the key", "the value", "the result")
_CAUSAL: dict[str | None, Causal] = {
    None: "none",
    "TopLeft": "top_left",
    "BottomRight": "bottom_right",
}
_OPERATORS = {
    "relax.nn.attention": "attention",
    "relax.nn.attention_bias": "attention_bias",
    "relax.nn.attention_var_len": "attention_var_len",
}


@dataclass(frozen=True)
class AttentionChain:
    """An attention before its operands are looked through."""

    spelling: str
    operands: tuple[Operand, Operand, Operand, Operand]
    """Query, key, value and result."""
    batch: PrimExpr | int | None
    """The batch size; None where it is one dimension with the heads."""
    layout: HeadLayout
    """How the operator or the matmuls want their operands."""
    scores: Scores
    """What happens to the scores."""
    causal: Causal = "none"
    window: int | None = None
    """What an operator's attributes say of the keys that a query sees."""
    sinks: relax.Expr | None = None
    """One more score for each row."""
    outermost: PrimExpr | None = None
    """The first dimension of the scores where they go into a softmax, if they have four there."""


def attention_chain(view: BlockView, var: relax.Var) -> AttentionChain | None:
    """Recognise the attention whose result `var` is, in any spelling."""
    call = view.call(var, *_OPERATORS)
    return _written_out(view, var) if call is None else _operator(view, var, call)


def _operator(view: BlockView, var: relax.Var, call: relax.Call) -> AttentionChain:
    """Read ``R.nn.attention``, ``attention_bias`` and ``attention_var_len``."""
    attrs = call.attrs
    shapes = [known_shape(a, "an operand of the attention") for a in call.args[:3]]
    head_dim = static(shapes[0][3], "the head dimension")
    scale = head_dim**-0.5 if attrs.scale is None else float(attrs.scale)
    causal = _CAUSAL[None if attrs.causal_mask is None else str(attrs.causal_mask)]
    window = None if attrs.window_size is None else int(attrs.window_size)
    bounded = window is None or (window > 0 and causal != "none")
    guard(bounded, Reason.ATTRIBUTE, f"a window of {window} keys without a causal mask")
    steps: tuple[Addend, ...] = ()
    name = _OPERATORS[call.op.name]
    if name == "attention_var_len":
        shapes = _equal_lengths(view, call, shapes)
    elif len(call.args) > 3:
        bias = call.args[3]
        rank = len(known_shape(bias, "the mask"))
        guard(rank == 4, Reason.LAYOUT, f"a mask of rank {rank}: its axes are ambiguous")
        (batch, q_len, heads, _), (_, kv_len, *_) = shapes[:2]
        steps = (Addend(bias, (batch, heads, q_len, kv_len)),)
    lead = (shapes[0][0], shapes[0][2])
    of = zip(NAMES, (*call.args[:3], var), (*shapes, [*shapes[0][:3], shapes[2][3]]), strict=True)
    described = [operand(what, expr, shape, lead, (0, 2, 1, 3)) for what, expr, shape in of]
    if name == "attention_var_len":
        described = [packed(o) for o in described]
    q, k, v, out = described
    operands = q, k, v, out
    scores = Scores(var, (var,), factor=scale, steps=steps)
    return AttentionChain(name, operands, shapes[0][0], "bsnh", scores, causal, window)


def _equal_lengths(
    view: BlockView, call: relax.Call, shapes: list[list[PrimExpr]]
) -> list[list[PrimExpr | int]]:
    """Read packed sequences as a batch, if all have one length that is known beforehand."""
    counts = []
    for name, start, shape in zip(("queries", "keys"), call.args[3:5], shapes[:2], strict=True):
        value = view.definition(start)
        constant = isinstance(value, GenericConst)
        guard(constant, Reason.ATTRIBUTE, f"the lengths of the {name} are known at run time only")
        ends = [int(e) for e in value.value.numpy().reshape(-1)]
        steps = {b - a for a, b in itertools.pairwise(ends)}
        whole = ends[:1] == [0] and len(steps) == 1 and same_shape((shape[1],), (ends[-1],))
        detail = f"{name} of unequal lengths, packed at {ends}, are no batch"
        guard(whole and 0 not in steps, Reason.SHAPE, detail)
        counts.append((len(ends) - 1, steps.pop()))
    guard(
        counts[0][0] == counts[1][0],
        Reason.SHAPE,
        f"{counts[0][0]} sequences of queries, {counts[1][0]} of keys",
    )
    (batch, q_len), (_, kv_len) = counts
    return [
        [batch, n, *shape[2:]] for n, shape in zip((q_len, kv_len, kv_len), shapes, strict=True)
    ]


def _written_out(view: BlockView, var: relax.Var) -> AttentionChain | None:
    """Read matmul, scale, mask, softmax, matmul, with casts and reshapes between them."""
    last = view.call(var, "relax.matmul")
    weights = shape_of(last.args[0]) if last is not None else None
    values = shape_of(last.args[1]) if last is not None else None
    if last is None or weights is None or values is None or min(len(weights), len(values)) < 3:
        return None
    softmax = softmax_of(view, last.args[0], var)
    if softmax is None:
        return None
    scores = scores_of(view, softmax.scores)
    if scores is None:
        return None
    if scores.problem is not None:
        raise Refused(scores.problem.reason, scores.problem.detail)
    guard(
        softmax.sinks is None or not any(isinstance(step, Shift) for step in scores.steps),
        Reason.ATTRIBUTE,
        "the maximum of the scores is taken off before a sink is added",
    )
    first = view.call(scores.expr, "relax.matmul")
    assert first is not None
    lead = scores.shape[:-2]
    scores = replace(scores, covers=(scores.expr, *scores.covers))
    outer, inner = tuple(range(len(weights) - 2)), tuple(range(len(lead)))
    of: tuple[tuple[relax.Expr, Sequence[PrimExpr], tuple[int, ...]], ...] = (
        (first.args[0], lead, (*inner, -2, -1)),
        (first.args[1], lead, (*inner, -1, -2)),
        (last.args[1], weights[:-2], (*outer, -2, -1)),
        (var, weights[:-2], (*outer, -2, -1)),
    )
    q, k, v, out = (
        operand(name, expr, known_shape(expr, name), sizes, axes)
        for name, (expr, sizes, axes) in zip(NAMES, of, strict=True)
    )
    batch = lead[0] if len(lead) > 1 else None
    seen = softmax.scores.shape
    outermost = seen[0] if len(seen) == 4 else None
    return AttentionChain(
        "decomposed",
        (q, k, v, out),
        batch,
        "bnsh",
        scores,
        sinks=softmax.sinks,
        outermost=outermost,
    )
