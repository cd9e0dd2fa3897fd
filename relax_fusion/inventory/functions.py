"""Matmuls in functions of TIR, such as those of mixtures of experts: their sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tvm import ir, relax, tirx

from ..matching.expressions import found_in, loads_of, substitute
from ..matching.pattern import PrimExpr
from ..matching.shapes import product
from ..matching.stages import Stage, read_stages
from ..report.item import Array, Item, Product
from ..tvm_ir import Analyzer, TensorLoad
from .operators import arrays_of, extent

_ANALYZER = Analyzer()


def function_item(
    function: str, var: relax.Var, call: relax.Call, func: tirx.PrimFunc
) -> Item | None:
    """Return what the call of a PrimFunc multiplies; None where it sums no products.

    Sizes are those of its loops, where these can be read, or else of its tensors.
    """
    count = sum(1 for _ in _sums_of_products(func))
    if not count:
        return None
    args = _arguments(call)
    bound = _bound(func, args)
    outs = _results(call.ty_args)
    tensors = [a for a in args if isinstance(a.ty, relax.TensorType)]
    products, note = _by_loops(func, bound), ""
    if not products:
        products, note = _by_tensors(count, [e.ty for e in tensors], outs)
    arrays = arrays_of(*args, var)
    storage = _storage(arrays)
    return Item(
        function,
        "matmul",
        call.args[0].name_hint.rstrip("0123456789").rstrip("_"),
        "left",
        str(outs[0].dtype) if outs else "",
        storage=storage,
        products=products,
        arrays=arrays,
        where=var.name,
        note=note,
    )


def _arguments(call: relax.Call) -> list[relax.Expr]:
    given = call.args[1]
    return list(given.fields) if isinstance(given, relax.Tuple) else [given]


def _results(types: Sequence[ir.Type]) -> list[relax.TensorType]:
    found: list[relax.TensorType] = []
    for ty in types:
        if isinstance(ty, relax.TupleType):
            found += _results(ty.fields)
        elif isinstance(ty, relax.TensorType):
            found.append(ty)
    return found


def _shape(ty: ir.Type) -> list[PrimExpr] | None:
    known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    return list(ty.shape.values) if known else None


def _storage(arrays: Sequence[Array]) -> str:
    """Say of which types the inputs are that have the most elements."""
    static = [a for a in arrays[:-1] if all(isinstance(s, int) for s in a.shape)]
    wide = max(static, key=lambda a: math.prod(int(s) for s in a.shape), default=None)
    return wide.dtype if wide is not None else ""


def _sums_of_products(func: tirx.PrimFunc) -> Iterator[tirx.BufferStore]:
    """Yield the statements that add a product of elements of two tensors to an element."""
    for store in found_in(func.body, tirx.BufferStore):
        value = store.value
        if not isinstance(value, tirx.Add):
            continue
        own = [a for a in (value.a, value.b) if _is_load_of(a, store.buffer)]
        rest = [a for a in (value.a, value.b) if not _is_load_of(a, store.buffer)]
        if len(own) == len(rest) == 1 and any(map(_multiplies, found_in(rest[0], tirx.Mul))):
            yield store


def _is_load_of(value: tirx.Expr, buffer: tirx.Var) -> bool:
    return isinstance(value, TensorLoad) and value.source.same_as(buffer)


def _multiplies(value: tirx.Mul) -> bool:
    """Tell whether both factors are elements of tensors, and not the same, as of a square."""
    first, second = ({str(load) for load in loads_of(part)} for part in (value.a, value.b))
    return bool(first) and bool(second) and first != second


def _bound(func: tirx.PrimFunc, args: Sequence[relax.Expr]) -> dict[tirx.Var, PrimExpr]:
    """Return what the symbolic sizes of a PrimFunc are where it is called."""
    found: dict[tirx.Var, PrimExpr] = {}
    for param, arg in zip(func.params, args, strict=False):
        shape = _shape(arg.ty)
        if tirx.is_buffer_var(param) and shape is not None:
            for mine, theirs in zip(param.ty.shape, shape, strict=False):
                if isinstance(mine, tirx.Var):
                    found.setdefault(mine, theirs)
    return found


def _by_loops(func: tirx.PrimFunc, bound: Mapping[tirx.Var, PrimExpr]) -> tuple[Product, ...]:
    """Return the products of a PrimFunc whose loops can be read."""
    stages = read_stages(func)
    found = []
    for stage in stages or ():
        if stage.reduced and (factors := _factors(stage)) is not None:
            found.append(_product(stage, factors, bound))
    return tuple(found)


def _factors(stage: Stage) -> tuple[tirx.Expr, tirx.Expr] | None:
    """Return the two factors of the products that a stage adds."""
    products = [m for m in found_in(stage.value, tirx.Mul) if _multiplies(m)]
    return (products[-1].a, products[-1].b) if products else None


def _product(
    stage: Stage, factors: tuple[tirx.Expr, tirx.Expr], bound: Mapping[tirx.Var, PrimExpr]
) -> Product:
    first, second = (
        {v for load in loads_of(factor) for v in found_in(list(load.indices), ir.Var)}
        for factor in factors
    )

    def size(variables: Sequence[tirx.Var]) -> int | str:
        sizes = [substitute(stage.extents[v], bound) for v in variables]
        return extent(product(sizes))

    rows = [v for v in stage.spatial if v in first and v not in second]
    columns = [v for v in stage.spatial if v in second and v not in first]
    batch = [v for v in stage.spatial if v not in rows and v not in columns]
    return Product(size(rows), size(columns), size(stage.reduced), size(batch))


def _by_tensors(
    count: int, inputs: Sequence[ir.Type], outs: Sequence[relax.TensorType]
) -> tuple[tuple[Product, ...], str]:
    """Take the result for rows by columns, and the first input for rows by features.

    So are the matmuls of a mixture of experts, where each row meets one of several matrices.
    """
    x, out = (_shape(types[0]) if types else None for types in (inputs, outs))
    if count > 1:
        return (), f"it has {count} sums of products, whose sizes are not known"
    if x is None or out is None or len(out) < 2:
        return (), "its sizes are not known"
    matrices = [s for s in map(_shape, inputs[1:]) if s is not None and len(s) == 3]
    note = "rows, columns and features by its tensors"
    if matrices:
        note += f"; each row by one of {extent(matrices[0][0])} matrices, all of which are counted"
        note += " as read"
    return (Product(extent(product(out[:-1])), extent(out[-1]), extent(x[-1])),), note
