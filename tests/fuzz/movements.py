"""Random functions of movements, and of what is written out around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from tvm import relax
from tvm.relax import op

from relax_fusion.matching.shapes import dtype_of

from ..support.movements import MOVEMENTS
from .bindings import Function
from .feed_forward import activation, norm, written_norm
from .rotations import turned
from .writer import IllTyped, Writer

UNARY = ("abs", "cos", "erf", "exp", "negative", "sigmoid", "sin", "square", "tanh", "nn.relu")
BINARY = ("add", "divide", "maximum", "minimum", "multiply", "subtract")
REDUCTIONS = ("max", "mean", "min", "sum", "variance")
Step = Callable[[Writer, relax.Var], relax.Var]
INTEGERS = ("int64", "int32", "uint8", "bool")


def draw(seed: int, steps: Sequence[Step] = ()) -> Function:
    """Return the function of a seed; `steps` are there besides those that there always are."""
    rng = Random(seed)
    w = Writer(rng, rng.choice((0, 0, 2, 6)))
    w.dtype = rng.choice(("float32",) * 6 + ("float16", "float16", "bfloat16", "float64"))
    lead = [w.symbol(n) if w.chance(40) else w.pick(1, 1, 2, 3, 0) for n in ("b", "s")]
    lead = [lead[0]] * 2 if w.chance(10) else lead
    x = w.param([*lead[: w.pick(1, 2, 2)], *([w.pick(1, 2)] if w.chance(40) else []), 8])
    pool = [x]
    if w.chance(20):
        pool.append(w.param(w.shape(x), w.pick(*INTEGERS)))
    for _ in range(w.pick(4, 6, 9, 12)):
        value = w.pick(*pool[-3:], *pool) if w.chance(70) else pool[-1]
        try:
            pool.append(step(w, value, pool, steps))
        except (IllTyped, RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError):
            continue  # TVM refuses it
    if w.chance(30):
        pool.append(one_row(w, pool[-1]))
    results = [pool[-1], *(w.pick(*pool) for _ in range(w.pick(0, 0, 1, 2)))]
    return w.finish(*results) if w.bindings else draw(seed + (1 << 40), steps)


def draw_shuffled(seed: int) -> Function:
    """Return the function of a seed that has movements of all kinds, one after the other."""
    return draw(seed, (shuffled, shuffled, shuffled))


def step(w: Writer, x: relax.Var, pool: Sequence[relax.Var], more: Sequence[Step]) -> relax.Var:
    """Append an operator on `x`."""
    if math.prod(d if isinstance(d, int) else 3 for d in w.shape(x)) > 4000:
        raise IllTyped("large")
    steps = (moved, moved, moved, repeated, cut, joined, selected, element, element, element, *more)
    if "float" in dtype_of(x):
        steps += (multiplied, multiplied, norm, nearly_norm, activation, nearly_active, softmax)
        steps += (rotated,)
    found: relax.Var = w.pick(*steps)(w, x)
    return binary(w, found, pool) if w.chance(40) else found


# --- movements -------------------------------------------------------------------------------


def moved(w: Writer, x: relax.Var) -> relax.Var:
    """Reshape, transpose, or add or drop axes of size 1."""
    shape, rank = w.shape(x), len(w.shape(x))
    what = w.pick(
        "reshape", "reshape", "reshape", "transpose", "heads", "expand", "squeeze", "flat"
    )
    if what == "reshape":
        return w(op.reshape, x, regrouped(w, shape))
    if what == "transpose":
        return w(op.permute_dims, x, w.pick(None, w.rng.sample(range(rank), rank)))
    if what == "heads":
        axes = list(range(rank))
        first = w.rng.randrange(rank - 1)
        axes[first : first + 2] = axes[first : first + 2][::-1]
        return w(op.permute_dims, x, axes)
    if what == "expand":
        return w(op.expand_dims, x, w.pick([0], [-1], [1], [rank], [0, 1], [-2]))
    if what == "squeeze":
        return w(op.squeeze, x, w.pick(None, [i for i, d in enumerate(shape) if d == 1][:1]))
    return w(op.flatten, x)


def regrouped(w: Writer, shape: list[object]) -> list[object]:
    """Return a shape of as many elements: axes merged, split, or beside others of size 1."""
    found = list(shape)
    for _ in range(w.pick(1, 1, 2)):
        at = w.rng.randrange(len(found))
        what = w.pick("merge", "merge", "split", "one", "drop", "keep")
        if what == "merge" and at + 1 < len(found):
            found[at : at + 2] = [found[at] * found[at + 1]]
        elif what == "split" and isinstance(found[at], int) and found[at] % 2 == 0:
            found[at : at + 1] = w.pick([2, found[at] // 2], [found[at] // 2, 2])
        elif what == "one":
            found.insert(at, 1)
        elif what == "drop" and 1 in found and len(found) > 1:
            found.remove(1)
    return found


def repeated(w: Writer, x: relax.Var) -> relax.Var:
    """Repeat elements along some axis."""
    shape, rank = w.shape(x), len(w.shape(x))
    what = w.pick("broadcast", "broadcast", "repeat", "tile")
    if what == "broadcast":
        wide = [w.pick(1, 2, 3) if d == 1 else d for d in shape]
        return w(op.broadcast_to, x, [*w.pick([], [1], [2]), *wide])
    if what == "repeat":
        return w(op.repeat, x, w.pick(1, 2, 3), w.rng.randrange(-rank, rank))
    return w(op.tile, x, w.pick([2], [1] * rank, [2, *[1] * rank], [1] * (rank - 1) + [2]))


def cut(w: Writer, x: relax.Var) -> relax.Var:
    """Take a slice, or a part of a split."""
    axis = w.rng.randrange(len(w.shape(x)))
    axis, size = w.pick(axis, axis - len(w.shape(x)), -1), w.shape(x)[axis]
    if w.chance(50):
        parts = w.emit(op.split(x, w.pick(1, 2, 2, [0], [1], [size, size], [0, size]), axis))
        if not isinstance(parts.ty, relax.TupleType):
            return parts
        return w.emit(relax.TupleGetItem(parts, w.rng.randrange(len(parts.ty.fields))))
    begin = w.pick(0, 0, 1, -1, size)
    strides = w.pick(None, None, [1], [2], [-1])
    end = w.pick(size, 1, 0, -1, 3, 2**31 - 1, 2**62 if strides is None else size)
    if w.chance(15):
        return w(op.strided_slice, x, [axis], [0], [size], assume_inbound=True)
    return w(op.strided_slice, x, [axis], [begin], [end], strides)


def shuffled(w: Writer, x: relax.Var) -> relax.Var:
    """Append two of the movements that there are, each along some axis."""
    for _ in range(w.pick(1, 2, 2)):
        axis, move = w.rng.randrange(len(w.shape(x))), MOVEMENTS[w.pick(*MOVEMENTS)]
        if isinstance(size := w.shape(x)[axis], int) and size < 3:
            raise IllTyped("an axis of few elements")
        x = w(move, w.emit, x, axis)
    return x


def one_row(w: Writer, x: relax.Var) -> relax.Var:
    """Take the first, the last or a numbered place of an axis."""
    shape = w.shape(x)
    axis = w.rng.randrange(len(shape)) if shape else 0
    if not shape or shape[axis] == 0:
        return x
    size = shape[axis]
    if w.chance(20):
        return w(op.take, x, relax.const(np.zeros(1, "int64")), axis)
    first = w.pick(0, size - 1)
    return w(op.strided_slice, x, [axis], [first], [first + 1], assume_inbound=True)


def joined(w: Writer, x: relax.Var) -> relax.Var:
    """Concatenate or stack with itself, with its opposite, or with nothing."""
    axis = w.rng.randrange(len(w.shape(x)))
    other = w.pick("self", "negative", "empty", "none")
    parts = [x]
    if other == "empty":
        parts.append(w(op.strided_slice, x, [axis], [0], [0]))
    elif other != "none":
        parts.append(x if other == "self" or dtype_of(x) == "bool" else w(op.negative, x))
    w.rng.shuffle(parts)
    function = w.pick(op.concat, op.concat, op.concat, op.stack)
    return w(function, parts, w.pick(axis, axis, axis - len(w.shape(x)), None))


def selected(w: Writer, x: relax.Var) -> relax.Var:
    """Take places of an axis, or rows of a table by integers."""
    rank = len(w.shape(x))
    if "int" in dtype_of(x) and w.chance(60):
        table = w.leaf(w.pick([5, 8], [5, 8], [5]), w.dtype)
        return w(op.take, table, w(op.minimum, x, relax.const(4, dtype_of(x))), 0)
    if 0 in w.shape(x):
        raise IllTyped("what is read of an empty tensor is any number")
    places = w.pick(0, [0], [-1], -1, [0, 0], [[0], [-1]], [1])
    indices = relax.const(np.array(places), w.pick("int64", "int32"))
    return w(op.take, x, indices, w.pick(*range(rank), -1))


# --- arithmetic ------------------------------------------------------------------------------


def element(w: Writer, x: relax.Var) -> relax.Var:
    """Append an operator on elements, a sum, or a cast."""
    dtype, rank = dtype_of(x), len(w.shape(x))
    what = w.pick("unary", "number", "row", "sum", "cast", "bool")
    if what == "bool" and dtype != "bool":
        return w(op.greater, x, relax.const(0, dtype))
    if dtype == "bool":
        y = w(op.cumsum, x, w.rng.randrange(rank)) if w.chance(40) else w(op.logical_not, x)
        y = w(op.expand_dims, y, [w.rng.randrange(rank)]) if w.chance(20) else y
        return w(w.pick(op.equal, op.not_equal), y, y) if w.chance(50) else y
    if what == "unary":
        if dtype == "uint8":
            return x
        name = w.pick(*UNARY) if "float" in dtype else w.pick("abs", "negative", "square")
        return w(getattr(op, name) if "." not in name else op.nn.relu, x)
    if what == "number":
        number = relax.const(np.full(w.pick((), (1,), (1, 1)), w.pick(1, 2, 3)), dtype)
        name = w.pick(*BINARY)
        if name == "divide" and "float" not in dtype:
            return w(op.divide, x, number)  # what divides would be zero
        return w.either(getattr(op, name), x, number)
    if what == "row":
        shape = [1] * w.pick(0, 0, 1, rank - 1) + w.shape(x)[-1:]
        row = w.leaf(w.pick(shape, [*w.shape(x)[-2:-1], 1]), dtype)
        return w.either(getattr(op, w.pick("add", "multiply", "subtract")), x, row)
    if what == "sum":
        axis = w.pick([-1], [-1], [rank - 1], [0], None, [0, -1])
        return w(getattr(op, w.pick(*REDUCTIONS)), x, axis, w.chance(75))
    return w(op.astype, x, w.pick("float32", "float32", w.dtype, "float16", "float64", "int32"))


def binary(w: Writer, x: relax.Var, pool: Sequence[relax.Var]) -> relax.Var:
    """Append an operator on two tensors, which may broadcast one another."""
    same = [v for v in pool if dtype_of(v) == dtype_of(x) and dtype_of(v) != "bool"]
    if not same:
        return x
    other = w.pick(*same)
    if w.chance(30) and other.ty.shape is not None and x in same:
        try:
            return w.either(op.add, w(op.reshape, other, w.shape(x)), x)
        except IllTyped:
            return x
    return w.either(getattr(op, w.pick("add", "multiply", "subtract", "maximum")), x, other)


def multiplied(w: Writer, x: relax.Var) -> relax.Var:
    """Append a matmul by a weight, perhaps of a batch, or of itself."""
    *lead, k = w.shape(x)
    wide = w.pick(None, None, None, "float32")
    what = w.pick("plain", "plain", "transposed", "expanded", "expanded", "batched", "self")
    if what == "self":
        return w(
            op.matmul, x, w(op.permute_dims, x, [*range(len(lead) - 1), len(lead), len(lead) - 1])
        )
    n = w.pick(1, 4, 8)
    if what == "batched":
        return w(op.matmul, x, w.param([*lead[:-1], k, n], dtype_of(x)), wide)
    flat = what == "transposed" or w.chance(40)
    weight = w.leaf([n, k] if flat else [k, n], dtype_of(x))
    early = w.chance(50)
    weight = w(op.permute_dims, weight) if flat and early else weight
    if what == "expanded":
        batch = lead[:-1] if w.chance(80) else [2]
        shape = [*batch, *w.shape(weight)]
        weight = w(op.expand_dims, weight, [0]) if w.chance(40) else weight
        weight = w(op.broadcast_to, weight, shape)
    if flat and not early:
        weight = transposed(w, weight)
    return w(op.matmul, x, weight, wide)


def transposed(w: Writer, x: relax.Var) -> relax.Var:
    """Swap the last two axes."""
    rank = len(w.shape(x))
    return w(op.permute_dims, x, [*range(rank - 2), rank - 1, rank - 2])


def nearly_norm(w: Writer, x: relax.Var) -> relax.Var:
    """Append a norm that is written out, which in a half of the cases is none."""
    wrong = ("axis", "two", "inside", "other", "eps", "dims", "one", "gamma")
    return written_norm(w, x, 1e-3, w.chance(40), w.pick(*[""] * 8, *wrong))


def nearly_active(w: Writer, x: relax.Var) -> relax.Var:
    """Append an activation whose numbers are a little off."""
    return activation(w, x, w.pick(1.001, 1.00001, 0.999))


def softmax(w: Writer, x: relax.Var) -> relax.Var:
    """Append a softmax, perhaps guarded against rows of NaN."""
    made = w(op.nn.softmax, x, w.pick(-1, -1, 0))
    if w.chance(60):
        return made
    zero = relax.const(w.pick(0.0, 0.0, 1.0), dtype_of(x))
    return w(op.where, w(op.isnan, made), zero, made)


def rotated(w: Writer, x: relax.Var) -> relax.Var:
    """Append a rotation of a norm, or nearly one."""
    size = w.shape(x)[-1]
    if size not in (2, 4, 8):
        raise IllTyped("a last axis that has no halves")
    if w.chance(60):
        x = w(op.nn.rms_norm, x, w.leaf([size], dtype_of(x)), w.pick(-1, len(w.shape(x)) - 1))
    x = moved(w, x) if w.chance(30) else x
    shape = w.shape(x)[w.pick(-1, -1, 0, -2) :]
    return turned(w, x, (w.param(shape, dtype_of(x)), w.param(shape, dtype_of(x))))
