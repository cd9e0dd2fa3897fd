"""From the softmax of an attention back to its first matmul, one operator after the other.

Each step takes one operator off.  They are small and independent: a front end with a spelling of
its own needs one more of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from tvm import ir, relax, tirx

from ...errors import Reason
from ...workload import FLOAT_BYTES
from ..bounds import Bounds, Interval
from ..constants import binary, scaled
from ..elements import Elements
from ..operators import VIEWS
from ..pattern import BlockView
from ..shapes import dtype_of, same_shape, shape_of, shape_text
from .scores import Addend, Clamp, Condition, Most, Scores, Shift
from .softmax import row_maximum

Steps = Iterator[Scores]


def scores_of(
    view: BlockView, at: Scores, barren: set[tuple[relax.Expr, bool]] | None = None
) -> Scores | None:
    """Take operators off until `expr` is the matmul of queries and keys; None if it never is.

    `barren` collects what no matmul was found behind: sums of sums lead to the same one many times.
    """
    barren = set() if barren is None else barren
    call = view.call(at.expr, "relax.matmul")
    if call is not None:
        rank = len(shape_of(call.args[1]) or ())
        return at if rank > 2 and len(at.shape) > 2 else None
    known = at.expr, at.problem is None
    if not isinstance(at.expr, relax.Var) or known in barren:
        return None
    refused: Scores | None = None
    for step in STEPS:
        for before in step(view, at):
            if refused is not None and before.problem is not None:
                continue
            found = scores_of(view, before, barren)
            if found is not None and (found.problem is None or at.problem is not None):
                return found
            refused = refused or found
    if refused is None:
        barren.add(known)
    return refused


def _cast(view: BlockView, at: Scores) -> Steps:
    """Scores are kept in float32 whatever the casts say; one to whole numbers rounds them."""
    call = view.call(at.expr, "relax.astype")
    if call is not None and dtype_of(at.expr) in FLOAT_BYTES:
        yield at.inside(call.args[0])


def _view(view: BlockView, at: Scores) -> Steps:
    """``[b * n, s, t]`` and ``[b, n, s, t]`` are the same scores."""
    call = view.call(at.expr, *VIEWS)
    if call is not None:
        yield at.inside(call.args[0])
    call = view.call(at.expr, "relax.broadcast_to")
    if call is not None and same_shape(shape_of(call.args[0]), at.shape):
        yield at.inside(call.args[0])


def _multiplied(view: BlockView, at: Scores) -> Steps:
    """``s * c`` or ``s / c``."""
    found = scaled(view, at.expr, Elements(view).uniform)
    if found is not None:
        yield replace(at.inside(found[0]), factor=at.factor * found[1])


def _tanh(view: BlockView, at: Scores) -> Steps:
    """``c * tanh(s / c)``: what was a factor so far is the cap."""
    call = view.call(at.expr, "relax.tanh")
    if call is None:
        return
    inner = replace(at.inside(call.args[0]), softcap=at.factor, factor=1.0)
    if at.softcap is not None:
        inner = inner.refused(Reason.ATTRIBUTE, "two soft-caps of the scores")
    if at.factor <= 0:
        inner = inner.refused(Reason.ATTRIBUTE, f"a soft-cap of {at.factor:g}")
    yield inner


def _after_mask(at: Scores, what: str) -> Scores:
    """Refuse a mask in front of a soft-cap or a factor, for kernels have it behind them."""
    if at.softcap is not None:
        return at.refused(Reason.ATTRIBUTE, f"{what} in front of the soft-cap {at.softcap:g}")
    if at.factor != 1.0:
        return at.refused(Reason.ATTRIBUTE, f"{what} in front of a scale by {at.factor:g}")
    return at


def _added(view: BlockView, at: Scores) -> Steps:
    """``s + mask``, ``s - mask``; the scores are the operand behind which there is a matmul."""
    for inner, addend in binary(view, at.expr, "relax.add"):
        yield _with_addend(at, inner, addend)
    call = view.call(at.expr, "relax.subtract")
    if call is not None:
        yield _with_addend(at, *call.args, sign=-1.0)


def _with_addend(at: Scores, inner: relax.Expr, addend: relax.Expr, *, sign: float = 1.0) -> Scores:
    masked = at.after(Addend(addend, at.shape, sign * at.factor, at.floor), inner)
    if at.softcap is not None:
        masked = _after_mask(masked, "a mask is added")
    if not same_shape(masked.shape, at.shape):
        sizes = shape_text(masked.shape), shape_text(at.shape)
        detail = f"scores of {sizes[0]} and the mask are {sizes[1]} together"
        masked = masked.refused(Reason.SHAPE, detail)
    return masked


def _where(view: BlockView, at: Scores) -> Steps:
    """``where(mask, s, -inf)`` and ``where(mask, -inf, s)``."""
    call = view.call(at.expr, "relax.where")
    if call is None:
        return
    condition, then, other = call.args
    for inner, filler, sees in ((then, other, True), (other, then, False)):
        value = Elements(view).uniform(filler)
        if value is None or not same_shape(shape_of(inner), at.shape):
            continue
        step = Condition(condition, sees, at.shape, value * at.factor, at.floor)
        masked = at.after(step, inner)
        if at.softcap is not None:
            masked = _after_mask(masked, "a mask is applied")
        yield masked


def _held(view: BlockView, at: Scores) -> Steps:
    """``minimum(s, mask)``, and scores that are held between constants."""
    if dtype_of(at.expr) not in FLOAT_BYTES:
        return
    elements = Elements(view)
    for inner, bound in binary(view, at.expr, "relax.maximum"):
        value = elements.uniform(bound)
        if value is not None and same_shape(shape_of(inner), at.shape):
            yield _clamped(view, at, inner, (value, math.inf))
    for inner, bound in binary(view, at.expr, "relax.minimum"):
        if not same_shape(shape_of(inner), at.shape):
            continue
        value = elements.uniform(bound)
        if value is not None:
            yield _clamped(view, at, inner, (-math.inf, value))
        else:
            masked = at.after(Most(bound, at.shape, at.floor), inner)
            yield _after_mask(masked, "a mask holds scores down")
    call = view.call(at.expr, "relax.clip")
    if call is not None and all(isinstance(a, tirx.IntImm | tirx.FloatImm) for a in call.args[1:]):
        low, high = (float(a.value) for a in call.args[1:])
        yield _clamped(view, at, call.args[0], (low, high))


def _clamped(view: BlockView, at: Scores, inner: relax.Expr, ends: Interval) -> Scores:
    """Drop bounds beyond which no element of `inner` is; leave others to what is known later."""
    low, high = ends
    least, largest = Bounds(view).of(inner)
    if low <= least and largest <= high:
        return at.inside(inner)
    before = at.after(Clamp(low, high, at.factor), inner)
    if not (low < high and at.factor > 0 and at.softcap is None):
        bound = high if low <= least else low
        return before.refused(Reason.ATTRIBUTE, f"scores are held back at {bound:g}")
    return replace(before, floor=max(at.floor, low * at.factor))


def _shifted(view: BlockView, at: Scores) -> Steps:
    """``s - max(s)`` changes nothing inside a softmax."""
    call = view.call(at.expr, "relax.subtract")
    if call is None:
        return
    largest = row_maximum(view, call.args[1])
    if largest is None or not largest[0].same_as(call.args[0]):
        return
    before = at.after(Shift(), call.args[0])
    before = replace(before, covers=(*largest[1], *before.covers))
    if at.softcap is not None or any(isinstance(step, Most) for step in at.steps):
        before = before.refused(Reason.ATTRIBUTE, "the largest score is taken off in between")
    yield before


def _other(view: BlockView, at: Scores) -> Steps:
    """Anything else that scores go through is named in the refusal."""
    value = view.definition(at.expr)
    if at.problem is None and isinstance(value, relax.Call) and isinstance(value.op, ir.Op):
        detail = f"the scores go through {value.op.name.removeprefix('relax.')}"
        for arg in value.args:
            if isinstance(arg, relax.Var) and same_shape(shape_of(arg), at.shape):
                yield at.inside(arg).refused(Reason.ATTRIBUTE, detail)


STEPS: tuple[Callable[[BlockView, Scores], Steps], ...] = (
    _cast,
    _view,
    _multiplied,
    _tanh,
    _shifted,
    _added,
    _where,
    _held,
    _other,
)
"""Each yields what the scores can have been in front of the operator that made them."""
