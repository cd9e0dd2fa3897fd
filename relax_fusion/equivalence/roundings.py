"""Roundings that a kernel has to keep: made coarse on both sides, one that is missing is seen.

A fused kernel may see more precision than the operators that it replaces, but not where the graph
narrows on purpose: a cast to a narrower type that is read by a cast back, the sum in front of a
norm, and the tensor between two matmuls, which the kernel rounds as `Tensor.rounds` says.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tvm import relax

from ..matching.pattern import is_call
from ..matching.shapes import dtype_of
from ..workload import FLOAT_BYTES, MatmulChain
from .interpreter import Hook, Value
from .operators import Array
from .region import Region, free_vars_of

BITS = 4
"""Of mantissa that a coarse number has."""

MOVEMENTS = tuple(
    f"relax.{name}"
    for name in (
        *("reshape", "permute_dims", "expand_dims", "squeeze", "flatten", "split", "take"),
        *("strided_slice", "concat", "broadcast_to", "repeat", "tile", "flip", "stack"),
    )
)
NORMS = ("relax.nn.rms_norm", "relax.nn.layer_norm")
SQUARES = ("relax.square", "relax.power", "relax.multiply")


def coarse(values: Array) -> Array:
    """Round to `BITS` bits of mantissa."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2**BITS) / 2**BITS, exponent)


def coarse_bindings(region: Region) -> Hook:
    """Return what rounds the bindings of a region that its kernel has to round."""
    kept = protected(region)

    def rounded(var: relax.Var, value: Value) -> Value:
        return coarse(value) if var in kept else value

    return rounded


def protected(region: Region) -> set[relax.Var]:
    """Return the bindings whose rounding is no accident of the dtype."""
    readers: dict[relax.Var, list[relax.Var]] = {}
    for var, value in region.bindings:
        for read in free_vars_of(value):
            readers.setdefault(read, []).append(var)
    found: set[relax.Var] = set()
    for var, value in region.bindings:
        if is_call(value, "relax.astype") and _narrows(region, value.args[0], dtype_of(var)):
            read = [*_behind(region, readers, var)]
            if any(_is_widening(region, v, dtype_of(var)) for v in read):
                found.add(var)
        elif is_call(value, "relax.add"):
            read = [*_behind(region, readers, var, casts=True)]
            rows = {var, *read}  # not what gamma is made of
            norms = (v for v in read if _is_in_norm(region, readers, v))
            if any(region.values[v].args[0] in rows for v in norms):
                found.add(var)
    if isinstance(region.match.workload, MatmulChain):
        found.update(_intermediates(region))
    return found


def _width(dtype: str) -> float:
    return FLOAT_BYTES.get(dtype, 0)


def _narrows(region: Region, source: relax.Expr, dtype: str) -> bool:
    """Tell whether a cast of `source` to `dtype` drops what no earlier dtype dropped already."""
    while True:
        if not _width(dtype_of(source)) > _width(dtype) > 0:
            return False
        value = region.values.get(source) if isinstance(source, relax.Var) else None
        if isinstance(value, relax.Var):
            source = value
        elif is_call(value, "relax.astype", *MOVEMENTS) and isinstance(value.args[0], relax.Var):
            source = value.args[0]
        else:
            return True


def _behind(
    region: Region, readers: dict[relax.Var, list[relax.Var]], var: relax.Var, casts: bool = False
) -> Iterator[relax.Var]:
    """Yield what reads a variable, movements of it looked through."""
    through = (*MOVEMENTS, "relax.astype") if casts else MOVEMENTS
    for reader in readers.get(var, ()):
        yield reader
        value = region.values[reader]
        moves = is_call(value, *through) or isinstance(value, relax.Var | relax.TupleGetItem)
        if moves or isinstance(value, relax.Tuple):
            yield from _behind(region, readers, reader, casts)


def _is_widening(region: Region, var: relax.Var, dtype: str) -> bool:
    value = region.values[var]
    return is_call(value, "relax.astype") and _width(dtype_of(var)) > _width(dtype)


def _is_in_norm(region: Region, readers: dict[relax.Var, list[relax.Var]], var: relax.Var) -> bool:
    """Tell whether a binding is a norm, or the square that one is written out with."""
    value = region.values[var]
    if is_call(value, *NORMS):
        return True
    if not is_call(value, *SQUARES):
        return False
    return any(is_call(region.values[v], "relax.mean") for v in readers.get(var, ()))


def _intermediates(region: Region) -> Iterator[relax.Var]:
    """Yield what a matmul reads that another matmul makes."""
    made: set[relax.Var] = set()
    for var, value in region.bindings:
        matmul = is_call(value, "relax.matmul", "relax.call_tir")
        reads = free_vars_of(value)
        if matmul:
            yield from (v for v in reads if v in made)
        if matmul or any(v in made for v in reads):
            made.add(var)
