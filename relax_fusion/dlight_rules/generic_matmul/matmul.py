"""Recognising a matmul in a PrimFunc that somebody else made, whatever is fused around it.

A matmul is one sum over one axis of a product of two factors.  Element-wise stages in front of it
(casts, dequantisation, a transposition) are part of a factor, those behind it are its epilogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm import ir, tirx

from ...errors import Decline, Reason
from ...matching.expressions import found_in, is_number, loads_of, substitute, variables_of
from ...matching.stages import Stage, read_stages
from ...tvm_ir import TensorLoad, structural_equal, structural_map
from ...workload import (
    DTYPE_BYTES,
    FLOAT_BYTES,
    INTEGER_DTYPES,
    DynamicDim,
    NormMatmul,
    Projection,
    WeightLayout,
)
from .layout import Extents, Vars, View, flat, matrix_in, product

FLOATS = tuple(d for d in FLOAT_BYTES if d != "float64")
"""Dtypes whose sums may be kept in float32."""


@dataclass(frozen=True)
class Factor:
    """One factor of the product."""

    value: tirx.Expr  # its element, by the variables of the matmul
    view: View | None  # where it lies, if it is an unchanged part of a parameter

    @property
    def dtype(self) -> str:
        """The dtype of an element."""
        return str(self.value.ty.dtype)


@dataclass(frozen=True)
class GenericMatmul:
    """``out[batch, i, j] = epilogue(sum_k x[batch, i, k] * w[batch, j, k])``."""

    batch: Vars
    rows: Vars
    columns: Vars
    """The variables of an element of the result, outermost first.  Those of the rows occur in x
    only, those of the columns in w only."""
    k: tirx.Var
    """The variable that is summed over."""
    extents: Extents
    """Of all of them."""
    x: Factor
    w: Factor
    """What is multiplied."""
    layout: WeightLayout
    """Of w."""
    total: tirx.Var
    """The buffer of the sums, which the epilogue loads."""
    epilogue: tirx.Expr
    """The element of the result, by the same variables."""
    out: View
    """Where the result lies."""

    def size(self, which: Vars) -> tirx.Expr:
        """Return the number of values that `which` take together, as an int64."""
        return product([self.extents[v] for v in which])

    def workload(self, allow_tf32: bool = False) -> NormMatmul | Decline:
        """Describe one matrix of the batch for the estimator."""
        rows, n, k = (self.size(v) for v in (self.rows, self.columns, (self.k,)))
        if not isinstance(n, tirx.IntImm) or not isinstance(k, tirx.IntImm):
            return Decline(Reason.SHAPE, f"n={n} and k={k} must be known when compiling")
        sizes = [int(d) for d in (rows, n, k) if isinstance(d, tirx.IntImm)]
        if min(sizes) < 1:
            return Decline(Reason.SHAPE, "an empty matmul needs no schedule")
        x, w, total, out = (
            *(self.x.dtype, self.w.dtype),
            *(str(buffer.ty.dtype) for buffer in (self.total, self.out.source)),
        )
        exact = x in INTEGER_DTYPES and total == "int32" and out in DTYPE_BYTES
        if x != w or not (exact or {x, total, out} <= set(FLOATS)):
            detail = f"x, w, their sums and the result are {x}, {w}, {total} and {out}"
            return Decline(Reason.DTYPE, detail)
        dim = int(rows) if isinstance(rows, tirx.IntImm) else DynamicDim(str(rows))
        projection = Projection(int(n), self.layout)
        tf32 = allow_tf32 and x == "float32"
        return NormMatmul(dim, int(k), (projection,), None, x, out, tf32)


def generic_matmul(func: tirx.PrimFunc) -> GenericMatmul | None:
    """Return the matmul that a PrimFunc computes, None if it computes something else."""
    stages = read_stages(func)
    sums = [s for s in stages or () if s.reduced]
    if not stages or len(sums) != 1 or len(sums[0].reduced) != 1:
        return None
    total, last = sums[0], stages[-1]
    steps = {s.buffer: s for s in stages if not s.reduced and s is not last}
    factors = _factors(total, steps)
    params = {p for p in func.params if tirx.is_buffer_var(p)}
    if factors is None or last.buffer not in params:
        return None
    if any(s.buffer in params for s in stages[:-1]):  # a second result
        return None
    epilogue = _epilogue(total, last, steps)
    if epilogue is None:
        return None
    value, order = epilogue
    if last is not total and last.buffer in variables_of(value):
        return None
    return _assembled(total, (last.buffer, order), value, factors)


def _factors(total: Stage, before: Mapping[tirx.Var, Stage]) -> tuple[tirx.Expr, tirx.Expr] | None:
    """Return what a sum of products multiplies."""
    value, start = total.value, total.init
    zero = isinstance(start, tirx.FloatImm | tirx.IntImm) and float(start.value) == 0.0
    if not zero or not isinstance(value, tirx.Add) or not _is_total(value.a, total):
        return None
    added = _narrow(value.b)
    if not isinstance(added, tirx.Mul) or str(added.ty.dtype) in INTEGER_DTYPES:  # which overflow
        return None
    a, b = inlined(added.a, before), inlined(added.b, before)
    if a is None or b is None:
        return None
    narrow = _narrow(a), _narrow(b)
    return narrow if len({str(factor.ty.dtype) for factor in narrow}) == 1 else (a, b)


def _is_total(value: tirx.Expr, total: Stage) -> bool:
    is_load = isinstance(value, TensorLoad) and value.source.same_as(total.buffer)
    return is_load and tuple(value.indices) == total.spatial


def _narrow(value: tirx.Expr) -> tirx.Expr:
    """Return a value before it is made wider: sums are float32 anyway, those of integers int32."""
    while isinstance(value, tirx.Cast):
        inner, outer = str(value.value.ty.dtype), str(value.ty.dtype)
        floats = inner in FLOATS and outer in FLOATS and FLOAT_BYTES[inner] < FLOAT_BYTES[outer]
        if not floats and not (inner in INTEGER_DTYPES and outer == "int32"):
            break
        value = value.value
    return value


def _epilogue(
    total: Stage, last: Stage, before: Mapping[tirx.Var, Stage]
) -> tuple[tirx.Expr, Vars] | None:
    """Return the result's element by the variables of the sum, and those by dimension."""
    if last is total:
        return total.buffer[total.spatial], total.spatial
    value = inlined(last.value, before)
    loads = [] if value is None else [v for v in loads_of(value) if v.source == total.buffer]
    if value is None or not loads:
        return None
    names: dict[tirx.Var, tirx.Expr] = {}
    for var, index in zip(total.spatial, loads[0].indices, strict=True):
        if isinstance(index, tirx.IntImm):
            if int(index) or not is_number(total.extents[var], 1):
                return None
        elif index not in last.spatial or index in names:
            return None
        elif not structural_equal(last.extents[index], total.extents[var]):
            return None  # a part of the sums
        else:
            names[index] = var
    if any(not structural_equal(load.indices, loads[0].indices) for load in loads):
        return None
    for var in last.spatial:
        if var not in names and not is_number(last.extents[var], 1):
            return None
    order = tuple(names[v] for v in last.spatial if v in names)
    zero = tirx.IntImm("int64", 0)
    return substitute(value, {v: names.get(v, zero) for v in last.spatial}), order


