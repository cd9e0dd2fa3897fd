"""What happens to the scores of an attention, as the fields and operands of its workload.

Biases are one operand, as the graph adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import relax
from tvm.relax.expr import _update_type

from ...errors import Reason
from ...workload import BiasOp, Causal, Lengths, MaskDims
from ..bounds import FAR
from ..pattern import KernelArg, Refused, guard
from ..roundings import refuse_kept_roundings
from ..shapes import check_dtype, dtype_of, known_shape, same_shape, shape_of, shape_text
from .aligned import Aligned, Grid
from .bands import Sight, sight_of
from .chain import AttentionChain
from .counts import Count
from .hiding import Reading, read
from .masks import Parts, Slopes
from .scores import Clamp, Most, Shift


@dataclass(frozen=True)
class Modifiers:
    """Masks, biases, slopes and sinks of an attention.

    `causal`, `window`: as in `relax_fusion.workload.Attention`.
    `bias`, `mask`: operands, and which of their dimensions have their full size.
    `bias_op`: what is done with the bias.
    `slopes`, `sinks`: operands with an element for each head.
    `lengths`: how many keys there are.
    """

    causal: Causal = "none"
    window: int | None = None
    bias: tuple[KernelArg, MaskDims] | None = None
    bias_op: BiasOp = "add"
    mask: tuple[KernelArg, MaskDims] | None = None
    slopes: KernelArg | None = None
    sinks: KernelArg | None = None
    lengths: tuple[KernelArg, Lengths] | None = None

    @property
    def bias_dtype(self) -> str:
        """The element type of the bias."""
        return "float32" if self.bias is None else dtype_of(self.bias[0].expr)

    def args(self) -> dict[str, KernelArg]:
        """Return the operands by name."""
        pairs = {"bias": self.bias, "mask": self.mask, "lengths": self.lengths}
        found = {name: pair[0] for name, pair in pairs.items() if pair is not None}
        by_head = {"slopes": self.slopes, "sinks": self.sinks}
        return found | {name: arg for name, arg in by_head.items() if arg is not None}


def modifiers(chain: AttentionChain, grid: Grid) -> Modifiers:
    """Read the masks of a chain, its sinks, and what its operator says."""
    steps = read(chain, grid)
    parts, sight = Parts(), Sight(chain.causal, chain.window)
    for _, more in steps:
        parts = _both(parts, replace(more, biases=(), fills=()))
    bias, bias_op = bias_of(steps)
    found = sight_of(parts.band, *grid.sizes[2:])
    sight = _one_sight(sight, found or Sight())
    if not _is_counted(parts, sight):
        masks = tuple((count.mask, count.seen) for count in parts.counts)
        parts = replace(parts, seen=parts.seen + masks, counts=())
    elif parts.counts and parts.counts[0].window is not None:
        sight = Sight("bottom_right", parts.counts[0].window)
    guard(
        len(parts.seen) < 2,
        Reason.ATTRIBUTE,
        f"{len(parts.seen)} masks hide keys by their data; a kernel takes one",
    )
    detail = f"{parts.band}, which is no causal mask and no window"
    guard(found is not None, Reason.ATTRIBUTE, detail)
    sinks = None if chain.sinks is None else _sinks(grid, chain.sinks, chain.scores.covers)
    guard(
        not parts.slopes or (bias_op == "add" and not any(isinstance(s, Most) for s, _ in steps)),
        Reason.ATTRIBUTE,
        "a bias by position beside a bound of the scores",
    )
    slopes = _slopes(grid, parts.slopes, sight, shifts=sinks is None and bias_op == "add")
    if bias is not None:
        check_dtype(dtype_of(bias[0].expr), "the mask")
    mask = _mask(*parts.seen[0]) if parts.seen else None
    lengths = _lengths(grid, parts.counts[0]) if parts.counts else None
    return Modifiers(sight.causal, sight.window, bias, bias_op, mask, slopes, sinks, lengths)


def _both(parts: Parts, more: Parts) -> Parts:
    both = parts.and_also(more)
    if both is None:
        detail = f"it is not known which is less: {parts.band}, or {more.band}"
        raise Refused(Reason.ATTRIBUTE, detail)
    return both


def _one_sight(said: Sight, found: Sight) -> Sight:
    """Join what an operator's attributes say with what its mask does."""
    if said.window is None and found.window is None and "none" in (said.causal, found.causal):
        return Sight(found.causal if said.causal == "none" else said.causal)
    if Sight() in (said, found):
        return found if said == Sight() else said
    detail = f"a mask that is {found} beside attributes that say {said}"
    guard(said.causal == found.causal, Reason.ATTRIBUTE, detail)
    windows = [w for w in (said.window, found.window) if w is not None]
    return Sight(said.causal, min(windows, default=None))


