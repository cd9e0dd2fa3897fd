"""Keys whose last features are the same for all heads, read where those lie (latent attention)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tvm import relax

from ...errors import Reason
from ..axes import Atom, size_of
from ..pattern import BlockView, PrimExpr, guard
from ..shapes import same_shape, shape_of
from .operands import MOVED, MOVES, Operand, sources


def apart(view: BlockView, found: Sequence[Operand]) -> Iterator[Operand]:
    """Yield the first features of keys that are joined of two parts, and what those were made of.

    The second part, with all that it was made of, is the operand's `shared`.
    """
    for at in found:
        parts = _parts(view, at)
        if parts is not None:
            own, shared = parts
            behind = tuple(sources(view, shared, MOVED))
            yield from sources(view, replace(own, shared=behind), MOVES)


def one_for_all(k: Operand, batch: PrimExpr | int) -> Operand | None:
    """Return the tensor ``[b, s, h]`` of the features that heads share; None if there are none."""
    if not k.shared:
        return None
    found = (at for at in reversed(k.shared) if at.outer == len(at.stored))
    found = (at for at in found if at.at.order[: len(at.stored)] == at.stored)
    found = (at for at in found if same_shape((size_of(at.stored),), (batch,)))
    shared = next(found, None)
    guard(shared is not None, Reason.LAYOUT, f"features of {k.name} are apart for each head")
    assert shared is not None
    guard(shared.dtype == k.dtype, Reason.DTYPE, f"{k.name} is {k.dtype} and {shared.dtype}")
    return shared


def _parts(view: BlockView, at: Operand) -> tuple[Operand, Operand] | None:
    """Return the two parts along features of which a key was joined."""
    call = view.call(at.at.expr, "relax.concat")
    if (
        call is None
        or at.kept
        or at.length is not None
        or not isinstance(call.args[0], relax.Tuple)
    ):
        return None
    axis = (0 if call.attrs.axis is None else int(call.attrs.axis)) % len(at.at.axes)
    fields = call.args[0].fields
    if at.features is None or at.at.axes[axis] != (at.features,) or len(fields) != 2:
        return None
    sizes = [(shape_of(field) or [1])[axis] for field in fields]
    if any(same_shape((size,), (1,)) for size in sizes):
        return None
    own, shared = (_part(at, axis, *pair) for pair in zip(fields, sizes, strict=True))
    return replace(own, path=(*at.path, at.at.expr), steps=at.steps + 1), replace(shared, path=())


def _part(at: Operand, axis: int, expr: relax.Expr, size: PrimExpr | int) -> Operand:
    """Return an operand with another tensor along its features."""
    features = Atom(size)
    axes = (*at.at.axes[:axis], (features,), *at.at.axes[axis + 1 :])
    return replace(at, at=replace(at.at, expr=expr, axes=axes), features=features)
