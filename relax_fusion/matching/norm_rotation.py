"""Heads that a PrimFunc of ours normalises and rotates."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tvm import ir, relax, tirx

from ..errors import Reason
from ..workload import HeadNorm
from .pattern import BlockView, guard, is_call
from .rotation import Pairing, Rotation
from .shapes import dtype_of, shape_of

_ATTR = "relax_fusion.norm_rotation"
"""The attribute of a PrimFunc with what `NormRotation` has, as JSON."""


@dataclass(frozen=True)
class NormRotation:
    """What a PrimFunc does with ``(x, gamma, cos, sin)``: an RMSNorm, then a rotation of heads."""

    head: int
    distance: int
    """Features of a head, and the distance between those of a pair."""
    eps: float
    plus: float
    """What is added to the mean square, and to gamma."""
    is_cut: bool
    """Whether angles have an axis for the heads that the last axis of x holds."""
    rounds: bool
    """Whether normalised rows are rounded to the dtype of x before they are rotated."""

    def attrs(self) -> dict[str, str]:
        """Return the attributes of such a PrimFunc."""
        return {_ATTR: json.dumps(asdict(self))}


def norm_rotation_of(mod: ir.IRModule, value: relax.Expr) -> NormRotation | None:
    """Return what a PrimFunc of ours does that a value calls; None for any other value."""
    func = mod[value.args[0]] if is_call(value, "relax.call_tir") else None
    attrs = func.attrs if isinstance(func, tirx.PrimFunc) else None
    return NormRotation(**json.loads(attrs[_ATTR])) if attrs and _ATTR in attrs else None


def without_mark(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function that does not say what it does any more."""
    return func.without_attr(_ATTR)


def normed_rotation(view: BlockView, source: relax.Var) -> Rotation | None:
    """Return the rotation behind a norm by which one PrimFunc of ours reads `source`."""
    for user in view.uses(source):
        value = view.defs[user]
        found = norm_rotation_of(view.mod, value)
        if found is not None and value.args[1].fields[0].same_as(source):
            _, gamma, cos, sin = value.args[1].fields
            pairing: Pairing = "halves" if 2 * found.distance == found.head else "neighbours"
            return Rotation(source, cos, sin, (user,), user, pairing, heads=(found, gamma))
    return None


def head_norm(rotation: Rotation) -> HeadNorm | None:
    """Return the norm in front of a rotation, refusing one of which no kernel of matmuls is."""
    if rotation.heads is None:
        return None
    found, gamma = rotation.heads
    detail = f"{found.plus} is added to gamma, 1 can be"
    guard(found.plus in (0.0, 1.0), Reason.ATTRIBUTE, detail)
    dtype, own = dtype_of(rotation.source), dtype_of(gamma)
    guard(dtype == own, Reason.DTYPE, f"heads are {dtype}, gamma {own}")
    (*_, width) = shape_of(rotation.source) or [0]
    return HeadNorm(int(width), found.eps, found.plus == 1.0, found.rounds)
