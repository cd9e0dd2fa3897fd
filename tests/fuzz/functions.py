"""Random Relax functions of the operators of transformers: the same one for the same seed."""

from __future__ import annotations

from random import Random

from tvm import relax
from tvm.relax import op

from relax_fusion.matching.shapes import dtype_of

from .attentions import attention, bare
from .bindings import Function
from .experts import by_expert
from .feed_forward import MOTIFS, Motif, activation, bias, gated, linear, norm, project, residual
from .models import mutated
from .rotations import rotated_heads
from .writer import LENGTHS, IllTyped, Writer

WIDTHS = (1, 4, 5, 8, 12, 16, 17, 24)


def draw(seed: int) -> Function:
    """Return the function of a seed."""
    rng = Random(seed)
    if rng.random() < 0.1:
        return mutated(rng)
    w = Writer(rng, rng.choice((0, 0, 1, 3, 8)))
    try:
        return w.finish(*written(w))
    except IllTyped:
        return w.finish() if w.bindings else draw(seed + (1 << 40))


def written(w: Writer) -> list[relax.Var]:
    """Write a function; return its results."""
    what = w.rng.random()
    if what < 0.15:
        return [bare(w)]
    if what > 0.95:
        return [by_expert(w)]
    rank = w.pick(2, 3, 3, 3, 4)
    leading = [w.symbol(n) if w.chance(40) else w.pick(*LENGTHS) for n in ("b", "s", "u")]
    x = w.param([*leading[: rank - 1], w.pick(*WIDTHS)])
    if w.chance(15):
        x = w.sized(x)
    if what < 0.27:
        return tangle(w, x)
    if what < 0.3:
        return [joined(w, x)]
    if w.chance(25):
        x = w.either(op.add, x, w.param(w.shape(x)))
    for _ in range(w.pick(1, 1, 1, 2)):
        x = block(w, x)
    return [x]


def block(w: Writer, x: relax.Var) -> relax.Var:
    """Append one block in pre-norm, post-norm, parallel or bare arrangement."""
    motif: Motif = w.pick(*MOTIFS, attention, attention, attention, rotated_heads, rotated_heads)
    arrangement = w.pick("pre", "pre", "pre", "post", "parallel", "bare", "bare")
    if arrangement == "pre":
        y = motif(w, norm(w, x))
        return added(w, y, x) if w.chance(75) else y
    if arrangement == "post":
        return norm(w, added(w, motif(w, x), x))
    if arrangement == "parallel":
        h = norm(w, x)
        return added(w, added(w, motif(w, h), w.pick(*MOTIFS)(w, h)), x)
    return motif(w, x)


def added(w: Writer, y: relax.Var, x: relax.Var) -> relax.Var:
    """Add the stream to what a block made of it, if it has the same type."""
    same = str(w.shape(x)) == str(w.shape(y)) and dtype_of(x) == dtype_of(y)
    return residual(w, y, x) if same else y


def joined(w: Writer, x: relax.Var) -> relax.Var:
    """Append pairs, of projections or of parts of one tensor, and one tensor of all of them."""
    pairs, parts = [], []
    width = w.pick(2, 4, 6)
    for _ in range(w.pick(2, 3, 5, 8, 12)):
        a = x if w.chance(30) else w.param(w.shape(x))
        if w.chance(60):
            pair = [project(w, a, width) for _ in range(2)]
        else:
            both = w.emit(op.split(project(w, a, 2 * width), 2, -1))
            pair = [w.emit(relax.TupleGetItem(both, n)) for n in range(2)]
        pair[1] = w(op.negative, pair[1]) if w.chance(60) else pair[1]
        pairs.append(w.emit(op.concat(pair, -1)))
        parts += pair
    if w.chance(50):
        return w(op.multiply, *[w.emit(op.concat(w.pick(pairs, parts), -1))] * 2)
    made = pairs[0]
    for pair in pairs[1:]:
        made = w.emit(op.concat([made, pair], -1))
    return activation(w, made)


def tangle(w: Writer, x: relax.Var) -> list[relax.Var]:
    """Append operators whose operands are any earlier tensors of the same type."""
    width, pool = w.shape(x)[-1], [x]
    for _ in range(w.pick(4, 6, 9)):
        a = w.pick(*pool)
        what = w.pick("norm", "linear", "linear", "add", "multiply", "activation", "gated", "alias")
        if what == "norm":
            made = norm(w, a)
        elif what == "linear":
            made = bias(w, project(w, a, width), 30)
        elif what == "activation":
            made = activation(w, a)
        elif what == "gated":
            made = gated(w, a) if w.chance(70) else linear(w, a)
        elif what == "alias":
            made = w.emit(a)
        else:
            made = w.either(getattr(op, what), a, w.pick(*pool))
        if str(made.ty) == str(x.ty):
            pool.append(made)
    return [pool[-1], *(w.pick(*pool) for _ in range(w.pick(0, 0, 1, 2)))]
