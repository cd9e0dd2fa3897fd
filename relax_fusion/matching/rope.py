"""Rotary embeddings of a projection's heads: where they are, and whether its kernel can turn them.

Between a projection and its rotation stand data movements: reshapes to heads, transposes, splits of
a merged projection.  A rotation of whole heads commutes with all of them.  So the kernel turns the
features where they are, and the movements follow it, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tvm import relax, tirx

from ..errors import Decline, Reason
from ..workload import Rope
from .casts import refuse_kept_roundings
from .epilogue import Chain, named
from .movements import (
    FEATURES,
    HEAD,
    LANE,
    Moved,
    moved_by,
    moves,
    same_expr,
    static_slice,
    through_views,
)
from .pattern import BlockView, KernelArg, PrimExpr, Refused, guard
from .rotation import Rotation, rotation_of
from .shapes import as_dim, check_dtype, dtype_of, product, same_shape, shape_of


@dataclass(frozen=True)
class _Turned:
    """A rotation of a part of a projection."""

    moved: Moved
    rotation: Rotation


def with_rope(
    view: BlockView, chain: Chain, forbidden: set[relax.Var], bounds: Mapping[str, int]
) -> Chain:
    """Let the kernel of a projection rotate its heads, if the graph does.

    Parameters
    ----------
    view : BlockView
        The block.
    chain : Chain
        The projection and the steps that its kernel takes along.
    forbidden : set of relax.Var
        Results of the same kernel: angles that need one of them cannot be part of it.
    bounds : mapping of str to int
        Largest values of symbolic variables.

    Returns
    -------
    Chain
        `chain` itself where nothing is rotated; with the reason in `declined` where something is
        that the kernel cannot rotate.
    """
    shape = shape_of(chain.out)
    if shape is None or len(shape) < 2:
        return chain
    axes = (*range(len(shape) - 1), FEATURES)
    tensors = list(moves(view, Moved(chain.out, axes, 0, chain.projection.n)))
    turned = [_Turned(t, found) for t in tensors if (found := rotation_of(view, t.var)) is not None]
    if not turned:
        return replace(chain, declined=tuple(_parts_of_heads(view, tensors)))
    try:
        return _rotated(view, chain, (tensors, turned), forbidden, bounds)
    except Refused as refusal:
        where = ", ".join(t.rotation.end.name for t in turned)
        return replace(chain, declined=((where, refusal.decline),))


def _parts_of_heads(view: BlockView, tensors: list[Moved]) -> Iterator[tuple[str, Decline]]:
    """Yield the rotations of some lanes of each head, which no kernel has."""
    for at in tensors:
        for user in view.uses(at.var) if LANE in at.axes else ():
            cut = static_slice(view, user)
            found = rotation_of(view, user) if cut is not None else None
            if cut is not None and found is not None and at.axes[cut.axis] == LANE:
                lanes = f"features {cut.start} to {cut.stop} of each head of {cut.extent}"
                detail = f"{lanes} are rotated; whole heads would be taken along"
                yield found.end.name, Decline(Reason.LAYOUT, detail)


def _rotated(
    view: BlockView,
    chain: Chain,
    found: tuple[list[Moved], list[_Turned]],
    forbidden: set[relax.Var],
    bounds: Mapping[str, int],
) -> Chain:
    """Check that the rotations are one of the first features, and take them along."""
    tensors, turned = found
    steps = chain.projection.epilogue
    detail = f"the heads are rotated after {', '.join(named(steps))}; only a bias can come before"
    guard(steps in ((), ("bias",)), Reason.ATTRIBUTE, detail)
    angles = [_angles(view, t, bounds) for t in turned]
    rope, cos, sin = angles[0]
    for other, other_cos, other_sin in angles[1:]:
        same = same_expr(view, cos.expr, other_cos.expr) and same_expr(
            view, sin.expr, other_sin.expr
        )
        guard(
            same and other == rope, Reason.SHAPE, "parts of a projection turn by different angles"
        )
    features = _prefix(turned)
    guard(
        features % rope.head_dim == 0,
        Reason.SHAPE,
        f"{features} features are rotated, in heads of {rope.head_dim}",
    )
    n = chain.projection.n
    guard(n % rope.head_dim == 0, Reason.SHAPE, f"{n} features are no heads of {rope.head_dim}")
    _check_readers(view, (tensors, turned), features)
    covers = tuple(dict.fromkeys(v for t in turned for v in (*t.moved.path, *t.rotation.covers)))
    refuse_kept_roundings(view, (*chain.covers, *covers))
    inside = forbidden | set(chain.covers) | set(covers)
    late = any(view.depends_on(a.expr, inside) for a in (cos, sin))
    guard(not late, Reason.CYCLE, "the angles are computed from the kernel's own results")
    guard(view.is_free(*covers), Reason.OVERLAP, "a part of the rotation is in another kernel")
    longer = replace(
        chain,
        projection=replace(chain.projection, rope=replace(rope, features=features)),
        covers=(*chain.covers, *covers),
        angles=(cos, sin),
    )
    return _joined(view, longer, (tensors, turned)) or _followed(view, longer, turned)


def _prefix(turned: list[_Turned]) -> int:
    """Return how many features are rotated, refusing others than the first ones."""
    end = 0
    for part in sorted(turned, key=lambda t: t.moved.start):
        start, stop = part.moved.start, part.moved.stop
        detail = f"features {start} to {stop} are rotated; those before them from {end} on are not"
        guard(start == end, Reason.LAYOUT, detail)
        end = stop
    return end


def _check_readers(
    view: BlockView, found: tuple[list[Moved], list[_Turned]], features: int
) -> None:
    """Refuse a rotation if anything else reads a feature from before it."""
    tensors, turned = found
    allowed = {v for t in tensors for v in (t.var, *t.path)}
    for part in turned:
        allowed |= set(part.rotation.covers)
    early = [v for t in tensors if t.start < features for v in (t.var, *t.path)]
    for var in dict.fromkeys(early):
        detail = f"{var.name}, which is to be rotated, is a result of the function"
        guard(not view.escapes(var), Reason.LEAKED, detail)
        outside = [u.name for u in view.uses(var) if u not in allowed]
        detail = f"{var.name} is read before its rotation by {', '.join(outside)}"
        guard(not outside, Reason.MULTI_USE, detail)
    for part in turned:
        own = set(part.rotation.covers)
        _refuse_readers(view, part.moved.var, own, part.moved.var.name)
        for var in part.rotation.covers[:-1]:
            what = f"{var.name}, a part of the rotation,"
            _refuse_readers(view, var, own, what)
            guard(not view.escapes(var), Reason.LEAKED, f"{what} is a result of the function")


def _refuse_readers(view: BlockView, var: relax.Var, own: set[relax.Var], what: str) -> None:
    """Refuse a variable that others read than `own`."""
    others = [u.name for u in view.uses(var) if u not in own]
    guard(not others, Reason.MULTI_USE, f"{what} is also read by {', '.join(others)}")


def _angles(
    view: BlockView, part: _Turned, bounds: Mapping[str, int]
) -> tuple[Rope, KernelArg, KernelArg]:
    """Read cosines and sines as matrices ``[positions, head_dim]``."""
    moved, rotation = part.moved, part.rotation
    axes, shape = moved.axes, moved.shape
    lanes = axes[-1] in (LANE, FEATURES)
    guard(lanes, Reason.AXIS, f"{moved.var.name} is rotated along axis {len(axes) - 1}, not a head")
    last = shape[-1]
    even = isinstance(last, tirx.IntImm) and int(last) % 2 == 0
    guard(even, Reason.SHAPE, f"a head of {_text(last)} features has no halves")
    dtypes = {dtype_of(rotation.cos), dtype_of(rotation.sin)}
    guard(len(dtypes) == 1, Reason.DTYPE, f"the angles are of {' and '.join(sorted(dtypes))}")
    dtype = check_dtype(next(iter(dtypes)), "the angles")
    end = shape_of(rotation.end)
    guard(
        same_shape(end, shape), Reason.SHAPE, f"{_shape(shape)} is rotated to {_shape(end or [])}"
    )
    same = dtype_of(rotation.end) == dtype_of(moved.var)
    detail = f"{rotation.end.name} is {dtype_of(rotation.end)}, the matmul {dtype_of(moved.var)}"
    guard(same, Reason.DTYPE, detail)
    positions = [_positions(moved, expr) for expr in (rotation.cos, rotation.sin)]
    guard(
        same_shape(positions[:1], positions[1:]),
        Reason.SHAPE,
        f"there are cosines of {_text(positions[0])} positions, sines of {_text(positions[1])}",
    )
    rows = product([shape[i] for i, a in enumerate(axes) if a >= 0])
    own = same_shape((rows,), positions[:1])
    width = int(last)
    rope = Rope(width, 0, dtype, None if own else as_dim(positions[0], bounds))
    matrix = (rows if own else positions[0], width)
    cos, sin = (
        KernelArg(through_views(view, expr), matrix) for expr in (rotation.cos, rotation.sin)
    )
    return rope, cos, sin


def _positions(moved: Moved, angles: relax.Expr) -> PrimExpr | int:
    """Return how many rows of angles there are, refusing what does not go by rows.

    Row i of the projection is to take row ``i % positions``: angles may be broadcast over the first
    dimensions of the rows, not over later ones.
    """
    shape = shape_of(angles)
    guard(shape is not None, Reason.SHAPE, f"the angles have no known shape: {angles.ty}")
    full: list[PrimExpr | int] = [1] * (len(moved.axes) - len(shape or [])) + list(shape or [])
    guard(len(full) == len(moved.axes), Reason.SHAPE, f"angles of rank {len(shape or [])}")
    guard(
        same_shape(full[-1:], moved.shape[-1:]),
        Reason.SHAPE,
        f"angles of {_text(full[-1])} features turn heads of {_text(moved.shape[-1])}",
    )
    rows: list[tuple[int, PrimExpr | int, bool]] = []
    for kind, size, of in zip(moved.axes, full, moved.shape, strict=True):
        if kind == HEAD:
            one = same_shape((size,), (1,))
            guard(one, Reason.LAYOUT, f"the angles differ between {_text(size)} heads")
        elif kind >= 0 and not same_shape((of,), (1,)):
            fits = same_shape((size,), (of,))
            one = same_shape((size,), (1,))
            guard(fits or one, Reason.SHAPE, f"angles of {_text(size)} rows for {_text(of)}")
            rows.append((kind, size, fits))
    own = [(kind, size) for kind, size, fits in rows if fits]
    kinds = [kind for kind, _ in own]
    guard(kinds == sorted(kinds), Reason.LAYOUT, "the rows of the angles are in another order")
    later = [kind for kind, _, fits in rows if not fits and kinds and kind > kinds[0]]
    guard(not later, Reason.LAYOUT, "the angles are the same along a later dimension of the rows")
    return product([size for _, size in own])


def _followed(view: BlockView, chain: Chain, turned: list[_Turned]) -> Chain:
    """Return the chain with the movements behind its kernel."""
    if len(turned) == 1 and not turned[0].moved.path:
        end = turned[0].rotation.end
        return replace(chain, out=end, out_dtype=dtype_of(end))
    after: dict[relax.Var, relax.Expr] = {}
    for part in turned:
        *path, last = part.moved.path
        after.update({v: view.defs[v] for v in path})
        after[part.rotation.end] = view.defs[last]
    return replace(chain, after=tuple(after.items()))


def _joined(
    view: BlockView, chain: Chain, found: tuple[list[Moved], list[_Turned]]
) -> Chain | None:
    """Absorb the concatenation that puts all features together again, as they were.

    rewrite: ``a, v = split(qkv); concat(reshape(rotate(reshape(a))), v)`` -> the kernel's result
    """
    tensors, turned = found
    ends: dict[relax.Var, tuple[Moved, tuple[relax.Var, ...]]] = {}
    for part in turned:
        turned_part = replace(part.moved, var=part.rotation.end)
        ends[turned_part.var] = turned_part, ()
        user = view.only_user(turned_part.var)
        for flat in moved_by(view, turned_part, user) if user is not None else ():
            ends[flat.var] = flat, (flat.var,)
    whole = next((u for end in ends for u in view.uses(end) if _is_whole(view, u, chain)), None)
    if whole is None or not view.is_free(whole):
        return None
    kept = {t.var: (t, t.path) for t in tensors}
    covers, stop = [whole], 0
    for field in view.defs[whole].args[0].fields:
        at, path = ends.get(field) or kept.get(field) or (None, ())
        if at is None or at.start != stop or at.axes[-1] != FEATURES:
            return None
        if view.only_user(field) is None:
            return None
        covers, stop = [*path, *covers], at.stop
    if stop != chain.projection.n or any(view.escapes(v) for v in covers[:-1]):
        return None
    inside = {*chain.covers, *covers}
    if any(u not in inside for v in inside - {whole} for u in view.uses(v)):
        return None
    covers = list(dict.fromkeys((*chain.covers, *covers)))
    return replace(chain, covers=tuple(covers), out=whole, out_dtype=dtype_of(whole))


def _is_whole(view: BlockView, var: relax.Var, chain: Chain) -> bool:
    """Tell whether `var` is a concatenation along the last axis with all features."""
    call = view.call(var, "relax.concat")
    shape = shape_of(var)
    if call is None or shape is None or not isinstance(call.args[0], relax.Tuple):
        return False
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
    return axis % len(shape) == len(shape) - 1 and same_shape(shape[-1:], (chain.projection.n,))


def _shape(dims: list[PrimExpr]) -> str:
    return f"[{', '.join(map(_text, dims))}]"


def _text(dim: PrimExpr | int) -> str:
    """Return a size as a reader writes it."""
    return str(int(dim) if isinstance(dim, tirx.IntImm) else dim)