def _mask(at: Aligned, sees: bool) -> tuple[KernelArg, MaskDims]:
    """Return a mask as an operand, negated where it is true of hidden keys."""
    if sees:
        return at.arg()
    return at.arg(relax.BlockBuilder().normalize(relax.op.logical_not(at.at.expr)))


def _is_counted(parts: Parts, sight: Sight) -> bool:
    """Tell whether a kernel can take a number of keys from a tensor beside what else hides some."""
    if len(parts.counts) != 1:
        return not parts.counts
    if parts.counts[0].window is None:
        return sight.causal != "bottom_right"
    return sight == Sight() and not parts.slopes


def _lengths(grid: Grid, count: Count) -> tuple[KernelArg, Lengths]:
    """Return how many keys there are as an operand."""
    expr, by_batch = count.tensor.at.expr, count.by_batch
    arg = KernelArg(expr, (grid.sizes[0] if by_batch else 1,))
    return arg, Lengths(dtype_of(expr), by_batch, count.more)


def _slopes(
    grid: Grid, found: tuple[Slopes, ...], sight: Sight, *, shifts: bool
) -> KernelArg | None:
    """Return the slopes of ALiBi.

    What is the same for all keys of a row cancels out in its softmax, unless something there is
    not shifted with it (`shifts` is False).
    """
    if not found:
        return None
    guard(len(found) == 1, Reason.ATTRIBUTE, f"{len(found)} biases by position")
    slopes = found[0]
    offset = grid.sizes[3] - grid.sizes[2] if sight.causal == "bottom_right" else 0
    exact = same_shape((slopes.by_row, slopes.rest), (-1, -offset))
    detail = "the bias by position counts from elsewhere than the query, and there are sinks"
    guard(shifts or exact, Reason.ATTRIBUTE, detail)
    check_dtype(dtype_of(slopes.arg.expr), "the slopes")
    return slopes.arg


def _sinks(grid: Grid, expr: relax.Expr, covers: Sequence[relax.Var]) -> KernelArg:
    """Return the sinks, one for each head, which the bindings `covers` read."""
    column = Grid(grid.view, (*grid.sizes[:3], 1))
    shape = known_shape(expr, "a sink")
    at: Aligned | None = column.aligned(expr, shape)
    path = list(covers)
    while at is not None:
        if at.at.flat == at.heads:
            check_dtype(dtype_of(at.at.expr), "the sinks")
            refuse_kept_roundings(grid.view, path)
            return KernelArg(at.at.expr, (grid.sizes[1],))
        path.append(at.at.expr)
        cast = grid.view.call(at.at.expr, "relax.astype")
        at = at.operand(cast.args[0]) if cast is not None else at.behind()
    raise Refused(Reason.SHAPE, f"sinks of {shape_text(shape)} differ within a head")


Operand = tuple[KernelArg, MaskDims]
_FLOAT = "float32"


