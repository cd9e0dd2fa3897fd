"""Rotary embeddings of a projection's heads: where they are, and whether its kernel can turn them.

Between a projection and its rotation stand data movements: reshapes to heads, transposes, splits of
a merged projection, of heads that come in turns, of a head of which a part is rotated.  A rotation
commutes with all of them.  So the kernel turns the features where they are, and the movements
follow it, unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from tvm import relax, tirx

from ..errors import Reason
from ..workload import HeadNorm, Rope
from .epilogue import FusedProjection, named
from .movements import Moved, Run, moves, same_expr, through_views
from .norm_rotation import head_norm, normed_rotation
from .pattern import BlockView, KernelArg, PrimExpr, Refused, guard
from .rotated_results import RotatedPart, after_the_kernel
from .rotation import Rotation, rotation_of
from .roundings import refuse_kept_roundings
from .shapes import as_dim, check_dtype, dtype_of, is_one, product, same_shape, shape_of, shape_text


def with_rope(
    view: BlockView, chain: FusedProjection, forbidden: set[relax.Var], bounds: Mapping[str, int]
) -> FusedProjection:
    """Let the kernel of a projection rotate its heads, if the graph does.

    Returns `chain` itself where nothing is rotated; with the reason in `declined` where something
    is that the kernel cannot rotate.

    `chain`: the projection and the steps that its kernel takes along.
    `forbidden`: results of the same kernel: angles that need one of them cannot be part of it.
    `bounds`: largest values of symbolic variables.
    """
    shape = shape_of(chain.out)
    n = chain.linear.n
    if shape is None or len(shape) < 2 or not isinstance(n, int):
        return chain
    whole = Moved(chain.out, (*range(len(shape) - 1), (Run(n, 1),)))
    tensors = list(moves(view, whole))
    looked_at = ((t, normed_rotation(view, t.var) or rotation_of(view, t.var)) for t in tensors)
    parts = [RotatedPart(t, found) for t, found in looked_at if found is not None]
    if not parts:
        return chain
    try:
        return _rotated(view, chain, (tensors, parts), forbidden, bounds)
    except Refused as refusal:
        where = ", ".join(t.rotation.end.name for t in parts)
        return replace(chain, declined=((where, refusal.decline),))


def _rotated(
    view: BlockView,
    chain: FusedProjection,
    found: tuple[list[Moved], list[RotatedPart]],
    forbidden: set[relax.Var],
    bounds: Mapping[str, int],
) -> FusedProjection:
    """Check that the rotations are one of heads at equal distances, and take them along."""
    tensors, parts = found
    steps = chain.projection.epilogue
    norms = [head_norm(t.rotation) for t in parts]
    detail = f"the heads are rotated after {', '.join(named(steps))}; only a bias can come before"
    guard(steps in ((), ("bias",)), Reason.ATTRIBUTE, detail)
    angles = [_angles(view, t, bounds) for t in parts]
    rope, cos, sin = angles[0]
    for other, other_cos, other_sin in angles[1:]:
        same = same_expr(view, cos.expr, other_cos.expr) and same_expr(
            view, sin.expr, other_sin.expr
        )
        guard(
            same and other == rope, Reason.SHAPE, "parts of a projection turn by different angles"
        )
    rope = _placed(rope, parts, chain.projection.columns)
    gamma = _gamma(view, parts, norms, (rope, chain.projection.columns))
    _check_readers(view, (tensors, parts))
    covers = tuple(dict.fromkeys(v for t in parts for v in (*t.moved.path, *t.rotation.covers)))
    refuse_kept_roundings(view, (*chain.covers, *covers))
    inside = forbidden | set(chain.covers) | set(covers)
    late = any(view.depends_on(a.expr, inside) for a in (cos, sin))
    guard(not late, Reason.CYCLE, "the angles are computed from the kernel's own results")
    longer = replace(
        chain,
        projection=replace(chain.projection, rope=rope, head_norm=norms[0]),
        angles=(cos, sin),
        gamma=gamma,
        plain=chain if gamma else None,
    )
    return after_the_kernel(view, longer, (tensors, parts))


def _gamma(
    view: BlockView,
    parts: list[RotatedPart],
    norms: list[HeadNorm | None],
    turned: tuple[Rope, int],
) -> tuple[KernelArg, ...]:
    """Return by what heads are multiplied, refusing norms that are not one of all features."""
    (rope, n), gammas = turned, [t.rotation.heads[1] for t in parts if t.rotation.heads]
    norm = norms[0]
    one = {*norms} == {norm} and all(same_expr(view, g, gammas[0]) for g in gammas)
    guard(one, Reason.SHAPE, "parts of a projection are normalised by different weights")
    if norm is None:
        return ()
    detail = f"{rope.turned(n)} features of {n} are normalised, must be all"
    guard(rope.turned(n) == n and n % norm.width == 0, Reason.LAYOUT, detail)
    return (KernelArg(gammas[0], (norm.width,)),)


def _as_heads(part: RotatedPart) -> Moved:
    """Return a part whose last axis is a head, as which a norm of whole rows is rotated."""
    heads, moved = part.rotation.heads, part.moved
    if heads is None or not moved.shape or not heads[0].is_cut:
        return moved
    found = moved.by_heads(heads[0].head)
    guard(found is not None, Reason.AXIS, f"{moved.var.name} has the features in another order")
    assert found is not None
    return found


def _placed(rope: Rope, parts: list[RotatedPart], n: int) -> Rope:
    """Return a rotation with its heads, refusing those that are not at equal distances."""
    starts = np.unique(np.concatenate([_as_heads(part).features(slice(-1)) for part in parts]))
    first, width, count = int(starts[0]), rope.width, len(starts)
    stop = int(starts[-1]) + width
    detail = f"features {first} to {stop} are rotated; those before them from 0 on are not"
    guard(first == 0, Reason.LAYOUT, detail)
    gaps = np.diff(starts)
    head_dim = int(gaps[0]) if count > 1 else (width if n % width == 0 else n)
    other = np.flatnonzero(gaps != head_dim)
    heads = int(other[0]) + 1 if len(other) else count
    period = int(starts[heads]) if len(other) else n
    wanted = np.add.outer(np.arange(n // period) * period, np.arange(heads) * head_dim).ravel()
    shown = ", ".join(map(str, starts[: heads + 1]))
    detail = f"heads that are rotated begin at features {shown}, ..., not at equal distances"
    regular = n % period == 0 == period % head_dim and heads * head_dim <= period
    guard(regular and np.array_equal(starts, wanted), Reason.LAYOUT, detail)
    detail = f"{width} features are rotated, which do not divide heads of {head_dim}"
    fits = head_dim % width == 0 if rope.pairing == "halves" else width <= head_dim
    guard(fits and head_dim % 2 == 0, Reason.SHAPE, detail)
    return replace(
        rope,
        head_dim=head_dim,
        features=heads * head_dim,
        rotary_dim=width if width < head_dim else None,
        period=period if period < n else None,
    )


def _check_readers(view: BlockView, found: tuple[list[Moved], list[RotatedPart]]) -> None:
    """Refuse a rotation if anything else reads a feature from before it."""
    tensors, parts = found
    rotated = np.concatenate([part.moved.features() for part in parts])
    allowed = {v for t in tensors for v in (t.var, *t.path)}
    for part in parts:
        allowed |= set(part.rotation.covers)
        for var in part.rotation.covers[:-1]:
            what = f"{var.name}, a part of the rotation,"
            others = [u.name for u in view.uses(var) if u not in part.rotation.covers]
            guard(not others, Reason.MULTI_USE, f"{what} is also read by {', '.join(others)}")
            guard(not view.escapes(var), Reason.LEAKED, f"{what} is a result of the function")
    early = [t for t in tensors if np.isin(t.features(), rotated).any()]
    for var in dict.fromkeys(v for t in early for v in (*t.path, t.var)):
        detail = f"{var.name}, which is to be rotated, is a result of the function"
        guard(not view.escapes(var), Reason.LEAKED, detail)
        outside = [u.name for u in view.uses(var) if u not in allowed]
        detail = f"{var.name} is read before its rotation by {', '.join(outside)}"
        guard(not outside, Reason.MULTI_USE, detail)


def _angles(
    view: BlockView, part: RotatedPart, bounds: Mapping[str, int]
) -> tuple[Rope, KernelArg, KernelArg]:
    """Read cosines and sines as matrices ``[positions, head_dim]``."""
    moved, rotation = _as_heads(part), part.rotation
    axes, shape = moved.axes, moved.shape
    held = axes[-1]
    lanes = isinstance(held, tuple) and len(held) == 1 and held[0].step == 1
    detail = f"{moved.var.name} is rotated along axis {len(axes) - 1}, not a head"
    if isinstance(held, tuple):
        detail = f"{moved.var.name} has the features of a head in another order, or not all of them"
    guard(lanes, Reason.AXIS, detail)
    last = shape[-1]
    even = isinstance(last, tirx.IntImm) and int(last) % 2 == 0
    guard(even, Reason.SHAPE, f"a head of {_text(last)} features has no halves")
    dtypes = {dtype_of(rotation.cos), dtype_of(rotation.sin)}
    guard(len(dtypes) == 1, Reason.DTYPE, f"the angles are of {' and '.join(sorted(dtypes))}")
    dtype = check_dtype(next(iter(dtypes)), "the angles")
    end = shape_of(rotation.end)
    guard(
        same_shape(end, part.moved.shape),
        Reason.SHAPE,
        f"{shape_text(part.moved.shape)} is rotated to {shape_text(end or [])}",
    )
    same = dtype_of(rotation.end) == dtype_of(moved.var)
    detail = f"{rotation.end.name} is {dtype_of(rotation.end)}, the matmul {dtype_of(moved.var)}"
    guard(same, Reason.DTYPE, detail)
    width = int(last)
    both = (rotation.cos, rotation.sin)
    positions = [_positions(moved, expr, width // (1 + rotation.by_pair)) for expr in both]
    guard(
        same_shape(positions[:1], positions[1:]),
        Reason.SHAPE,
        f"there are cosines of {_text(positions[0])} positions, sines of {_text(positions[1])}",
    )
    rows = product([shape[i] for i, a in enumerate(axes) if isinstance(a, int)])
    own = same_shape((rows,), positions[:1])
    single = [_of_pairs(view, expr, rotation) for expr in both]
    by_pair = single[0] is not None and single[1] is not None
    rope = Rope(width, 0, dtype, None if own else as_dim(positions[0], bounds))
    rope = replace(rope, pairing=rotation.pairing, by_pair=by_pair)
    matrix = (rows if own else positions[0], rope.columns)
    exprs = single if by_pair else both
    cos, sin = (KernelArg(through_views(view, expr), matrix) for expr in exprs)
    return rope, cos, sin


def _of_pairs(view: BlockView, angles: relax.Expr, rotation: Rotation) -> relax.Expr | None:
    """Return the angles of pairs, where those of elements are the same ones repeated.

    rewrite: ``reshape(broadcast_to(reshape(a, [..., d, 1]), [..., d, 2]), [..., 2 d])`` -> ``a``
    """
    if rotation.by_pair:
        return angles
    repeated = through_views(view, angles)
    once = view.call(repeated, "relax.broadcast_to")
    if once is not None and rotation.pairing == "neighbours":
        before, after = shape_of(once.args[0]), shape_of(repeated)
        if before and after and same_shape([*before[:-1], 2], after):
            return once.args[0] if same_shape(before[-1:], (1,)) else None
    return None


def _positions(moved: Moved, angles: relax.Expr, columns: int) -> PrimExpr | int:
    """Return how many rows of angles there are, refusing what does not go by rows.

    Row i of the projection is to take row ``i % positions``: angles may be broadcast over the first
    dimensions of the rows, not over later ones.
    """
    shape = shape_of(angles)
    guard(shape is not None, Reason.SHAPE, f"the angles have no known shape: {angles.ty}")
    full: list[PrimExpr | int] = [1] * (len(moved.axes) - len(shape or [])) + list(shape or [])
    guard(len(full) == len(moved.axes), Reason.SHAPE, f"angles of rank {len(shape or [])}")
    guard(
        same_shape(full[-1:], (columns,)),
        Reason.SHAPE,
        f"angles of {_text(full[-1])} features turn heads of {_text(moved.shape[-1])}",
    )
    rows: list[tuple[int, PrimExpr | int, bool]] = []
    for kind, size, of in list(zip(moved.axes, full, moved.shape, strict=True))[:-1]:
        if isinstance(kind, tuple):
            one = is_one(size)
            guard(one, Reason.LAYOUT, f"the angles differ between {_text(size)} heads")
        elif not is_one(of):
            fits = same_shape((size,), (of,))
            one = is_one(size)
            guard(fits or one, Reason.SHAPE, f"angles of {_text(size)} rows for {_text(of)}")
            rows.append((kind, size, fits))
    own = [(kind, size) for kind, size, fits in rows if fits]
    kinds = [kind for kind, _ in own]
    guard(kinds == sorted(kinds), Reason.LAYOUT, "the rows of the angles are in another order")
    later = [kind for kind, _, fits in rows if not fits and kinds and kind > kinds[0]]
    guard(not later, Reason.LAYOUT, "the angles are the same along a later dimension of the rows")
    return product([size for _, size in own])


def _text(dim: PrimExpr | int) -> str:
    """Return a size as a reader writes it."""
    return str(int(dim) if isinstance(dim, tirx.IntImm) else dim)
