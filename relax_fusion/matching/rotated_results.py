"""What follows the kernel of a projection that rotates its heads: movements, to where they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tvm import relax

from .epilogue import FusedProjection
from .movements import Moved, Run, moved_by
from .pattern import BlockView
from .rotation import Rotation
from .shapes import dtype_of, same_shape, shape_of


@dataclass(frozen=True)
class RotatedPart:
    """A rotation of a part of a projection."""

    moved: Moved
    rotation: Rotation


Joins = dict[relax.Var, tuple[Moved, tuple[relax.Var, ...]]]
"""Concatenations, with the tensor that each is again, and the bindings that lead to it."""


def after_the_kernel(
    view: BlockView, chain: FusedProjection, found: tuple[list[Moved], list[RotatedPart]]
) -> FusedProjection:
    """Return the chain with the movements that lead from its kernel to what is read behind.

    Features that were cut out to be rotated, and put together again, are not cut at all.

    rewrite::

        a, v = split(qkv); concat(reshape(rotate(reshape(a))), v)   ->  the kernel's result
        concat(rotate(q[..., :r]), q[..., r:])                      ->  q of the kernel's result

    `found` are tensors with features of the projection, and the rotations of some of them.
    """
    tensors, parts = found
    ends = {part.rotation.end: replace(part.moved, var=part.rotation.end) for part in parts}
    inside = {v for part in parts for v in (*part.moved.path, *part.rotation.covers)}
    joined = _joins(view, ends, tensors)
    whole = _whole(view, chain, inside, joined)
    if whole is not None:
        return whole
    if len(parts) == 1 and not parts[0].moved.path:
        end = parts[0].rotation.end
        covers = (*chain.covers, *sorted(inside, key=view.index.__getitem__))
        return replace(chain, covers=covers, out=end, out_dtype=dtype_of(end))
    rebuilt = ends | {var: at for var, (at, _) in joined.items() if at.path}
    inside |= _covered(joined, rebuilt)
    after: dict[relax.Var, relax.Expr] = {}

    def emit(var: relax.Var) -> None:
        if var not in inside or var in after:
            return
        path = rebuilt[var].path if var in rebuilt else (var,)
        for read in view.reads[path[-1]] if path else ():
            emit(read)
        after[var] = view.defs[path[-1]] if path else chain.out

    covers = (*chain.covers, *sorted(inside, key=view.index.__getitem__))
    for var in covers[len(chain.covers) :]:
        users = view.uses(var)
        if view.escapes(var) or not users or set(users) - inside:
            emit(var)
    return replace(chain, covers=covers, after=tuple(after.items()))


def _joins(view: BlockView, ends: Mapping[relax.Var, Moved], tensors: list[Moved]) -> Joins:
    """Return the concatenations that make of rotated features, and others, what there was before.

    With each, the tensor that it is, and the bindings behind the rotation that lead to it.
    """
    places = {t.var: t for t in tensors} | dict(ends)
    made = {t.var: t.path for t in tensors} | dict.fromkeys(ends, ())
    found: Joins = {}
    stack = list(ends)
    while stack:
        var = stack.pop()
        for user in view.uses(var):
            whole = _together(view, user, places, tensors)
            fields = view.defs[user].args[0].fields if whole is not None else ()
            path = tuple(dict.fromkeys(v for f in fields for v in (*made[f], f)))
            if whole is not None and user not in found:
                places[user], made[user] = replace(whole, var=user), path
                found[user] = places[user], path
                stack.append(user)
            for moved in moved_by(view, places[var], user) if user not in places else ():
                places[moved.var], made[moved.var] = moved, (*made[var], moved.var)
                stack.append(moved.var)
    return found


def _together(
    view: BlockView, var: relax.Var, places: Mapping[relax.Var, Moved], tensors: list[Moved]
) -> Moved | None:
    """Return the tensor of the projection that a concatenation of parts of it is."""
    call = view.call(var, "relax.concat")
    shape = shape_of(var)
    if call is None or shape is None or not isinstance(call.args[0], relax.Tuple):
        return None
    parts = [places.get(field) for field in call.args[0].fields]
    axis = (0 if call.attrs.axis is None else int(call.attrs.axis)) % len(shape)
    for whole in tensors:
        if not same_shape(whole.shape, shape):
            continue
        held, start = whole.axes[axis], whole.start
        if not isinstance(held, tuple) or len(held) != 1:
            continue
        for part in parts:
            size = int(part.shape[axis]) if part is not None else 0
            run = (Run(size, held[0].step),) if size > 1 else ()
            axes = (*whole.axes[:axis], run, *whole.axes[axis + 1 :])
            if part is None or part.axes != axes or part.start != start:
                break
            start += size * held[0].step
        else:
            return whole
    return None


def _whole(
    view: BlockView, chain: FusedProjection, inside: set[relax.Var], joined: Joins
) -> FusedProjection | None:
    """Let the kernel's result be what has all features again, if nothing else reads a part."""
    for var, (at, _) in joined.items():
        if at.path:
            continue
        inside = {*chain.covers, *inside, *_covered(joined, joined)}
        if any(view.escapes(v) or set(view.uses(v)) - inside for v in inside - {var}):
            return None
        covers = tuple(sorted(inside, key=view.index.__getitem__))
        return replace(chain, covers=covers, out=var, out_dtype=dtype_of(var))
    return None


def _covered(joined: Joins, among: Iterable[relax.Var]) -> set[relax.Var]:
    """Return concatenations among some variables, and the bindings that lead to them."""
    return {v for var in among if var in joined for v in (*joined[var][1], var)}
