"""The TIR of the contraction family: norm -> matmul(s) -> epilogue, and the gated pair of matmuls.

The PrimFunc made here says what is computed, stage by stage, and nothing of how: the dlight rule
schedules it by the plan in its attribute.  Stages, by the names of their blocks:

``first_square_sum``  sum of x^2 over k                     [rows], float32 (optional: of a norm
                in front of the residual)
``x_sum``       x, or its norm, + residual                  [rows, k], dtype (optional)
``x_pad``       the same with zero rows at the end          [rows', k], dtype (edges "zero")
``mean_sum``    sum of x over k (LayerNorm)                 [rows], float32
``square_sum``  sum of x^2, or of (x - mean)^2              [rows], float32
``x_norm``      the normalised rows                         [rows, k], float32 (edges "none": dtype)
``w_parts{i}``  gate and up of a gated pair, or the first and second features of rotated pairs,
                stacked                                     [2, n, k], dtype (edges "zero")
``x_bits``      what they are as bfloat16                   [rows, k], uint16 (dots)
``x_row_sum``, ``x_added``  sums of rows, and what they add to products where the signs of
                columns are flipped                         [rows], int32 (dots)
``x_tiles``     the rows in tiles                           [tiles, k, reg_m], float32 (panels);
                or words of c neighbours                    [tiles, k / c, reg_m], uint32 (dots)
``w_panels{i}`` the weight in panels of columns             [panels, k, parts, reg_n], float32, or
                its words, as ``x_tiles``
                (of packed weights: see :mod:`relax_fusion.compute.accumulation`)
``acc{i}``      the i-th matmul                             [parts, rows', n'], float32 (int32 of
                                                            integers)
``raw{i}``      its epilogue, where heads are normalised    [rows, n], float32
                behind it
``head_sum{i}``, ``head_scale{i}``  their statistics        [rows, heads], float32
``out{i}``      its epilogue                                [rows, n], out_dtype

``rows'`` and ``n'`` are rows and n rounded up to the tiles of the plan, which keeps predicates out
of the inner loops; the extra elements are never stored.  With edges "clamp" (CPU) they repeat the
last element, which costs nothing but an address; with "zero" (GPU) the padded rows are zeros, so
that a tile in shared memory has a constant size whatever the number of rows.  With "none" (tensor
cores) nothing is rounded up: their copies to shared memory fill in the zeros, and take operands of
the dtype, so the normalised rows are rounded to it.  ``parts`` is 2 where
a gate and an up projection are accumulated together, or the two features of a rotated pair (then
n is half of the features); else 1.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float
from dataclasses import replace

from tvm import te, tirx

from ..estimator.families.cpu_dots import ROUNDED
from ..estimator.families.matmuls import SCALAR_FAMILIES
from ..estimator.families.words import word_vectors
from ..estimator.tile_plan import TilePlan
from ..workload import GatedFFN, Norm, NormMatmul, Packed, PostNorm, Projection, WeightLayout
from .accumulation import accumulate, tiles_of, x_words
from .activations import ACCUMULATE, activate
from .dot_words import added_by_rows, bits_of
from .heads import normalised_heads
from .rope import in_order, rotated_projection
from .rounded_rows import rounded_rows
from .stages import (
    Edges,
    Padding,
    Reader,
    Size,
    Stages,
    as_stored,
    clamped,
    int64,
    round_up,
    stack_parts,
    stepped,
)


def contraction_prim_func(
    work: NormMatmul | GatedFFN, plan: TilePlan, gpu: bool, *, laid: bool = False
) -> tirx.PrimFunc:
    """Return the unscheduled PrimFunc of a workload, with the operands of its graph.

    It is shaped by the plan that will schedule it.  The edges of tiles are filled differently for a
    GPU (see above).  `laid`: in the place of weights, their panels are operands, the last inputs.
    """
    edges: Edges = "clamp" if not gpu else "zero" if plan.family in SCALAR_FAMILIES else "none"
    stages = Stages(work.graph, None if gpu else ACCUMULATE)
    x = stages["x"]
    rows = x.shape[0]
    padding = Padding.of(plan, edges, work.dtype, word_vectors(work, plan.lanes))
    padding = replace(padding, laid=stages.laid) if laid else padding
    if work.norm and work.norm.residual:
        x = _sum(stages, x, work.norm, edges)
    if edges == "zero":
        x = _zero_rows(x, padding.rows)
    data = x
    if work.norm is not None and work.norm.kind != "none":
        data = _normalise(stages, x, work.norm, rows, edges)
    if edges == "zero":  # the padding is in x already
        padding = Padding(1, 1)
    if padding.panels:
        if plan.family == ROUNDED and padding.words is not None:
            data, rounded = rounded_rows(data, padding.words.form.group)
            padding = replace(padding, rounded=rounded)
        elif padding.dot is not None:
            padding = replace(padding, added=added_by_rows(data, padding.dot))
            data = bits_of(data) if data.dtype == ACCUMULATE else data
        data = tiles_of(data, padding)
    elif padding.words is not None:
        data = x_words(data, padding.words, padding.rows)
    if isinstance(work, GatedFFN):
        stacked = _stacked(work.layout, work.packed, edges, separate=True)
        _gated(stages, work, (rows, data), padding, stacked)
    else:
        for index, projection in enumerate(work.outputs):
            which = work, projection, index
            separate = projection.pairs is not None or not isinstance(projection.n, int)
            stacked = _stacked(projection.layout, projection.packed, edges, separate)
            own = _padding(projection, padding, plan, edges)
            _projection(stages, which, (rows, data), own, stacked)
    func = stages.func()
    for index, projection in enumerate(work.outputs if isinstance(work, NormMatmul) else ()):
        if projection.rope is not None:
            func = in_order(func, f"out{index}", projection.rope)
    return func


def _stacked(
    layout: WeightLayout, packed: Packed | None, edges: Edges, separate: bool
) -> WeightLayout | None:
    """Return in which layout a weight is a stage of its own; None if it is read as it lies.

    Tensor cores read what is unpacked along k.  `separate` tells that a tile in shared memory is no
    box of the weight: it has two parts, or columns beyond the last, whose number is not known.
    """
    if packed is not None and edges != "clamp":
        return "nk" if edges == "none" else layout
    return layout if edges == "zero" and separate else None


def _padding(projection: Projection, padding: Padding, plan: TilePlan, edges: Edges) -> Padding:
    """Return how far the rows and columns of a projection are rounded up.

    With edges "zero" rows are already.  Tiles are of constant size where columns divide, or are a
    number.
    """
    if edges == "zero":
        return Padding(1, 1 if isinstance(projection.n, int) else plan.block_n)
    # Columns are vectorised there, and a clamped column would be a gather.
    if projection.layout == "kn" and not padding.panels:
        return Padding(padding.rows, 1)
    return padding


def _sum(stages: Stages, x: te.Tensor, norm: Norm, edges: Edges) -> te.Tensor:
    """Add the residual in front of a norm, rounded to the dtype as the unfused addition is."""
    residual = stages["residual"]
    first = None if norm.first is None else _first(x, stages["gamma_first"], norm.first)

    def added(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        if first is None and (x.dtype != "bfloat16" or edges != "clamp"):
            return x(i, j) + residual(i, j)
        wide = x(i, j).astype(ACCUMULATE) if first is None else first(i, j)
        wide = wide + residual(i, j).astype(ACCUMULATE)
        return (as_stored(wide, x.dtype) if edges == "clamp" else wide).astype(x.dtype)

    total = te.compute(x.shape, added, "x_sum")
    stages.give("x_sum", total)
    return total


def _first(x: te.Tensor, gamma: te.Tensor, norm: PostNorm) -> Reader:
    """Return what an element of x is behind a norm, in float32."""
    rows, k = x.shape
    r = te.reduce_axis((0, k), "r0")

    def wide(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        return x(i, j).astype(ACCUMULATE)

    square = te.compute(
        (rows,), lambda i: te.sum(wide(i, r) * wide(i, r), axis=r), "first_square_sum"
    )
    count = tirx.const(float(int(k)), ACCUMULATE)
    eps = tirx.const(c_float(norm.eps).value, ACCUMULATE)
    offset = tirx.const(float(norm.unit_offset), ACCUMULATE)

    def normalised(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        factor = gamma(j).astype(ACCUMULATE)
        factor = factor + offset if norm.unit_offset else factor
        return wide(i, j) * te.rsqrt(square(i) / count + eps) * factor

    return normalised


def _zero_rows(x: te.Tensor, multiple: int) -> te.Tensor:
    """Append rows of zeros up to a multiple."""
    rows, k = x.shape
    zero = tirx.const(0.0, x.dtype)
    return te.compute(
        int64((round_up(rows, multiple), k)),
        lambda i, j: te.if_then_else(i < rows, x(i, j), zero),
        "x_pad",
    )


def _normalise(stages: Stages, x: te.Tensor, norm: Norm, rows: Size, edges: Edges) -> te.Tensor:
    """Add the statistics and the normalised rows; `rows` of them are real."""
    dtype = x.dtype
    padded, k = x.shape
    gamma = stages["gamma"]
    beta = stages["beta"] if norm.beta else None
    offset = tirx.const(1.0, ACCUMULATE)
    count = tirx.const(float(int(k)), ACCUMULATE)
    eps = tirx.const(c_float(norm.eps).value, ACCUMULATE)  # no compiler rounds what is beyond range
    total = None
    if norm.kind == "layer":
        r = te.reduce_axis((0, k), "r")
        total = te.compute(
            (padded,), lambda i: te.sum(x(i, r).astype(ACCUMULATE), axis=r), "mean_sum"
        )

    def centred(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        wide = x(i, j).astype(ACCUMULATE)
        return wide if total is None else wide - total(i) / count

    r2 = te.reduce_axis((0, k), "r2")
    square = te.compute(
        (padded,), lambda i: te.sum(centred(i, r2) * centred(i, r2), axis=r2), "square_sum"
    )

    def normalised(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        at = (i // norm.each, j) if norm.each else (j,)
        factor = gamma(*at).astype(ACCUMULATE)
        factor = factor + offset if norm.unit_offset else factor
        value = centred(i, j) * te.rsqrt(square(i) / count + eps) * factor
        value = value + beta(*at).astype(ACCUMULATE) if beta is not None else value
        return value.astype(dtype) if edges == "none" else value

    result = te.compute((padded, k), normalised, "x_norm")
    if norm.returns_norm and edges == "none":
        stages.give("x_norm", result)
    elif norm.returns_norm:
        shape = int64((rows, k))
        out = te.compute(shape, lambda i, j: result(i, j).astype(dtype), "norm_out")
        stages.give("x_norm", out)
    return result


def _projection(
    stages: Stages,
    which: tuple[NormMatmul, Projection, int],
    source: tuple[Size, te.Tensor],
    padding: Padding,
    stacked: WeightLayout | None,
) -> None:
    """Add one matmul and its epilogue."""
    work, projection, index = which
    rows, data = source
    n, layout = stages.size(f"out{index}", -1), projection.layout
    if projection.pairs is not None:
        rotated_projection(stages, which, source, padding, stacked)
        return
    w = stages.weight(f"w{index}", layout)

    def weight(p: tirx.Expr, j: tirx.Expr, *at: tirx.Expr) -> tirx.Expr:
        return w(j, *at)

    read: Reader = weight
    wide = n
    if stacked is not None:  # also beyond the last column, so that tiles of it are of one size
        beyond, wide = padding.columns, round_up(n, padding.columns)

        def inside(p: tirx.Expr, j: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
            return w(clamped(j, n, beyond), r)

        read = stack_parts(stacked, (1, wide, work.k), inside, f"w_parts{index}")
        padding = Padding(padding.rows, 1)
    acc = accumulate(data, read, (1, wide), f"acc{index}", padding)

    def total(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        sums = acc(tirx.IntImm("int64", 0), i, j)
        return sums.astype(ACCUMULATE) if projection.epilogue else sums  # of integers, int32

    value = stepped(stages, index, projection.epilogue, total)
    if projection.head_norm is not None:
        raw = te.compute(int64((rows, n)), lambda i, j: value(i, j), f"raw{index}")
        normalised_heads(stages, which, raw)
        return
    out = te.compute(
        int64((rows, n)), lambda i, j: value(i, j).astype(work.out_dtype), f"out{index}"
    )
    stages.give(f"out{index}", out)


def _gated(
    stages: Stages,
    work: GatedFFN,
    source: tuple[Size, te.Tensor],
    padding: Padding,
    stacked: WeightLayout | None,
) -> None:
    """Add gate and up as one accumulation of two parts, and their product."""
    rows, data = source
    n = work.n
    gate_part = 0 if work.gate_first else 1
    weight, bias = _gated_weights(stages, work)
    if stacked is not None:
        weight = stack_parts(stacked, (2, n, work.k), weight, "w_parts0")
    if work.layout == "kn" and not padding.panels:
        padding = Padding(padding.rows, 1)
    acc = accumulate(data, weight, (2, n), "acc0", padding)

    def part(p: int, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        total = acc(tirx.IntImm("int64", p), i, j)
        return total + bias(p, j).astype(ACCUMULATE) if bias else total

    def gated(i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        product = activate(work.activation, part(gate_part, i, j)) * part(1 - gate_part, i, j)
        return product.astype(work.out_dtype)

    stages.give("out0", te.compute(int64((rows, n)), gated, "out0"))


def _gated_weights(
    stages: Stages, work: GatedFFN
) -> tuple[Reader, Callable[[int, tirx.Expr], tirx.Expr] | None]:
    """Return readers of both halves of the weight and the bias: merged, or gate then up."""
    n = work.n
    if work.merged:
        w = stages.weight("w0", work.layout)
        b = stages["bias0"] if work.bias else None
        bias = (lambda p, j: b(p * n + j)) if b is not None else None
        return lambda p, j, *at: w(p * n + j, *at), bias
    first, second = (stages.weight(name, work.layout) for name in ("w0", "w1"))
    biases = [stages["bias0"], stages["bias1"]] if work.bias else []
    bias = (lambda p, j: biases[p](j)) if biases else None
    return lambda p, j, *at: te.if_then_else(p == 0, first(j, *at), second(j, *at)), bias
