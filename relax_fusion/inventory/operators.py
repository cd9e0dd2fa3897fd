"""The sizes of what was left: matmuls, convolutions and attentions, as operators or as TIR."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from tvm import ir, relax, tirx

from ..matching.expressions import found_in, loads_of, substitute
from ..matching.operations import KINDS
from ..matching.pattern import PrimExpr, is_call
from ..matching.shapes import dtype_of, product, shape_of
from ..matching.stages import Stage, read_stages
from ..report.item import Array, Item, Kind, Product
from ..report.sizes import Extent
from ..tvm_ir import Analyzer, TensorLoad

_MULTIPLYING: tuple[Kind, ...] = ("matmul", "attention", "convolution")

COUNTED: dict[str, Kind] = {
    name: kind for kind in _MULTIPLYING for name, known in KINDS.items() if known == kind
}
"""Operators that multiply matrices, and what they are called."""

Shape = Sequence[PrimExpr]

_TYPED = re.compile(r"T\.int(?:32|64)\((-?\d+)\)")
"""TVM prints a number beside a symbolic size like this."""


def extent(size: PrimExpr | int) -> Extent:
    """Return a size as a number, or as text."""
    if isinstance(size, int | tirx.IntImm):
        return int(size)
    return _TYPED.sub(r"\1", str(size))


def tensors_of(exprs: Sequence[relax.Expr]) -> list[relax.Expr]:
    """Return the tensors among expressions, and those that tuples are written of."""
    found: list[relax.Expr] = []
    for expr in exprs:
        if isinstance(expr, relax.Tuple):
            found += tensors_of(list(expr.fields))
        elif isinstance(expr.ty, relax.TensorType):
            found.append(expr)
    return found


def arrays_of(*exprs: relax.Expr) -> tuple[Array, ...]:
    """Return the tensors among expressions and in tuples, each once, though it is read twice.

    None are returned where the shape of one is not known, so that no sum is too small.
    """
    found: dict[relax.Expr, tuple[Array | None, ...]] = {}
    for expr in exprs:
        if isinstance(expr, relax.Tuple):
            found |= {field: _arrays_in(field.ty) for field in tensors_of([expr])}
        else:
            found[expr] = _arrays_in(expr.ty)
    arrays = [array for each in found.values() for array in each]
    known = tuple(array for array in arrays if array is not None)
    return known if len(known) == len(arrays) else ()


def _arrays_in(ty: ir.Type) -> tuple[Array | None, ...]:
    """Return the tensors of a type, None for one of unknown shape."""
    if isinstance(ty, ir.TupleType):
        return tuple(array for each in ty.fields for array in _arrays_in(each))
    if not isinstance(ty, relax.TensorType):
        return ()
    if not isinstance(ty.shape, relax.ShapeExpr):
        return (None,)
    return (Array(tuple(map(extent, ty.shape.values)), str(ty.dtype)),)


def operator_item(function: str, var: relax.Var, call: relax.Call) -> Item:
    """Return what an operator multiplies; one of unknown sizes has no products."""
    name = str(call.op.name)
    tensors = tensors_of(list(call.args))
    shapes = [shape_of(expr) for expr in (*tensors, var)]
    known = [shape for shape in shapes if shape is not None]
    products: tuple[Product, ...] = ()
    if len(known) == len(shapes):
        products = _products(call, known[:-1], known[-1])
    kind = COUNTED[name]
    return Item(
        function,
        kind,
        name.removeprefix("relax."),
        "left",
        dtype_of(tensors[0]) if tensors else "",
        storage=dtype_of(tensors[1]) if kind != "attention" and len(tensors) > 1 else "",
        products=products,
        arrays=arrays_of(*tensors, var),
        where=var.name,
        note="" if products else "its operations are not known",
    )


def _products(call: relax.Call, shapes: Sequence[Shape], out: Shape) -> tuple[Product, ...]:
    if is_call(call, "relax.matmul", "relax.linear") and len(shapes) >= 2:
        return (_matmul(shapes[0], shapes[1], out, transposed=is_call(call, "relax.linear")),)
    if is_call(call, "relax.einsum"):
        return _einsum(str(call.attrs.subscripts), shapes)
    if COUNTED[call.op.name] == "convolution" and len(shapes) >= 2:
        return _convolution(call, shapes, out)
    if is_call(call, "relax.nn.attention", "relax.nn.attention_bias") and len(shapes) >= 3:
        return _attention(*shapes[:3])
    return ()


def _matmul(left: Shape, right: Shape, out: Shape, *, transposed: bool) -> Product:
    """Return the product of tensors, whose leading dimensions broadcast; vectors have one row."""
    k = left[-1]
    if len(right) == 1:
        return Product(extent(product(left[:-1])), 1, extent(k))
    n = right[-2] if transposed else right[-1]
    if len(right) == 2:
        return Product(extent(product(left[:-1])), extent(n), extent(k))
    m = [left[-2]] if len(left) > 1 else []
    batch = out[: len(out) - 1 - len(m)]
    return Product(extent(product(m)), extent(n), extent(k), extent(product(batch)))


def _einsum(subscripts: str, shapes: Sequence[Shape]) -> tuple[Product, ...]:
    """Return the product of two tensors by their letters."""
    found = re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)(?:->([a-zA-Z]*))?", subscripts.replace(" ", ""))
    if found is None or len(shapes) < 2:
        return ()
    first, second, out = found.groups()
    if out is None:  # the letters that stand once
        out = "".join(x for x in first + second if (first + second).count(x) == 1)
    size = dict(zip(first + second, [*shapes[0], *shapes[1]], strict=False))

    def sizes(letters: Sequence[str]) -> Extent:
        return extent(product([size[x] for x in letters]))

    k = list(dict.fromkeys(x for x in first + second if x not in out))
    return (Product.of(out, k, (first, second), sizes),)


def _convolution(call: relax.Call, shapes: Sequence[Shape], out: Shape) -> tuple[Product, ...]:
    """Return a convolution as the matmul of its patches, one for each group."""
    layout, weights = str(call.attrs.data_layout), str(call.attrs.kernel_layout)
    groups = int(call.attrs.groups)
    by_letter = dict(zip(weights, shapes[1], strict=False))
    if set(weights) - {"O", "I", "D", "H", "W"} or len(by_letter) != len(shapes[1]):
        return ()
    transposed = str(call.op.name).endswith("_transpose")
    window = [size for letter, size in by_letter.items() if letter not in "OI"]
    places = shapes[0] if transposed else out
    m = product([s for letter, s in zip(layout, places, strict=False) if letter != "C"])
    if transposed:  # each input element is multiplied by the window of every output channel
        columns, depth = product([by_letter["O"], *window]), by_letter["I"] // groups
    else:
        columns, depth = by_letter["O"] // groups, product([by_letter["I"], *window])
    return (Product(extent(m), extent(columns), extent(depth), groups),)


def _attention(q: Shape, k: Shape, v: Shape) -> tuple[Product, ...]:
    """Return the scores and the values of ``[batch, positions, heads, features]``."""
    batch = extent(product([q[0], q[2]]))
    rows, keys = extent(q[1]), extent(k[1])
    scores = Product(rows, keys, extent(q[3]), batch)
    return (scores, Product(rows, extent(v[3]), keys, batch))


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
    args = arguments_of(call)
    bound = _bound(func, args)
    outs = results_of(call.ty_args)
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


def arguments_of(call: relax.Call) -> list[relax.Expr]:
    """Return what the PrimFunc of a call is given."""
    given = call.args[1]
    return list(given.fields) if isinstance(given, relax.Tuple) else [given]


def results_of(types: Sequence[ir.Type]) -> list[relax.TensorType]:
    """Return the tensors of types, in order."""
    found: list[relax.TensorType] = []
    for ty in types:
        if isinstance(ty, relax.TupleType):
            found += results_of(ty.fields)
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

    return Product.of(stage.spatial, stage.reduced, (first, second), size)


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
