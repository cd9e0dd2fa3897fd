"""A function for each rule, on which it fires, and one on which it stays away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from tvm import ir, relax

from relax_fusion.algebra import AlgebraOptions, Rule, SimplifyAlgebra
from relax_fusion.algebra.formula import NUMBERS, Term
from relax_fusion.canonical import MergeDuplicates
from relax_fusion.hardware.target import make_target
from relax_fusion.report.decision import Rewrite

TARGET = make_target("h200")

MATRICES = {"A": (64, 96), "B": (64, 96), "V": (96,), "W": (96,), "x": (5, 64)}
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
SHAPES: dict[str, Shapes] = {
    "(x @ A) @ B": {"B": (96, 32)},
    "(x @ A + V) @ B": {"B": (96, 32)},
    "(x * V) @ A": {"V": (64,)},
    "(x + V) @ A": {"V": (64,)},
    "x * V + x * W": {"V": (64,), "W": (64,)},
    "x @ z + y @ z": {"y": (5, 64), "z": (64, 96)},
    "x / sqrt(y)": {"y": (5, 1)},
    "x / y": {"y": (5, 1)},
    "(x * y) * (y * z)": {"y": (5, 1)},
    "take[r](A, x) * c": {"x": (5,)},
    "(x * y) @ z": {"y": (5, 1), "z": (64, 96)},
    "mean[r](x @ y)": {"y": (64, 96)},
    "sum[r](x @ y)": {"y": (64, 96)},
    "mean[r](x @ y + z)": {"y": (64, 96), "z": (96,)},
    "max[r](x + y)": {"y": (5, 1)},
    "max[r](x - y)": {"y": (5, 1)},
    "sum[r](x * y)": {"y": (5, 1)},
    "mean[r](x * y)": {"y": (5, 1)},
    "x @ y + x @ z": {"x": (256, 64), "y": (64, 96), "z": (64, 96)},
    "(x @ y) @ z": {"x": (64, 8), "y": (8, 64), "z": (64, 8)},
    "x @ (y @ z)": {"x": (8, 64), "y": (64, 64), "z": (64, 64)},
    "(x * c) @ y": {"x": (5, 64), "y": (64, 8)},
    "(x @ y) * c": {"x": (5, 16), "y": (16, 64)},
    "x @ (y * c)": {"x": (5, 64), "y": (64, 8)},
}
"""Shapes of the names of formulas; other names are of `MATRICES`, or (5, 64)."""

VALUES = {"c": 4.0, "d": 3.0}
AXES: dict[str, list[int]] = {"r": [-1], "q": [0]}
NEGATIVE = ("max[r](x * c) -> min[r](x) * c", "min[r](x * c) -> max[r](x) * c")
"""Rules whose number is below 0."""

DTYPES = {"take[r](A, x) * c": "int64", "astype[r](astype[q](x)) -> astype[r](x)": "float16"}
"""Of x, by the formula or the rule."""


def axes_of(rule: Rule, name: str) -> list[int]:
    """Return what a reduction of a formula is over."""
    return [-2] if "[r](x @ y" in rule.before else AXES[name]


def names_of(rule: Rule) -> list[str]:
    """Return the names in a formula, each once."""
    return list(dict.fromkeys(p.name for p in rule.pattern.parts() if not p.op and p.name))


def leaves_of(
    rule: Rule, dtype: str, shapes: Shapes, values: Mapping[str, float]
) -> dict[str, relax.Expr]:
    """Return parameters, and constants, for the names of a formula."""
    rng, found = np.random.default_rng(0), {}
    for name in names_of(rule):
        shape = shapes.get(name, MATRICES.get(name, (5, 64)))
        if name in NUMBERS:
            value = -VALUES[name] if str(rule) in NEGATIVE else VALUES[name]
            value = values.get(name, value + (rule.numbers == "inexact"))
            found[name] = relax.const(np.array(value), dtype)
        elif name.isupper():
            found[name] = relax.const(rng.standard_normal(shape), dtype)
        else:
            own = DTYPES.get(rule.before, DTYPES.get(str(rule), dtype)) if name == "x" else dtype
            found[name] = relax.Var(name, relax.TensorType(shape, own))
    return found


def written(
    emit: Callable[[relax.Expr], relax.Expr],
    term: Term,
    leaves: Mapping[str, relax.Expr],
    rule: Rule,
    dtype: str,
) -> relax.Expr:
    """Emit a formula."""
    if term.value is not None:
        return relax.const(np.array(term.value), dtype)
    if not term.op:
        return leaves[term.name]
    args = [written(emit, arg, leaves, rule, dtype) for arg in term.args]
    if term.op == "astype":
        made = relax.op.astype(*args, "float64" if term.name == "q" else dtype)
    elif term.op == "take":
        made = relax.op.take(*args, 0)
    elif term.name:
        keepdims = term.name == "r" and not any(p.name == "q" for p in term.parts())
        made = getattr(relax.op, term.op)(*args, axis=axes_of(rule, term.name), keepdims=keepdims)
    elif term.op == "matmul":
        made = relax.op.matmul(*args)
    else:
        made = relax.Call(ir.Op.get(f"relax.{term.op}"), args)
    return emit(made)


def module_of(
    rule: Rule,
    dtype: str = "float32",
    leaks: bool = False,
    shapes: Shapes | None = None,
    values: Mapping[str, float] = MappingProxyType({}),
) -> ir.IRModule:
    """Return ``main`` of the formula before; all that it computes is a result if it leaks."""
    shapes = SHAPES.get(rule.before, {}) if shapes is None else shapes
    leaves, made = leaves_of(rule, dtype, shapes, values), list[relax.Expr]()
    params = [e for e in leaves.values() if isinstance(e, relax.Var)]
    builder = relax.BlockBuilder()

    def emit(value: relax.Expr) -> relax.Expr:
        made.append(builder.emit(value))
        return made[-1]

    with builder.function("main", params):
        with builder.dataflow():
            written(emit, rule.pattern, leaves, rule, dtype)
            if made and rule.pattern.name:  # what follows a reduction is part of its reader
                made[-1] = builder.emit(relax.op.sign(made[-1]))
            outs = [builder.emit_output(v) for v in (made if leaks else made[-1:])]
        builder.emit_func_output(outs[0] if len(outs) == 1 else outs)
    return MergeDuplicates()(builder.get())


def simplified(mod: ir.IRModule, **options: Any) -> tuple[ir.IRModule, list[Rewrite]]:
    """Return a module as the pass leaves it, and what it says of that."""
    told: list[Rewrite] = []
    given = AlgebraOptions(
        TARGET, rewrites=told, **{"exact": False, "validate": "strict"} | options
    )
    return SimplifyAlgebra(given)(mod), told


LOW_RANK = {"x": (4096, 2048), "A": (2048, 4), "B": (4, 2048)}

AWAY: dict[str, tuple[str, Shapes]] = {
    "-(-x)": ("-abs(x)", {}),
    "x * 1": ("x * 2", {}),
    "x / 1": ("x / 3", {}),
    "x - 0": ("x - 1", {}),
    "x + 0": ("x + 1", {}),
    "nn.relu(abs(x))": ("nn.relu(sin(x))", {}),
    "abs(square(x))": ("abs(sin(x))", {}),
    "abs(exp(x))": ("abs(log(x))", {}),
    "square(sqrt(x))": ("square(sin(x))", {}),
    "maximum(x, x)": ("maximum(x, y)", {}),
    "minimum(x, x)": ("minimum(x, y)", {}),
    "x / c": ("c / x", {}),
    "x / y": ("x / y", {}),
    "-(x @ A)": ("-(x @ y)", {"y": (64, 96)}),
    "astype[r](astype[q](x))": ("astype[r](x)", {}),
    "(x @ A) / c": ("(x @ y) / d", {"y": (64, 96)}),
    "power(x, 1)": ("power(x, 1.5)", {}),
    "power(x, 2)": ("power(2, x)", {}),
    "power(x, 3)": ("power(x, 5)", {}),
    "power(x, 4)": ("power(x, 5)", {}),
    "power(x, -1)": ("power(x, -3)", {}),
    "power(x, 0.5)": ("power(x, y)", {}),
    "power(x, -0.5)": ("power(x, -1.5)", {}),
    "sqrt(square(x))": ("square(sqrt(x))", {}),
    "x * V + x * W": ("x * V + y * W", {"V": (64,), "W": (64,)}),
    "(x @ A) @ B": ("(x @ A) @ B", LOW_RANK),
    "(x @ A + V) @ B": ("(x @ A + V) @ B", {**LOW_RANK, "V": (4,)}),
    "(x @ A) * c": ("(y @ x) * c", {"y": (64, 5)}),
    "(x @ A) * V": ("(x @ A) * W", {"W": (5, 1)}),
    "(x @ y) @ z": ("(x @ y) @ z", {"x": (8, 64), "y": (64, 64), "z": (64, 64)}),
    "x @ (y @ z)": ("x @ (y @ z)", {"x": (64, 8), "y": (8, 64), "z": (64, 8)}),
    "(x * c) / d": ("(x * y) / d", {}),
    "x / sqrt(y)": ("x / square(y)", {"y": (5, 1)}),
    "1 / exp(x)": ("2 / exp(x)", {}),
    "exp(x) / exp(y)": ("exp(x) / square(y)", {}),
    "log(exp(x))": ("log(exp(x) + y)", {}),
    "x * x": ("x * y", {}),
    "sqrt(x) * sqrt(x)": ("sqrt(x) * x", {}),
    "sqrt(x) * sqrt(y)": ("sqrt(x) * y", {}),
}
"""By formula, what looks alike and is left; of all others, the parts are read elsewhere."""
