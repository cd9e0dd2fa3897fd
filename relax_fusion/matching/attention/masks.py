"""What masks and biases mean: causal masks, windows, visible keys, ALiBi, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tvm import relax, tirx

from ...tvm_ir import detect_linear_equation
from ..axes import size_of
from ..element_values import Choice, Element, float_of
from ..operators import VIEWS
from ..pattern import KernelArg, PrimExpr
from ..shapes import dtype_of, same_shape
from .aligned import Aligned, Grid
from .bands import Band, band_of, joined, sight_of
from .counts import Count, count_of, with_window
from .scores import INFINITE, Addend, Condition, Most, Step


@dataclass(frozen=True)
class Slopes:
    """ALiBi: ``slope[head] * (key + rest)``, where `rest` is the same for all keys of a row."""

    arg: KernelArg
    by_row: PrimExpr
    rest: PrimExpr


def slopes_of(at: Aligned) -> Slopes | None:
    """Read ``slopes[head] * positions``."""
    call = at.grid.view.call(at.at.expr, "relax.multiply")
    if call is None or at.column is None:
        return None
    for first, second in (call.args, call.args[::-1]):
        slopes, positions = at.operand(first), at.operand(second)
        heads = at.heads
        if slopes is None or positions is None or slopes.at.flat != heads or not heads:
            continue
        value = positions.element()
        if value is None or isinstance(value, float | Choice):
            continue
        row = tirx.Var("row", "int64") if positions.row is None else positions.row
        place = positions.elements.analyzer.simplify(value)
        factors = detect_linear_equation(place, [row, positions.column])
        if len(factors) == 3 and same_shape(factors[1:2], (1,)):
            arg = KernelArg(first, (at.grid.sizes[1],))
            return Slopes(arg, factors[0], factors[2])
    return None


@dataclass(frozen=True)
class Parts:
    """What some masks and biases come to together."""

    band: Band = field(default_factory=Band)
    """Keys that are seen by their position."""
    seen: tuple[tuple[Aligned, bool], ...] = ()
    """Boolean tensors, and which of their values lets a query see a key."""
    biases: tuple[tuple[Aligned, float], ...] = ()
    """What is added, and what it is multiplied by."""
    slopes: tuple[Slopes, ...] = ()
    """What is added as ALiBi."""
    fills: tuple[tuple[Aligned, bool, float], ...] = ()
    """Boolean tensors, which of their values keeps a score, and what others become."""
    hidden: float = -INFINITE
    """The largest number that hides keys by `band` and `seen`."""
    most: float = INFINITE
    """The least number that bounds the scores of other keys."""
    counts: tuple[Count, ...] = ()
    """How many keys are seen, as tensors tell."""

    @property
    def hides(self) -> bool:
        """Whether keys are hidden, by their places or by data."""
        return bool(self.seen or self.counts) or not self.band.is_open

    def and_also(self, other: Parts) -> Parts | None:
        """Return both together; None if it is not known which band is the tighter."""
        band = joined(self.band, other.band)
        if band is None:
            return None
        return Parts(
            band,
            self.seen + other.seen,
            self.biases + other.biases,
            self.slopes + other.slopes,
            self.fills + other.fills,
            max(self.hidden, other.hidden),
            min(self.most, other.most),
            self.counts + other.counts,
        )


def parts_of(grid: Grid, step: Step) -> Parts:
    """Read what a step does to the scores; a `Clamp` and a `Shift` hide nothing."""
    if not isinstance(step, Addend | Most | Condition):
        return Parts()
    if step.floor != grid.floor:
        grid = replace(grid, floor=step.floor, addends={})
    at = grid.aligned(step.expr, step.shape)
    if isinstance(step, Addend):
        whole = Parts(biases=((at.source(), step.factor),))
        return _if_simple(grid, _added(at, step.factor), whole)
    if isinstance(step, Most):
        return _if_simple(grid, _held(at), Parts(biases=((at.source(), 1.0),)))
    if not grid.hides(step.filler):
        return Parts(fills=((at.source(), step.value, step.filler),))
    whole = Parts(seen=((at.source(), step.value),))
    parts = _if_simple(grid, _seen(at, step.value), whole)
    return replace(parts, hidden=max(step.filler, step.floor))


def _if_simple(grid: Grid, parts: Parts | None, whole: Parts) -> Parts:
    """Return a mask taken to pieces if that is what a kernel can have, else the mask as it is."""
    if parts is None or max(map(len, (parts.seen, parts.biases, parts.counts))) > 1:
        return whole
    if any(count.begins for count in parts.counts):
        return whole
    if any(at.dims() is None for at, _ in (*parts.seen, *parts.biases)):
        return whole
    return parts if sight_of(parts.band, *grid.sizes[2:]) is not None else whole


def _added(at: Aligned, factor: float) -> Parts | None:
    """Take an addend to pieces."""
    key, found = (at.at.expr, at.at.axes, factor), at.grid.addends
    if key not in found:
        found[key] = _addend_parts(at, factor)
    return found[key]


def _addend_parts(at: Aligned, factor: float) -> Parts | None:
    hidden = [-INFINITE]

    def adds_nothing(number: float) -> bool | None:
        if number != 0 and at.grid.hides(number * factor):
            hidden.append(max(number * factor, at.grid.floor))
            return False
        return True if number == 0 else None

    band = _band_where(at, adds_nothing)
    if band is not None:
        return Parts(band, hidden=max(hidden))
    view, expr = at.grid.view, at.at.expr
    call = view.call(expr, "relax.where")
    if call is not None and factor > 0:
        found = _chosen(at, call, factor)
        if found is not None:
            rest = _added(found[0], factor)
            return None if rest is None or found[1] is None else found[1].and_also(rest)
    call = view.call(expr, "relax.add", "relax.subtract")
    if call is not None:
        second = -factor if call.op.name == "relax.subtract" else factor
        operands = zip(map(at.operand, call.args), (factor, second), strict=True)
        parts = _all_of(None if a is None else _added(a, by) for a, by in operands)
        if parts is not None and (parts.seen or not parts.band.is_open) and len(parts.biases) < 2:
            return parts
    slopes = slopes_of(at)
    if slopes is not None and factor == 1.0:
        return Parts(slopes=(slopes,))
    copied = view.call(expr, *VIEWS, "relax.broadcast_to", "relax.tile")
    before = at.behind() if copied is not None else None
    parts = _added(before, factor) if before is not None else None
    if parts is not None and (parts.seen or parts.slopes):
        return parts
    return Parts(biases=((at.source(), factor),))


def _all_of(found: Iterable[Parts | None]) -> Parts | None:
    """Return parts together; None if some are not known, or their bands together are no band."""
    parts: Parts | None = Parts()
    for more in found:
        parts = parts.and_also(more) if parts is not None and more is not None else None
    return parts


def _chosen(
    at: Aligned, call: relax.Call, factor: float = 1.0
) -> tuple[Aligned, Parts | None] | None:
    """Read ``where(mask, bias, -inf)`` as a bias, and where scores are kept."""
    condition, then, other = call.args
    for inner, filler, value in ((then, other, True), (other, then, False)):
        constant = at.elements.uniform(filler)
        rest, mask = at.operand(inner), at.operand(condition)
        if (
            constant is not None
            and at.grid.hides(constant * factor)
            and rest is not None
            and mask is not None
        ):
            parts = _seen(mask, value)
            hidden = max(constant * factor, at.grid.floor)
            return rest, None if parts is None else replace(parts, hidden=hidden)
    return None


def _band_where(at: Aligned, tells: Callable[[float], bool | None]) -> Band | None:
    """Return where `tells` is true of the elements, if they are known and that is a band.

    It is asked for each number that elements are; None means that the number is another one.
    """
    value = at.element()
    condition = None if value is None else _where(at, value, tells)
    return None if condition is None else band_of(condition, at.row, at.column)


def _where(at: Aligned, value: Element, tells: Callable[[float], bool | None]) -> PrimExpr | None:
    if isinstance(value, Choice):
        sides = [_where(at, side, tells) for side in (value.then, value.other)]
        if sides[0] is None or sides[1] is None:
            return None
        return at.elements.condition(Choice(value.condition, sides[0], sides[1]))
    number = float_of(value)
    told = None if number is None else tells(number)
    return None if told is None else tirx.IntImm("bool", told)


def _held(at: Aligned) -> Parts | None:
    """Take a bound of the scores to pieces: huge where a key is seen, and else hiding it."""
    hidden, most = [-INFINITE], [INFINITE]

    def bounds_nothing(number: float) -> bool | None:
        if at.grid.hides(number):
            hidden.append(max(number, at.grid.floor))
            return False
        most.append(number)
        return True if number == INFINITE or at.grid.finite else None

    band = _band_where(at, bounds_nothing)
    if band is not None:
        return Parts(band, hidden=max(hidden), most=min(most))
    call = at.grid.view.call(at.at.expr, "relax.where")
    found = _chosen(at, call) if call is not None else None
    if found is not None and found[1] is not None:
        bound = found[0].elements.uniform(found[0].at.expr)
        if bound is not None and bounds_nothing(bound):
            return replace(found[1], most=bound)
    return Parts(biases=((at.source(), 1.0),))


def _seen(at: Aligned, value: bool) -> Parts | None:
    """Take a condition to pieces: what is known by position, and what is data."""
    element = at.element()
    if element is not None:
        condition = at.elements.condition(element)
        condition = condition if value else at.elements.analyzer.simplify(tirx.Not(condition))
        band = band_of(condition, at.row, at.column)
        if band is not None:
            return Parts(band)
    count = count_of(at, value)
    if count is not None:
        return Parts(counts=(count,))
    both = ("logical_and", "bitwise_and") if value else ("logical_or", "bitwise_or")
    view, expr = at.grid.view, at.at.expr
    call = view.call(expr, *(f"relax.{name}" for name in both))
    if call is not None:
        operands = [at.operand(a) for a in call.args]
        found = _all_of(None if inner is None else _seen(inner, value) for inner in operands)
        if found is not None and len(found.counts) == 2:
            count = with_window(found.counts, at, value)
            return None if count is None else replace(found, counts=(count,))
        return found
    call = view.call(expr, "relax.logical_not", "relax.bitwise_not")
    inner = at.operand(call.args[0]) if call is not None else None
    if inner is not None:
        return _seen(inner, not value)
    before = at.behind() or _gathered(at)
    if before is not None and dtype_of(before.at.expr) == "bool":
        parts = _seen(before, value)
        if parts is not None and all(seen.dims() is not None for seen, _ in parts.seen):
            return parts
    return Parts(seen=((at, value),))


def _gathered(at: Aligned) -> Aligned | None:
    """Read ``mask[batch, key]``, an index tensor for each axis, as the mask itself."""
    call = at.grid.view.call(at.at.expr, "relax.index_tensor")
    if call is None or not isinstance(call.args[1], relax.Tuple):
        return None
    axes = []
    for places in call.args[1].fields:
        inner = at.operand(places)
        place = None if inner is None else at.elements.at(places, at.index)
        atom = next((a for a, var in at.places.items() if var.same_as(place)), None)
        if atom is None:
            return None
        axes.append((atom,))
    data = at.over(call.args[0], tuple(axes))
    shape = data.at.expr.ty.shape
    whole = isinstance(shape, relax.ShapeExpr) and same_shape(
        list(shape.values), [size_of(axis) for axis in axes]
    )
    return data if whole else None