def _assembled(
    total: Stage,
    result: tuple[tirx.Var, Vars],
    epilogue: tirx.Expr,
    factors: tuple[tirx.Expr, tirx.Expr],
) -> GenericMatmul | None:
    """Tell batch, rows and columns apart by where they occur."""
    out, order = result
    (k,) = total.reduced
    axes = {*total.spatial, k}
    used = [variables_of(f) & axes for f in factors]
    if not all(k in u for u in used) or any(out in variables_of(f) for f in factors):
        return None
    order = tuple(v for v in order if v in used[0] | used[1] or not is_number(total.extents[v], 1))
    if not order or any(v not in used[0] | used[1] for v in order):
        return None
    right = 1 if order[-1] in used[1] else 0
    x, w = factors[1 - right], factors[right]
    own = used[1 - right] - used[right], used[right] - used[1 - right]
    fixed = {v for v in own[1] if isinstance(total.extents[v], tirx.IntImm)}
    unit = {v: tirx.IntImm("int64", 0) for v in total.spatial if v not in order}
    several = _suffix(order, fixed)
    for columns in (several, several[-1:] or order[-1:]):
        if not set(columns) <= own[1]:
            return None
        rows = _suffix(order[: -len(columns)], own[0]) if columns else ()
        form = GenericMatmul(
            order[: len(order) - len(columns) - len(rows)],
            rows,
            columns,
            k,
            total.extents,
            Factor(substitute(x, unit), None),
            Factor(substitute(w, unit), None),
            "nk",
            total.buffer,
            epilogue,
            View(out, tirx.IntImm("int64", 0), tirx.IntImm("int64", 1)),
        )
        if columns and (len(columns) == 1 or _placed(form).w.view is not None):
            return _placed(form)
    return None


