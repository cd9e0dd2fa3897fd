"""Rotations of some rows, or of some features of a head, as rotations of all."""

from __future__ import annotations

from dataclasses import replace

from tvm import ir, relax, tirx

from ..matching.movements import cut_of
from ..matching.rotation import Rotation, rotation_at
from ..matching.shapes import dtype_of, is_one, permutation, same_shape, shape_of
from ..transforms.modules import module_pass
from .reordered_scores import rotated, scores_of_neighbours
from .rewriter import Rewriter, Rule, canonicalise


@module_pass
class PadRotations:
    """Turn what is not rotated by no angle, so that all rows and features are rotated alike.

    rewrite::

        y = R.concat((x[:, :1], rotated(x[:, 1:], cos, sin)), axis=1)    # a class token
            ->
        y = rotated(x, R.concat((ones, cos)), R.concat((zeros, sin)))

        q = R.concat((h[..., :n], in_halves(h[..., n:])), axis=-1)     # of neighbours of a head
        s = R.matmul(q, k)                                             # and so are the keys
            ->
        s = R.matmul(rotated(h, ones_and_cos, zeros_and_sin), k)       # pairs stay neighbours

    The kernel of a projection then rotates what it makes.  An order of features that queries and
    keys share changes nothing in their products: rotations that read pairs as neighbours and write
    them as halves, as DeepSeek's do, write them as neighbours.

    declines when:
        the other rows or features are no part of the same tensor; the pairs of a part of a head are
        halves; the dtype is another than that of the angles; a size is symbolic.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return canonicalise(mod, PADDED)


def _padded(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Read a concatenation of a rotation and of what it leaves out."""
    shape = shape_of(call)
    if not isinstance(call.args[0], relax.Tuple) or len(call.args[0].fields) != 2 or not shape:
        return None
    fields, axis = list(call.args[0].fields), int(call.attrs.axis or 0) % len(shape)
    for at in (0, 1):
        var = fields[at]
        found = rotation_at(rewriter, var) if isinstance(var, relax.Var) else None
        if found is None:
            continue
        parts = [found.source if i == at else field for i, field in enumerate(fields)]
        whole = _whole(rewriter, (parts[0], parts[1]), axis)
        if whole is None or not same_shape(shape_of(whole), shape):
            continue
        angles = _padded_angles(rewriter, found, (axis, at), fields[1 - at])
        if angles is not None:
            cos, sin = angles
            return rotated(rewriter, replace(found, source=whole, cos=cos, sin=sin))
    return None


def _whole(
    rewriter: Rewriter, parts: tuple[relax.Expr, relax.Expr], axis: int
) -> relax.Expr | None:
    """Return the tensor that two parts, one behind the other along an axis, are all of."""
    turned = [rewriter.call(part, "relax.permute_dims") for part in parts]
    first, second = turned
    if first is not None and second is not None:
        rank = len(shape_of(first) or ())
        axes = permutation(first, rank)
        if axes != permutation(second, rank):
            return None
        inner = _whole(rewriter, (first.args[0], second.args[0]), axes[axis])
        return None if inner is None else rewriter.emit(relax.op.permute_dims(inner, axes))
    cuts = [cut_of(rewriter, part) for part in parts]
    low, high = cuts
    if low is None or high is None or not low.source.same_as(high.source):
        return None
    plain = all((c.axis, c.stride, c.single) == (axis, 1, False) for c in (low, high))
    ends = [low.start, low.stop, high.stop]
    return low.source if plain and ends == [0, high.start, high.extent] else None


def _padded_angles(
    rewriter: Rewriter, found: Rotation, where: tuple[int, int], other: relax.Expr
) -> tuple[relax.Expr, relax.Expr] | None:
    """Return cosines and sines with those of no angle for another part; None if there are none.

    `where` is the axis, and the place of the rotation among both parts.
    """
    (axis, at), shape, beside = where, shape_of(found.end), shape_of(other)
    if not shape or not beside or not isinstance(beside[axis], tirx.IntImm):
        return None
    last, width = len(shape) - 1, int(beside[axis])
    if axis == last and (found.pairing == "halves" or at == 0 or width % 2):
        return None
    width //= 1 + (axis == last and found.by_pair)
    made = []
    for angles, value in ((found.cos, 1.0), (found.sin, 0.0)):
        own = shape_of(angles)
        if not own or len(own) > len(shape) or dtype_of(angles) != dtype_of(found.source):
            return None
        full = [tirx.IntImm("int64", 1)] * (len(shape) - len(own)) + own
        if axis == last and is_one(full[last]):
            return None
        if axis != last and is_one(full[axis]):
            full[axis] = shape[axis]
            angles = rewriter.emit(relax.op.broadcast_to(angles, full))
        elif len(own) < len(shape):
            angles = rewriter.emit(relax.op.reshape(angles, full))
        full[axis] = tirx.IntImm("int64", width)
        none = rewriter.emit(relax.op.full(full, relax.const(value, dtype_of(angles))))
        joined = [none, angles] if at else [angles, none]
        made.append(rewriter.emit(relax.op.concat(joined, axis)))
    return made[0], made[1]


PADDED: dict[str, Rule] = {
    "relax.concat": _padded,
    "relax.matmul": scores_of_neighbours,
    "relax.nn.attention": scores_of_neighbours,
}
