"""What happens to the scores of an attention, as the fields and operands of its workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax

from ...errors import Reason
from ...workload import BiasOp, Causal, MaskDims
from ..pattern import KernelArg, Refused, guard
from ..roundings import refuse_kept_roundings
from ..shapes import check_dtype, dtype_of, known_shape, same_shape, shape_text
from .alibi import Slopes
from .aligned import Aligned, Grid
from .bands import Sight, sight_of
from .biases import bias_of
from .chain import AttentionChain
from .hiding import read
from .masks import Parts
from .scores import Most


@dataclass(frozen=True)
class Modifiers:
    """Masks, biases, slopes and sinks of an attention.

    Parameters
    ----------
    causal, window
        As in `relax_fusion.workload.Attention`.
    bias, mask : tuple of KernelArg and MaskDims, optional
        Operands, and which of their dimensions have their full size.
    bias_op : {"add", "min"}
        What is done with the bias.
    slopes, sinks : KernelArg, optional
        Operands with an element for each head.
    """

    causal: Causal = "none"
    window: int | None = None
    bias: tuple[KernelArg, MaskDims] | None = None
    bias_op: BiasOp = "add"
    mask: tuple[KernelArg, MaskDims] | None = None
    slopes: KernelArg | None = None
    sinks: KernelArg | None = None

    @property
    def bias_dtype(self) -> str:
        """The element type of the bias."""
        return "float32" if self.bias is None else dtype_of(self.bias[0].expr)

    def args(self) -> dict[str, KernelArg]:
        """Return the operands by name."""
        pairs = {"bias": self.bias, "mask": self.mask}
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
    guard(
        len(parts.seen) < 2,
        Reason.ATTRIBUTE,
        f"{len(parts.seen)} masks hide keys by their data; a kernel takes one",
    )
    found = sight_of(parts.band, *grid.sizes[2:])
    detail = f"{parts.band}, which is no causal mask and no window"
    guard(found is not None, Reason.ATTRIBUTE, detail)
    assert found is not None
    sight = _one_sight(sight, found)
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
    return Modifiers(sight.causal, sight.window, bias, bias_op, mask, slopes, sinks)


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
