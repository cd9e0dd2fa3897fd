"""What operators of a graph cost: operations and bytes, at the rates of a device."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from tvm import relax

from ..equivalence.sizes import Sizes, variables
from ..hardware import DeviceSpec
from ..matching.bindings import Identity
from ..matching.operators import OPERATORS, VIEWS, named
from ..matching.pattern import is_call, operator_of
from ..matching.shapes import dtype_of, shape_of
from ..tvm_ir import GenericConst
from ..workload.dtypes import stored_bytes
from ..workload.roofline import slots_of

MOST = 4096
"""A symbolic size without a bound is taken to be 1 and this."""

_SLOTS = {"power": 60, "erf": 30, "sin": 40, "cos": 40, "abs": 1, "prod": 1}
"""Instructions of operators that no block graph has (assumed)."""


ELEMENTWISE = named("arithmetic", "function", "rounding", "comparison", "choice", "cast")
CARRIED = (*ELEMENTWISE, "relax.matmul")
"""What makes results that element-wise operators behind it take along."""

_REDUCTIONS = (*named("reduction"), "relax.prod")


class Price:
    """Prices calls on a device, at the least and at the largest sizes, which are `bounds`."""

    def __init__(self, device: DeviceSpec, bounds: Mapping[str, int]):
        self.device, self.bounds = device, bounds

    def of(
        self,
        bindings: Sequence[tuple[relax.Var, relax.Expr]],
        is_read_inside: bool,
        given: Mapping[Identity, relax.Expr],
    ) -> tuple[float, float]:
        """Return the seconds of a part of a graph, if nothing overlaps.

        Each kernel is launched, computes, and moves what is in memory.  What an element-wise
        operator reads of another, or of a matmul, is in none, nor what a reduction reads of an
        element-wise operator.

        `bindings`: the part, in order; the last is its result.
        `is_read_inside`: whether only element-wise operators read the result.
        `given`: calls that make what the part reads, and element-wise operators alone read.
        """
        made = {**given, **{hash(var): call for var, call in bindings}}
        edges = [(hash(e), call) for _, call in bindings for e in operands(call)]
        stored = {key for key, call in edges if not _is_fused(made.get(key), call)}
        if bindings and not (is_read_inside and is_call(bindings[-1][1], *ELEMENTWISE)):
            stored.add(hash(bindings[-1][0]))
        named = (e for var, call in bindings for e in (var, *operands(call)))
        names = {v for e in named for v in variables(shape_of(e) or [])}
        least, most = (
            Sizes(dict.fromkeys(names, 1)),
            Sizes({v: self.bounds.get(v.name, MOST) for v in names}),
        )
        twice = {key for key in stored if key in given}  # they are written for this part
        twice |= {hash(var) for var, _ in bindings[-1:]}
        launches = self.device.launch_s * _launches(bindings, stored, given)
        first, last = (self._seconds(bindings, stored, twice, s) for s in (least, most))
        return launches + first, launches + last

    def _seconds(
        self,
        bindings: Sequence[tuple[relax.Var, relax.Expr]],
        stored: Collection[Identity],
        twice: Collection[Identity],
        sizes: Sizes,
    ) -> float:
        total = 0.0
        for var, call in bindings:
            if is_call(call, *VIEWS):
                continue
            tensors = {hash(e): e for e in (var, *operands(call)) if hash(e) in stored}
            moved = [
                _elements(e, sizes) * stored_bytes(dtype_of(e)) * (1 + (key in twice))
                for key, e in tensors.items()
            ]
            total += sum(moved) / self.device.dram_bytes_per_s + self._work(call, sizes)
        return total

    def _work(self, call: relax.Expr, sizes: Sizes) -> float:
        """Return the seconds of the operations of a call."""
        device, rate = self.device, self.device.fma_float32_flops_per_s
        most = max(_elements(e, sizes) for e in (call, *operands(call)))
        if not is_call(call, "relax.matmul"):
            return 2.0 * _slots(operator_of(call)) * most / rate
        inner = sizes.shape(shape_of(call.args[0]) or (1,))[-1]
        tensor = 0.0 if dtype_of(call) == "float32" else device.tensor_flops_per_s(dtype_of(call))
        return 2.0 * _elements(call, sizes) * inner / (tensor or rate)


def _launches(
    bindings: Sequence[tuple[relax.Var, relax.Expr]],
    stored: Collection[Identity],
    given: Collection[Identity],
) -> int:
    """Count kernels: matmuls and reductions, and element-wise operators that are behind none."""
    count, behind = 0, set(given)
    for var, call in bindings:
        if not is_call(call, *ELEMENTWISE):
            count += not is_call(call, *VIEWS)
            behind |= {hash(var)} if is_call(call, "relax.matmul") else set()
        elif any(hash(e) in behind for e in operands(call)):
            behind.add(hash(var))
        else:
            count += hash(var) in stored
    return count


def _is_fused(made: relax.Expr | None, reader: relax.Expr) -> bool:
    """Tell whether a call makes what another reads within one kernel."""
    if is_call(reader, *ELEMENTWISE):
        return is_call(made, *CARRIED)
    return is_call(reader, *_REDUCTIONS) and is_call(made, *ELEMENTWISE)


def _elements(expr: relax.Expr, sizes: Sizes) -> int:
    return math.prod(sizes.shape(shape_of(expr) or ()))


def operands(call: relax.Expr) -> list[relax.Expr]:
    """Return the tensors that a call reads, constants of one element left out."""
    args = call.args if isinstance(call, relax.Call) else []
    return [
        arg
        for arg in args
        if isinstance(arg.ty, relax.TensorType)
        and not (isinstance(arg, GenericConst) and math.prod(map(int, shape_of(arg) or ())) == 1)
    ]


@cache
def _slots(name: str) -> int:
    """Return the instructions for each element."""
    known = OPERATORS.get(name.removeprefix("relax."))
    if known is not None and known.formula:
        return slots_of(known.formula)
    return _SLOTS.get(name.removeprefix("relax."), 1)
