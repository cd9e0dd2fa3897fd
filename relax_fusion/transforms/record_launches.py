"""RecordLaunches: which kernels a function runs, and which of them only copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import tvm
from tvm import ir, relax, tirx

from ..matching.expressions import found_in, loads_of, substitute
from ..matching.pattern import is_call
from ..report.coverage import Launches
from ..tvm_ir import Analyzer, TensorLoad
from .modules import functions_of

SYMBOLIC_SIZE = 64
"""What a symbolic size is taken for where bytes are counted, if its bounds allow it."""

KERNELS = ("relax.call_tir", "relax.call_tir_inplace")
OUTSIDE = ("relax.call_dps_packed", "relax.call_pure_packed", "relax.call_inplace_packed")


@tvm.transform.module_pass(opt_level=0, name="RecordLaunches")
@dataclass(frozen=True)
class RecordLaunches:
    """Record the kernels that each Relax function runs; the module stays as it is.

    It has to come behind `RewriteReshapes`, which tells views from copies.

    Parameters
    ----------
    launches : list of Launches
        Gets one for each function that runs any.
    bounds : mapping of str to int
        Largest values of symbolic variables.
    """

    launches: list[Launches]
    bounds: Mapping[str, int] = field(default_factory=dict)

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Look at every function of `mod`, and return it."""
        for gvar, func in functions_of(mod, relax.Function).items():
            names: list[str] = []
            copies: list[tuple[str, int]] = []
            sizes = sizes_of_symbols(func, self.bounds)
            for name, call in _calls(func):
                names.append(name)
                if is_call(call, "relax.call_tir") and (width := copied_width(mod[call.args[0]])):
                    copies.append((name, _bytes(call.ty, width, sizes)))
            if names:
                symbols = tuple((var.name, value) for var, value in sizes.items())
                run = Launches(gvar.name_hint, tuple(names), tuple(copies), symbols)
                self.launches.append(run)
        return mod


def _calls(func: relax.Function) -> Iterator[tuple[str, relax.Call]]:
    """Return the calls of kernels in order, with their names."""
    for node in found_in(func, relax.Call):
        if is_call(node, *KERNELS):
            yield node.args[0].name_hint, node
        elif is_call(node, *OUTSIDE) and isinstance(node.args[0], relax.ExternFunc):
            yield str(node.args[0].global_symbol), node


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
    if isinstance(value, ir.Call) and isinstance(value.op, ir.Op):
        return list(value.args) if value.op.name == "prim.if_then_else" else None
    return None


def _bytes(ty: ir.Type, read: int, sizes: Mapping[tirx.Var, int]) -> int:
    """Return the bytes that a kernel writes, and reads, which takes an element for each."""
    if isinstance(ty, ir.TupleType):
        return sum(_bytes(field, read, sizes) for field in ty.fields)
    elements, numbers = 1, {var: tirx.const(n, "int64") for var, n in sizes.items()}
    for dim in ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else ():
        value = Analyzer().simplify(substitute(dim, numbers))
        elements *= int(value) if isinstance(value, tirx.IntImm) else SYMBOLIC_SIZE
    return elements * (read + width_of(str(ty.dtype)))


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