def _suffix(order: Vars, members: set[tirx.Var]) -> Vars:
    """Return the longest end of `order` that consists of `members`."""
    start = len(order)
    while start and order[start - 1] in members:
        start -= 1
    return order[start:]


def _placed(form: GenericMatmul) -> GenericMatmul:
    """Find where factors and result lie."""
    k = (form.k,)
    x = replace(form.x, view=matrix_in(form.x.value, form.rows, k, form.extents))
    as_nk = matrix_in(form.w.value, form.columns, k, form.extents)
    as_kn = matrix_in(form.w.value, k, form.columns, form.extents)
    layout: WeightLayout = "nk" if as_nk is not None or _runs_along(form.w.value, form.k) else "kn"
    layout = "kn" if as_nk is None and as_kn is not None else layout
    w = replace(form.w, view=as_nk if layout == "nk" else as_kn)
    n, rows = form.size(form.columns), form.size(form.rows)
    offset = flat([(v, form.extents[v]) for v in form.batch]) * rows * n
    return replace(form, x=x, w=w, layout=layout, out=View(form.out.source, offset, n))


def _runs_along(value: tirx.Expr, k: tirx.Var) -> bool:
    """Tell whether the largest tensor of a factor is contiguous along k."""
    loads = [load for load in loads_of(value) if load.indices]
    if not loads:
        return True
    return k in variables_of(max(loads, key=lambda load: len(load.indices)).indices[-1])


MOST_CODE = 512
"""The code of a formula, in which the stages before it are put in their places, may read arguments
this often; compiling more takes seconds."""

TANH_CODE = 8
"""The code of tanh, a polynomial over another, reads its argument this often."""


def inlined(value: tirx.Expr, before: Mapping[tirx.Var, Stage]) -> tirx.Expr | None:
    """Put the formulas of element-wise stages in the place of loads of the buffers that they write.

    rewrite: ``b[i] + 1`` with ``b[i] = a[i] * 2`` -> ``a[i] * 2 + 1``

    None if the code would read its arguments more than `MOST_CODE` times: each use of a stage
    repeats what the stage computes.
    """
    code: dict[tirx.Var, int] = {}
    for buffer, stage in before.items():
        code[buffer] = _code(stage.value, code)
    if _code(value, code) > MOST_CODE:
        return None

    def formula(load: TensorLoad) -> tirx.Expr:
        stage = before.get(load.source)
        if stage is None:
            return load
        return substitute(stage.value, dict(zip(stage.spatial, load.indices, strict=True)))

    while any(load.source in before for load in loads_of(value)):
        value = structural_map(value, (TensorLoad, formula))
    return value


def _code(value: tirx.Expr, code: Mapping[tirx.Var, int]) -> int:
    """Return how often the code of a formula reads; `code` says it of the buffers before."""
    reads = sum(code.get(load.source, 1) for load in loads_of(value))
    names = (getattr(call.op, "name", "") for call in found_in(value, ir.Call))
    return reads * TANH_CODE ** sum(name == "tirx.tanh" for name in names)
