"""Products of rows by the weights of their experts, at random."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from .feed_forward import activation
from .writer import LENGTHS, Writer

WIDTHS = (1, 4, 5, 16, 17)


def by_expert(w: Writer) -> relax.Var:
    """Append what the expert that scores most makes of each row of a parameter."""
    count, n, k = w.pick(1, 2, 3, 5), w.pick(*WIDTHS), w.pick(*WIDTHS)
    x = w.param([w.symbol("b") if w.chance(40) else w.pick(*LENGTHS), k])
    scores = w(op.matmul, x, w.param([k, count]))
    best = w(op.topk, scores, k=1, axis=-1, ret_type="indices", dtype=w.pick("int32", "int64"))
    ids = w(op.squeeze, best, [-1])
    transposed = w.chance(60)
    table = w.param([count, n, k] if transposed else [count, k, n])
    weight = w(op.take, table, ids, axis=0, mode=w.pick("fast", "clip", "wrap"))
    if transposed:
        y = w(op.squeeze, w(op.matmul, weight, w(op.expand_dims, x, -1)), [-1])
    else:
        y = w(op.squeeze, w(op.matmul, w(op.expand_dims, x, 1), weight), [1])
    if w.chance(40):
        y = w.either(op.add, y, w(op.take, w.param([count, n]), ids, axis=0, mode="fast"))
    return activation(w, y) if w.chance(50) else y
