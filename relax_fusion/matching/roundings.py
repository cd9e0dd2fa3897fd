"""Roundings that a kernel has to keep.

A fused kernel may see more precision than the operators that it replaces, but not where the graph
narrows on purpose: a cast to a narrower type that is read by a cast back, the sum in front of a
norm, and the tensor between two matmuls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tvm import relax

from ..errors import Reason
from ..workload import FLOAT_BYTES
from .effects import free_vars
from .operators import ALL_MOVEMENTS
from .pattern import BlockView, guard, is_call
from .shapes import dtype_of

Bindings = Mapping[relax.Var, relax.Expr]

_LOOKED_THROUGH = (*ALL_MOVEMENTS, "relax.astype")
NORMS = ("relax.nn.rms_norm", "relax.nn.layer_norm")
SQUARES = ("relax.square", "relax.power", "relax.multiply")


def kept_roundings(values: Bindings, between: bool) -> set[relax.Var]:
    """Return the bindings whose rounding is no accident of the dtype.

    `values`: the bindings of a chain, in order.
    `between`: whether what a matmul makes and another reads is among them.
    """
    readers = _readers(values)
    found: set[relax.Var] = set()
    for var, value in values.items():
        if is_call(value, "relax.astype") and _narrows(values, value.args[0], dtype_of(var)):
            read = [*_behind(values, readers, var)]
            if any(_is_widening(values, v, dtype_of(var)) for v in read):
                found.add(var)
        elif is_call(value, "relax.add"):
            read = [*_behind(values, readers, var, casts=True)]
            rows = {var, *read}  # not what gamma is made of
            norms = (v for v in read if _is_in_norm(values, readers, v))
            if any(values[v].args[0] in rows for v in norms):
                found.add(var)
    return found | set(_intermediates(values)) if between else found


def _readers(values: Bindings) -> dict[relax.Var, list[relax.Var]]:
    """Return which bindings read each variable."""
    readers: dict[relax.Var, list[relax.Var]] = {}
    for var, value in values.items():
        for read in free_vars(value):
            readers.setdefault(read, []).append(var)
    return readers


def _width(dtype: str) -> float:
    return FLOAT_BYTES.get(dtype, 0)


def _narrows(values: Bindings, source: relax.Expr, dtype: str) -> bool:
    """Tell whether a cast of `source` to `dtype` drops what no earlier dtype dropped already."""
    while True:
        if not _width(dtype_of(source)) > _width(dtype) > 0:
            return False
        value = values.get(source) if isinstance(source, relax.Var) else None
        if isinstance(value, relax.Var):
            source = value
        elif is_call(value, *_LOOKED_THROUGH) and isinstance(value.args[0], relax.Var):
            source = value.args[0]
        else:
            return True


def _behind(
    values: Bindings, readers: dict[relax.Var, list[relax.Var]], var: relax.Var, casts: bool = False
) -> Iterator[relax.Var]:
    """Yield what reads a variable, movements of it looked through."""
    through = _LOOKED_THROUGH if casts else ALL_MOVEMENTS
    for reader in readers.get(var, ()):
        yield reader
        value = values[reader]
        moves = is_call(value, *through) or isinstance(value, relax.Var | relax.TupleGetItem)
        if moves or isinstance(value, relax.Tuple):
            yield from _behind(values, readers, reader, casts)


def _is_widening(values: Bindings, var: relax.Var, dtype: str) -> bool:
    value = values[var]
    return is_call(value, "relax.astype") and _width(dtype_of(var)) > _width(dtype)


def _is_in_norm(
    values: Bindings, readers: dict[relax.Var, list[relax.Var]], var: relax.Var
) -> bool:
    """Tell whether a binding is a norm, or the square that one is written out with."""
    value = values[var]
    if is_call(value, *NORMS):
        return True
    if not is_call(value, *SQUARES):
        return False
    return any(is_call(values[v], "relax.mean") for v in readers.get(var, ()))


def _intermediates(values: Bindings) -> Iterator[relax.Var]:
    """Yield what a matmul reads that another matmul makes, but no rows of norms and softmaxes."""
    made: set[relax.Var] = set()
    for var, value in values.items():
        matmul = is_call(value, "relax.matmul", "relax.call_tir")
        reads = free_vars(value)
        if matmul:
            yield from (v for v in reads if v in made and not _is_normalised(values, v))
        if matmul or any(v in made for v in reads):
            made.add(var)


def _is_normalised(values: Bindings, var: relax.Var) -> bool:
    """Tell whether a tensor is what a norm or a softmax makes, moved or cast."""
    value = values[var]
    while is_call(value, *_LOOKED_THROUGH) and value.args[0] in values:
        value = values[value.args[0]]
    return is_call(value, *NORMS, "relax.nn.softmax")


def narrows(view: BlockView, expr: relax.Expr) -> bool:
    """Tell whether `expr` is a cast to a narrower float, of what was not as narrow before."""
    cast = view.call(expr, "relax.astype")
    return cast is not None and _narrows(view.defs, cast.args[0], dtype_of(expr))


def refuse_kept_roundings(view: BlockView, covers: Sequence[relax.Var]) -> None:
    """Refuse a chain that keeps in float32 what its graph narrows and widens again."""
    inside = sorted(set(covers), key=view.index.__getitem__)
    values = {var: view.defs[var] for var in inside}
    readers = _readers(values)
    for var in covers:
        if not narrows(view, var):
            continue
        read = _behind(values, readers, var)
        wide = [v.name for v in read if _is_widening(values, v, dtype_of(var))]
        detail = f"{var.name} is rounded to {dtype_of(var)}, and read as more by {', '.join(wide)}"
        guard(not wide, Reason.DTYPE, detail)
