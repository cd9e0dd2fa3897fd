"""Views behind what reads them element by element, where a sum or a norm is in front of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, relax, tirx

from ..matching.bindings import items_of
from ..matching.operators import named
from ..matching.pattern import is_call
from ..matching.shapes import is_one, same_shape, shape_of
from ..transforms.modules import module_pass
from .movements import rules_behind
from .rewriter import Rewriter, Rule, canonicalise

_ELEMENTWISE = named("function", "cast", "arithmetic")
_SUMS = (
    *named("reduction", "softmax"),
    *("relax.nn.rms_norm", "relax.nn.layer_norm", "relax.nn.group_norm"),
)
"""A kernel of these writes each element where it has the sum, and computes what is behind it."""


MOST_OPERATORS = 16
"""So many operators in front of a view are looked at."""


@module_pass
class MoveViews:
    """Move a reshape behind element-wise operators, so that the sum's kernel computes them.

    rewrite::

        n = R.nn.layer_norm(x, g, b, axes=[-1])          # or a softmax, a sum of rows
        y = R.add(R.reshape(n, [b, h, w, c]), r)
            ->
        y = R.reshape(R.add(n, R.reshape(r, [b * h * w, c])), [b, h, w, c])    # views

    Of what no pattern took: there is no kernel for a reshape, but it keeps others apart.

    declines when:
        the other operand is broadcast, but for a number and a vector along a last axis that stays;
        something writes to a tensor in between.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, _RULES)


@dataclass(frozen=True)
class _View:
    """A reshape of what a sum or a norm makes, or of element-wise operators behind it."""

    source: relax.Expr
    shape: Sequence[tirx.Expr]

    @property
    def keeps_last(self) -> bool:
        """Whether the last axis stays the last."""
        return same_shape((shape_of(self.source) or [])[-1:], self.shape[-1:])

    def back(self, rewriter: Rewriter, value: relax.Expr) -> relax.Expr:
        """Return a value in this shape."""
        return relax.op.reshape(rewriter.emit(value), self.shape)

    def beside(self, rewriter: Rewriter, expr: relax.Expr) -> relax.Expr | None:
        """Return a tensor of this shape in that of the source, or what is the same for all rows."""
        shape, own = shape_of(expr), shape_of(self.source)
        if shape is None or own is None:
            return None
        if same_shape(shape, self.shape):
            return rewriter.emit(relax.op.reshape(expr, own))
        along = self.keeps_last or all(map(is_one, shape[-1:]))
        fits = len(shape) <= len(own) and along and all(map(is_one, shape[:-1]))
        return expr if fits else None


def _view(rewriter: Rewriter, expr: relax.Expr) -> _View | None:
    """Read a reshape behind a sum or a norm, and at most element-wise operators."""
    call, shape = rewriter.call(expr, "relax.reshape"), shape_of(expr)
    if call is None or not shape or not shape_of(call.args[0]):
        return None
    left = [call.args[0]]
    for _ in range(MOST_OPERATORS):
        made = rewriter.definition(left.pop()) if left else None
        if is_call(made, *_SUMS):
            return _View(call.args[0], shape)
        left += items_of(made.args) if is_call(made, *_ELEMENTWISE) else []
    return None


_RULES: dict[str, Rule] = {
    name: rule for name, rule in rules_behind(_view).items() if name in _ELEMENTWISE
}
