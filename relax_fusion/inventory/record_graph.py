"""RecordGraph: what each function runs, binding by binding, for a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import prod

import tvm
from tvm import ir, relax, tirx

from ..matching.expressions import found_in, is_if_then_else, loads_of, substitute
from ..matching.pattern import is_call
from ..report.material import FunctionGraph, Node
from ..transforms.modules import bindings_of, functions_of, module_pass
from ..tvm_ir import Analyzer, TensorLoad
from .operators import COUNTED, operator_item

KERNELS = ("relax.call_tir", "relax.call_tir_inplace")
OUTSIDE = ("relax.call_dps_packed", "relax.call_pure_packed", "relax.call_inplace_packed")

SYMBOLIC_SIZE = 64
"""Bytes are counted for this value of a symbolic size, if its bounds allow it."""

PARTIAL = ("take", "strided_slice", "slice", "dynamic_strided_slice", "gather_nd")
"""Operators that read of their operands only as much as they write.  A kernel of several operators,
one of them such, reads no more of any operand."""

Sizes = Mapping[tirx.Var, int]


@module_pass
class RecordGraph:
    """Record the bindings of every Relax function in `graphs`; the module stays as it is.

    Behind `RewriteReshapes`, which tells views from copies, they are what the functions launch.
    """

    graphs: list[FunctionGraph]
    bounds: Mapping[str, int] = field(default_factory=dict)

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        for gvar, func in functions_of(mod, relax.Function).items():
            if (func.attrs or {}).get("Primitive"):
                continue
            sizes = sizes_of_symbols(func, self.bounds)
            symbols = tuple((var.name, value) for var, value in sizes.items())
            nodes = tuple(_nodes(mod, func, sizes))
            limits = tuple(limits_of(func, self.bounds).items())
            self.graphs.append(FunctionGraph(gvar.name_hint, nodes, symbols, limits))
        return mod


def _nodes(mod: ir.IRModule, func: relax.Function, sizes: Sizes) -> Iterator[Node]:
    """Yield a record for each binding that computes; names of others stand for what they are."""
    names: dict[relax.Var, tuple[str, ...]] = {}
    given = {param: param.name for param in func.params}
    used: set[str] = set()
    for binding, _ in bindings_of(func.body):
        value, var = binding.value, binding.var
        variables = list(_variables(value))
        weights = [given[v] for v in variables if v in given]
        reads = tuple(dict.fromkeys(n for v in variables for n in names.get(v, ())))
        if not isinstance(value, relax.Call | relax.If):
            names[var] = reads
            if weights:
                item = f"[{value.index}]" if isinstance(value, relax.TupleGetItem) else ""
                given[var] = weights[0] + item
            continue
        own = _unused(var.name, used)
        node = _node(own, binding, reads, (*weights, *_constants(value)), sizes)
        width = copied_width(mod[value.args[0]]) if is_call(value, "relax.call_tir") else 0
        yield replace(node, copied=_copied(binding.var.ty, width, sizes)) if width else node
        names[var] = (own,)


def _unused(name: str, used: set[str]) -> str:
    """Return a name that no other binding has: a module may use one for several."""
    count, own = 1, name
    while own in used:
        count += 1
        own = f"{name}({count})"
    used.add(own)
    return own


def _node(
    name: str, binding: relax.Binding, reads: tuple[str, ...], weights: Sequence[str], sizes: Sizes
) -> Node:
    """Return the record of one binding."""
    var, value = binding.var, binding.value
    is_kernel = is_call(value, *KERNELS, *OUTSIDE)
    operands = [e for e in dict.fromkeys(_operands(value)) if not isinstance(e, relax.ShapeExpr)]
    ty = var.ty.fields[0] if isinstance(var.ty, ir.TupleType) and len(var.ty.fields) else var.ty
    tensor = isinstance(ty, relax.TensorType)
    types = [e.ty for e in operands]
    results = var.ty.fields if isinstance(var.ty, ir.TupleType) else [var.ty]
    return Node(
        name,
        _what(value),
        reads,
        tuple(dict.fromkeys(weights)),
        _shape(ty) if tensor else "",
        str(ty.dtype) if tensor else "",
        *_moved(value, *([bytes_of(t, sizes) for t in each] for each in (types, results))),
        _flops(var, value, sizes),
        is_kernel,
    )


def _moved(value: relax.Expr, operands: Sequence[int], results: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that are read and written; of lookups and updates in place the part.

    An update whose operands are all of one size is of the whole; what has other results, too, as
    attention that appends to caches, reads all of its operands.
    """
    result = sum(results)
    if is_call(value, "relax.call_tir_inplace"):
        places = zip(value.attrs.inplace_indices, results, strict=True)
        if fresh := sum(size for place, size in places if place < 0):
            return sum(operands), fresh
        changed = sum(size for size in operands if size < max(operands))
        return (changed, changed) if changed else (sum(operands), result)
    what = _what(value).removeprefix("nn.").rstrip("0123456789_")
    if what in PARTIAL:
        return min(sum(operands), result), result
    if any(f"_{name}" in what for name in PARTIAL):
        return sum(min(size, result) for size in operands), result
    return sum(operands), result


def _operands(value: relax.Expr) -> Iterator[relax.Expr]:
    """Yield the tensors among the arguments of a call."""
    if not isinstance(value, relax.Call):
        return
    for arg in value.args:
        yield from arg.fields if isinstance(arg, relax.Tuple) else (arg,)


