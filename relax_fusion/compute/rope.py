"""The rotated epilogue of a contraction: pairs of features, each accumulated as two parts."""

from __future__ import annotations

from collections.abc import Callable

from tvm import s_tir, te, tirx

from ..errors import LoweringError
from ..workload import NormMatmul, Projection, Rope, WeightLayout, operand_name
from .accumulation import accumulate
from .activations import ACCUMULATE
from .stages import Padding, Reader, Size, Stages, int64, stack_parts

Pairs = Callable[[tirx.Expr, tirx.Expr, tirx.Expr], tirx.Expr]
"""A function that returns an element of a pair: of an accumulator by part, row and pair; of a
result the part is last."""


def feature_of(rope: Rope, part: tirx.Expr, pair: tirx.Expr) -> tirx.Expr:
    """Return the output feature that is a part (0 or 1) of a pair."""
    distance = rope.distance
    return pair // distance * (2 * distance) + part * distance + pair % distance


def in_order(func: tirx.PrimFunc, name: str, rope: Rope) -> tirx.PrimFunc:
    """Return `func` with the result of the block `name` in the order of its features.

    rewrite: ``out[i, pair, part] = v`` -> ``out[i, feature_of(part, pair)] = v``

    Stages are functions of their place in the result, so what is computed pair by pair is first a
    tensor of pairs.
    """
    sch = s_tir.Schedule(func)
    sch.transform_layout(
        sch.get_sblock(name), ("write", 0), lambda i, pair, part: [i, feature_of(rope, part, pair)]
    )
    return sch.mod["main"]


def rotated(rope: Rope, value: Pairs, angles: tuple[te.Tensor, te.Tensor]) -> Pairs:
    """Return the rotated elements as ``[rows, pairs, 2]``, in float32, by cosines and sines."""
    cos, sin = angles

    def element(i: tirx.Expr, j: tirx.Expr, p: tirx.Expr) -> tirx.Expr:
        row = i if rope.positions is None else i % cos.shape[0]
        column = _column(rope, p, j)
        own, other = value(p, i, j), value(1 - p, i, j)
        signed = te.if_then_else(p == 0, -other, other)
        sums = own * cos(row, column).astype(ACCUMULATE)
        sums = sums + signed * sin(row, column).astype(ACCUMULATE)
        return te.if_then_else(_turns(rope, j), sums, own)

    return element


def _column(rope: Rope, part: tirx.Expr, pair: tirx.Expr) -> tirx.Expr:
    """Return where the angle of a part of a pair is, anywhere for a pair that stays."""
    pairs = rope.width // 2
    if rope.head_dim % rope.width:
        pair = pair % (rope.head_dim // 2)
    if rope.by_pair:
        return pair % pairs
    if rope.pairing == "halves":
        return part * pairs + pair % pairs
    return pair % pairs * 2 + part


def _turns(rope: Rope, pair: tirx.Expr) -> tirx.Expr:
    """Tell whether a pair is rotated."""
    place = pair if rope.period is None else pair % (rope.period // 2)
    turns = place < rope.features // 2
    if rope.width < rope.head_dim:
        turns = tirx.And(turns, pair % (rope.head_dim // 2) < rope.width // 2)
    return turns


def rotated_projection(
    stages: Stages,
    which: tuple[NormMatmul, Projection, int],
    source: tuple[Size, te.Tensor],
    padding: Padding,
    stacked: WeightLayout | None,
) -> None:
    """Add one matmul whose heads are rotated: the features of a pair are two parts of a column."""
    (work, projection, index), (rows, data) = which, source
    rope, n = projection.rope, projection.columns
    assert rope is not None
    w = stages.weight(f"w{index}", projection.layout)

    def weight(p: tirx.Expr, j: tirx.Expr, *at: tirx.Expr) -> tirx.Expr:
        return w(feature_of(rope, p, j), *at)

    read: Reader = weight
    if stacked is not None:
        read = stack_parts(stacked, (2, n // 2, work.k), weight, f"w_parts{index}")
    acc = accumulate(data, read, (2, n // 2), f"acc{index}", padding)
    if projection.epilogue not in ((), ("bias",)):
        steps = ", ".join(map(str, projection.epilogue))
        raise LoweringError(f"a matmul is rotated after {steps}; only a bias can precede it")
    bias = stages[operand_name("bias", index, 0)] if projection.epilogue else None

    def value(p: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        total = acc(p, i, j)
        if bias is None:
            return total
        return total + bias(feature_of(rope, p, j)).astype(ACCUMULATE)

    give_rotated(stages, (rows, projection, index), value, work.out_dtype)


def give_rotated(
    stages: Stages, which: tuple[Size, Projection, int], value: Pairs, dtype: str
) -> None:
    """Add the result of a projection of some rows, whose pairs are rotated."""
    rows, projection, index = which
    assert projection.rope is not None
    element = rotated(projection.rope, value, (stages[f"cos{index}"], stages[f"sin{index}"]))
    shape, out = int64((rows, projection.columns // 2, 2)), f"out{index}"
    stages.give(out, te.compute(shape, lambda *at: element(*at).astype(dtype), out))
