"""Whole Relax functions by numpy, tensors that are overwritten in place included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import ir, relax

from relax_fusion import Decision
from relax_fusion.equivalence.comparison import as_meant, numbers_of, unseen
from relax_fusion.equivalence.interpreter import Interpreter, stored
from relax_fusion.equivalence.operators import Array
from relax_fusion.equivalence.region import exact_of
from relax_fusion.equivalence.sizes import Sizes, variables
from relax_fusion.matching.bounds import FAR
from relax_fusion.workload import Workload
from relax_fusion.workload.graph import Tensor
from relax_fusion.workload.reference import evaluate

from .bindings import value_of

LARGE = {"float16": 30.0, "bfloat16": 300.0, "float32": 300.0}
"""What makes scores so large that clamps and the numbers of masks are among them."""


class WholeFunction(Interpreter):
    """Knows which values share memory: names, parts of tuples, and what overwrites an operand."""

    def _call(self, call: relax.Call, values: Mapping[Any, Any], sizes: Sizes) -> Any:
        name = call.op.name if isinstance(call.op, ir.Op) else ""
        if name in ("relax.call_tir_inplace", "relax.call_inplace_packed"):
            operand = call.args[1]
            operand = operand.fields[0] if isinstance(operand, relax.Tuple) else operand
            array = self.value(operand, values, sizes)
            array[...] = 1 - array * 0.5
            return array
        made = super()._call(call, values, sizes)
        return tuple(map(np.array, made)) if isinstance(made, tuple) else np.array(made)

    def typed(self, value: Any, ty: ir.Type, sizes: Sizes, rounds: bool = False) -> Any:
        """Return a tensor itself where it is of the type already."""
        if isinstance(ty, relax.TensorType) and isinstance(value, np.ndarray):
            wanted = "float64" if "float" in str(ty.dtype) else str(ty.dtype)
            if str(value.dtype) == wanted and value.shape == self.shape(ty, sizes):
                return value
        if isinstance(ty, relax.TupleType):
            parts = zip(value, ty.fields, strict=True)
            return tuple(self.typed(v, t, sizes, rounds) for v, t in parts)
        return super().typed(value, ty, sizes, rounds)


def sizes_of(func: relax.Function) -> Sizes:
    """Return values of the symbolic sizes of a function."""
    bindings = [b for block in func.body.blocks for b in block.bindings]
    named = [*func.params, *(b for b in bindings if isinstance(b, relax.MatchCast))]
    found = {v for each in named for v in variables(_dims(each.ty))}
    return Sizes({v: value_of(v) for v in found})


def _dims(ty: ir.Type) -> list[Any]:
    if isinstance(ty, relax.TupleType):
        return [d for part in ty.fields for d in _dims(part)]
    if isinstance(ty, relax.TensorType):
        return list(ty.shape.values)
    return list(ty.values or ()) if isinstance(ty, relax.ShapeType) else []


def arguments(func: relax.Function, sizes: Sizes, seed: int) -> list[Any]:
    """Return arguments of unit size, or large ones of several heads; masks hide some keys.

    With two of three seeds they never hide the first.
    """
    rng = np.random.default_rng(seed)
    blind, large = seed % 3 == 1, seed % 4 == 1
    return [
        tuple(map(int, p.name.split("_")[1:-1]))  # "are_5_3_0": sizes of no names of their own
        if isinstance(p.ty, relax.ShapeType) and p.ty.values is None
        else _argument(rng, p.ty, sizes, blind, large)
        for p in func.params
    ]


def _argument(rng: np.random.Generator, ty: ir.Type, sizes: Sizes, blind: bool, large: bool) -> Any:
    if isinstance(ty, relax.TupleType):
        return tuple(_argument(rng, t, sizes, blind, large) for t in ty.fields)
    if isinstance(ty, relax.ShapeType):
        return sizes.shape(ty.values)
    shape, dtype = sizes.shape(ty.shape.values), str(ty.dtype)
    if dtype == "bool":
        seen = rng.random(shape) < 0.7
        seen[..., :1] = not blind
        seen[:1] &= not blind or rng.random() < 0.5
        return seen
    if "int" in dtype:
        return rng.integers(0, 4, shape).astype(dtype)
    scale = 1 / np.sqrt(max(shape)) if len(shape) == 2 and shape[0] and shape[1] else 1.0
    scale *= LARGE.get(dtype, 300.0) if large and len(shape) == 4 else 1.0
    return stored(rng.standard_normal(shape) * scale, dtype, rounds=True)


def run(
    func: relax.Function,
    sizes: Sizes,
    args: Sequence[Any],
    decisions: Sequence[Decision] = (),
    meant: bool = True,
    mod: ir.IRModule | None = None,
    far: bool = False,
) -> tuple[list[Array], list[Array]]:
    """Return the results of a function, and its parameters after it.

    `decisions`: of which PrimFuncs are known by name, and which numbers kernels have as they are.
    `meant`: others that are nearly those of an activation's formula are taken for them.
    `mod`: where the PrimFuncs are that no decision made.
    `far`: queries that see no key give NaN, as the graph may have any number there.
    """
    kernels = {d.kernel: kernel(d.workload, far) for d in decisions if d.workload and d.kernel}
    made = (d.workload for d in decisions if d.fused and d.workload)
    own = {number for work in made for number in numbers_of(work)}
    constant = {"constant": partial(as_meant, own=own)} if meant else {}
    interpreter = WholeFunction(kernels, mod, **constant)
    values = dict(zip(func.params, _copied(args), strict=True))
    for block in func.body.blocks:
        bindings = [(b.var, b.value) for b in block.bindings]
        interpreter.run(bindings, values, sizes, None, exact_of(bindings))
    with np.errstate(all="ignore"):
        result = interpreter.value(func.body.body, values, sizes)
    results = list(result) if isinstance(result, tuple) else [result]
    left = [values[p] for p in func.params if isinstance(p.ty, relax.TensorType)]
    return results, left


def nudged(args: Sequence[Any], by: float = 2.0**-24) -> list[Any]:
    """Return arguments whose numbers are a rounding away, of float32, one up and the next down."""

    def moved(value: Any, sign: int) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(v, sign * (-1) ** i) for i, v in enumerate(value))
        is_float = isinstance(value, np.ndarray) and value.dtype.kind == "f"
        return value * (1 + sign * by) if is_float else value

    return [moved(value, (-1) ** i) for i, value in enumerate(args)]


def _copied(args: Sequence[Any]) -> list[Any]:
    return [
        tuple(_copied(a)) if isinstance(a, tuple) else a.copy() if hasattr(a, "copy") else a
        for a in args
    ]


def is_far(func: relax.Function) -> bool:
    """Tell whether a number of a function counts as minus infinity where it masks scores."""
    found = []

    def look(expr: relax.Expr) -> None:
        if isinstance(expr, ir.GenericConst) and "float" in str(expr.ty.dtype):
            found.append(bool(np.any(expr.value.numpy().astype(float) <= FAR)))

    relax.analysis.post_order_visit(func, look)
    return any(found)


def kernel(work: Workload, far: bool) -> Callable[..., Any]:
    """Return what the kernel of a workload computes; `far` as in `run`."""

    def compute(*args: Any) -> Any:
        of_none = unseen(work, far)

        def rounding(made: Array, tensor: Tensor) -> Array:
            none = of_none(made, tensor) if far else None
            return made if none is None else np.where(none, np.nan, made)

        given = zip((o.name for o in work.graph.inputs), args, strict=True)
        made = evaluate(work.graph, dict(given), rounding=rounding)
        results = [made[o.name] for o in work.graph.outputs]
        return results[0] if len(results) == 1 else tuple(results)

    return compute