def _variables(value: relax.Expr) -> Iterator[relax.Var]:
    """Yield the variables that a binding reads, in order."""
    if isinstance(value, relax.Var):
        yield value
    elif isinstance(value, relax.TupleGetItem):
        yield from _variables(value.tuple_value)
    elif isinstance(value, relax.Tuple):
        for item in value.fields:
            yield from _variables(item)
    elif isinstance(value, relax.If):
        yield from _variables(value.cond)
        for branch in (value.true_branch, value.false_branch):
            yield from _variables(branch.body if isinstance(branch, relax.SeqExpr) else branch)
    elif isinstance(value, relax.Call):
        for arg in value.args:
            yield from _variables(arg)


def _constants(value: relax.Expr) -> Iterator[str]:
    for operand in _operands(value):
        tensor = isinstance(operand, ir.Constant) and isinstance(operand.ty, relax.TensorType)
        if tensor and _shape(operand.ty):
            yield "constant"


def _what(value: relax.Expr) -> str:
    """Return the operator of a call, or the kernel that it launches."""
    if isinstance(value, relax.If):
        return "if"
    if is_call(value, *KERNELS):
        return value.args[0].name_hint
    if is_call(value, *OUTSIDE) and isinstance(value.args[0], relax.ExternFunc):
        return str(value.args[0].global_symbol)
    op = value.op
    if isinstance(op, ir.Op):
        return op.name.removeprefix("relax.")
    return str(getattr(op, "name_hint", None) or getattr(op, "global_symbol", None) or "call")


def _shape(ty: relax.TensorType) -> str:
    shape = ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        return "?"
    return ", ".join(str(int(d) if isinstance(d, tirx.IntImm) else d) for d in shape.values)


def bytes_of(ty: ir.Type, sizes: Sizes) -> int:
    """Return the bytes of a tensor, or of a tuple of them."""
    if isinstance(ty, ir.TupleType):
        return sum(bytes_of(each, sizes) for each in ty.fields)
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        return 0
    return prod(_dims(ty, sizes)) * width_of(str(ty.dtype))


def _dims(ty: relax.TensorType, sizes: Sizes) -> list[int]:
    numbers = {var: tirx.const(n, "int64") for var, n in sizes.items()}
    found = []
    for dim in ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else ():
        value = dim
        if not isinstance(dim, tirx.IntImm):
            value = Analyzer().simplify(substitute(dim, numbers))
        found.append(int(value) if isinstance(value, tirx.IntImm) else SYMBOLIC_SIZE)
    return found


def _flops(var: relax.Var, value: relax.Expr, sizes: Sizes) -> float:
    """Return the floating-point operations of what multiplies matrices: two a product."""
    if not is_call(value, *COUNTED):
        return 0.0
    values = {size.name: number for size, number in sizes.items()}
    return operator_item("", var, value).flops(values) or 0.0


def _copied(ty: ir.Type, width: int, sizes: Sizes) -> int:
    """Return the bytes that a copy writes, and reads, which takes an element for each."""
    if isinstance(ty, ir.TupleType):
        return sum(_copied(each, width, sizes) for each in ty.fields)
    return prod(_dims(ty, sizes)) * (width + width_of(str(ty.dtype)))


def copied_width(func: ir.BaseFunc) -> int:
    """Return of how many bytes the elements are that a PrimFunc only moves or casts.

    0 if it does something else: computes, looks up by an index that it loads, fills with numbers.
    """
    if not isinstance(func, tirx.PrimFunc):
        return 0
    widths = [_moved_width(store.value) for store in found_in(func.body, tirx.BufferStore)]
    return 0 if None in widths else max((w for w in widths if w is not None), default=0)


def _moved_width(value: tirx.Expr) -> int | None:
    """Return the bytes of what a value is loaded as, 0 for a number, None for what is computed.

    It may be a choice, or a cast.  A row that is looked up in a matrix is none.
    """
    if isinstance(value, tirx.Cast):
        return _moved_width(value.value)
    if isinstance(value, TensorLoad):
        looked_up = any(map(loads_of, value.indices))
        return None if looked_up and len(value.indices) < 3 else width_of(str(value.ty.dtype))
    choice = _choice(value)
    if choice is not None and not loads_of(choice[0]):
        parts = [_moved_width(part) for part in choice[1:]]
        return None if None in parts else max(w for w in parts if w is not None)
    return 0 if isinstance(value, tirx.IntImm | tirx.FloatImm) else None


def _choice(value: tirx.Expr) -> list[tirx.Expr] | None:
    """Return the condition and the two values of a choice."""
    if isinstance(value, tirx.Select):
        return [value.condition, value.true_value, value.false_value]
    return list(value.args) if is_if_then_else(value) else None


def width_of(dtype: str) -> int:
    """Return the bytes of an element."""
    return 1 if dtype == "bool" else (tvm.DataType(dtype).bits + 7) // 8


def sizes_of_symbols(func: relax.Function, bounds: Mapping[str, int]) -> dict[tirx.Var, int]:
    """Return values for the symbolic variables of a function."""
    upper = limits_of(func, bounds)
    return {
        var: min(SYMBOLIC_SIZE, upper.get(var.name, SYMBOLIC_SIZE))
        for var in relax.analysis.defined_symbolic_vars(func)
    }


def limits_of(func: relax.Function, bounds: Mapping[str, int]) -> dict[str, int]:
    """Return the largest values of sizes by name: those of its attribute, then `bounds`."""
    own = (func.attrs or {}).get("tir_var_upper_bound", {})
    return {str(name): int(most) for name, most in {**own, **bounds}.items()}