def bias_of(found: Reading) -> tuple[Operand | None, BiasOp]:
    """Return what is added to the scores, or bounds them, by steps that `hiding.read` returned.

    Several biases are one tensor of float32, made in front of the kernel.  So is a number in place
    of scores, which are nothing beside it if it is below `FAR`, or never below it.
    """
    fills = [fill for _, parts in found for fill in parts.fills]
    near = any(filler > FAR for *_, filler in fills)
    added = [at for step, parts in found if not isinstance(step, Most) for at, _ in parts.biases]
    bounds = [at for step, parts in found if isinstance(step, Most) for at, _ in parts.biases]
    count = len(bounds) + (len(fills) + len(added) if near else bool(added or fills))
    detail = f"{count} masks are added to the scores or bound them; a kernel takes one"
    guard(count < 2, Reason.ATTRIBUTE, detail)
    shifted = near and any(isinstance(step, Shift) for step, _ in found)
    guard(not shifted, Reason.ATTRIBUTE, "scores are replaced behind the largest is taken off")
    first = next((n for n, (_, parts) in enumerate(found) if parts.fills), 0)
    hidden = near and any(parts.hides for _, parts in found[:first])
    guard(not hidden, Reason.ATTRIBUTE, "scores of keys that are hidden already are replaced")
    made: Operand | None = None
    for step, parts in found:
        for at, factor in parts.biases:
            term = _times(at, factor)
            made = term if made is None else _sum(made, term)
        for at, value, filler in parts.fills:
            made = _filled(at.arg(), value, filler, made, math.inf if near else 0.0)
        if isinstance(step, Clamp) and made is not None:
            made = _clamped(made, step)
    return made, "min" if bounds or near else "add"


def _times(at: Aligned, factor: float) -> Operand:
    """Return a bias as an operand, multiplied by what its sum with the scores is."""
    expr = at.at.expr
    if factor == 1.0:
        return at.arg()
    number = relax.const(factor, dtype_of(expr))
    value = relax.op.negative(expr) if factor == -1.0 else relax.op.multiply(expr, number)
    return at.arg(relax.BlockBuilder().normalize(value))


def _sum(a: Operand, b: Operand) -> Operand:
    value = _call(relax.op.add, *(_widened(each) for each in (a, b)))
    return _operand(value, a, b)


def _filled(
    mask: Operand, kept: bool, filler: float, bias: Operand | None, nothing: float
) -> Operand:
    number = relax.const(filler, _FLOAT)
    rest = relax.const(nothing, _FLOAT) if bias is None else _widened(bias)
    sides = (rest, number) if kept else (number, rest)
    return _operand(_call(relax.op.where, _shaped(mask), *sides), mask, *([bias] if bias else []))


def _clamped(bias: Operand, clamp: Clamp) -> Operand:
    value = _widened(bias)
    for end, op in zip(clamp.ends, (relax.op.maximum, relax.op.minimum), strict=True):
        value = _call(op, value, relax.const(end, _FLOAT)) if math.isfinite(end) else value
    return _operand(value, bias)


def _operand(value: relax.Expr, *of: Operand) -> Operand:
    """Return what was made of operands, with all their dimensions."""
    dims = tuple(map(any, zip(*(dims for _, dims in of), strict=True)))
    return KernelArg(value, tuple(shape_of(value) or ())), (dims[0], dims[1], dims[2], dims[3])


def _shaped(operand: Operand) -> relax.Expr:
    expr, shape = operand[0].expr, operand[0].shape or ()
    return expr if same_shape(shape_of(expr), shape) else _call(relax.op.reshape, expr, shape)


def _widened(operand: Operand) -> relax.Expr:
    expr = _shaped(operand)
    return expr if dtype_of(expr) == _FLOAT else _call(relax.op.astype, expr, _FLOAT)


def _call(op: Callable[..., relax.Call], *args: object) -> relax.Call:
    """Return a call with its type, whose operands may be calls."""
    stand_ins = [relax.Var("made", a.ty) if isinstance(a, relax.Call) else a for a in args]
    call = relax.BlockBuilder().normalize(op(*stand_ins))
    nested = [
        next((a for s, a in zip(stand_ins, args, strict=True) if given.same_as(s)), given)
        for given in call.args
    ]
    made = relax.Call(call.op, nested, call.attrs)
    _update_type(made, call.ty)
    return made
