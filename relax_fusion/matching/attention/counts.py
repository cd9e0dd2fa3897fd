"""How many keys there are, where a mask compares their positions with numbers of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from ...tvm_ir import detect_linear_equation
from ..element_values import Choice, float_of
from ..shapes import dtype_of, is_one, same_shape
from .aligned import Aligned

_ORDERS = {
    "relax.less": (False, True),
    "relax.less_equal": (False, False),
    "relax.greater": (True, True),
    "relax.greater_equal": (True, False),
}
"""Whether a comparison's operands are turned to read it as ``<``, and whether it is strict."""

_MOST_ADDED = 1 << 31


@dataclass(frozen=True)
class Count:
    """The keys before ``tensor + more`` are seen."""

    tensor: Aligned
    """Whole numbers, one for all or one for each batch entry."""
    more: int
    """What is added to them."""
    mask: Aligned
    seen: bool
    """The mask that says so, and which of its values lets a query see a key."""
    begins: bool = False
    """Whether, the other way round, they are the first that is seen."""
    window: int | None = None
    """How many keys of them the one query sees, the last ones."""

    @property
    def by_batch(self) -> bool:
        """Whether each batch entry has a number of its own."""
        dims = self.tensor.dims()
        return dims is not None and dims[0]


def count_of(mask: Aligned, seen: bool) -> Count | None:
    """Read a comparison of key positions with a tensor; None if it is anything else.

    `mask`: booleans, by query and key.
    `seen`: which of them lets a query see a key.
    """
    call = mask.grid.view.call(mask.at.expr, *_ORDERS)
    if call is None:
        return None
    turned, strict = _ORDERS[call.op.name]
    lower, upper = call.args[::-1] if turned else call.args
    if not seen:
        lower, upper, strict = upper, lower, not strict
    for keys, limits, begins in ((lower, upper, False), (upper, lower, True)):
        key, limit = mask.operand(keys), mask.operand(limits)
        start = None if key is None else _first_key(key)
        found = None if limit is None or start is None else _number(limit)
        if start is not None and found is not None:
            tensor, more = found
            return Count(tensor, more - start + (strict == begins), mask, seen, begins)
    return None


def with_window(counts: Sequence[Count], mask: Aligned, seen: bool) -> Count | None:
    """Return the keys of one query that begin and end at numbers of one tensor, as one count.

    `counts`: two, of which one begins.
    `mask`, `seen`: what says both.
    """
    first, last = sorted(counts, key=lambda count: not count.begins)
    same = first.tensor.at.expr.same_as(last.tensor.at.expr)
    width = last.more - first.more
    if not (first.begins and not last.begins and same and width > 0 and is_one(mask.grid.sizes[2])):
        return None
    return Count(last.tensor, last.more, mask, seen, window=width)


def _first_key(at: Aligned) -> int | None:
    """Return the number of key 0 where keys are numbered one by one; None if they are not."""
    value = at.element()
    if value is None or isinstance(value, float | Choice) or at.column is None:
        return None
    factors = detect_linear_equation(at.elements.analyzer.simplify(value), [at.column])
    if len(factors) != 2 or not same_shape(factors[:1], (1,)):
        return None
    return int(factors[1]) if isinstance(factors[1], tirx.IntImm) else None


def _number(at: Aligned) -> tuple[Aligned, int] | None:
    """Return the tensor of whole numbers that a number is read from, and what is added to it."""
    more, best = 0, None
    inner: Aligned | None = at
    while inner is not None:
        at = inner
        dtype, dims = dtype_of(at.at.expr), at.dims()
        if dtype not in ("int32", "int64"):
            break
        if dims is not None and not any(dims[1:]):
            best = at, more
        inner, added = _before(at)
        more += added
    return best if best is not None and abs(best[1]) < _MOST_ADDED else None


def _before(at: Aligned) -> tuple[Aligned | None, int]:
    """Return what a number was made of by moving it, a cast, or adding a constant: that too."""
    view = at.grid.view
    call = view.call(at.at.expr, "relax.astype")
    if call is not None:
        return at.operand(call.args[0]), 0
    call = view.call(at.at.expr, "relax.add", "relax.subtract")
    if call is None:
        return at.behind(), 0
    adds = call.op.name == "relax.add"
    first, second = map(at.operand, call.args)
    for rest, other, sign in ((first, second, 1 if adds else -1), (second, first, 1)):
        value = None if other is None else other.element()
        number = None if value is None or isinstance(value, Choice) else float_of(value)
        if number is not None and float(number).is_integer() and (adds or rest is first):
            return rest, sign * int(number)
    return None, 0
