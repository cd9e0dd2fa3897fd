"""The operators of Relax: one record each, from which matchers, rewriters and checks derive theirs.

An operator that computes its elements one by one needs no more than its record here.  What reads
axes or attributes has a function besides, by name, where it is read: in `element_readers`, in
`chain.operators`, and in :mod:`..equivalence.operators`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..report.coverage import Kind
from ..workload.reference import FUNCTIONS, erf

Family: TypeAlias = Literal[
    # Of elements
    "arithmetic",  # of two numbers
    "function",  # of one number
    "rounding",
    "comparison",
    "test",
    "logic",
    "bits",
    "choice",
    "cast",
    # Of places
    "view",
    "permutation",
    "slice",
    "flip",
    "broadcast",
    "repetition",
    "split",
    "join",
    "lookup",
    "gather",
    # Of rows
    "reduction",
    "norm",
    "softmax",
    "product",
    "selection",
    # Of words and scales
    "decoding",
]


@dataclass(frozen=True)
class Operator:
    """What is known of an operator."""

    family: Family
    """What it does: with elements one by one, with their places, or with rows of them."""
    numpy: Callable[..., Any] | None = None
    """What it makes of arrays element by element, floats in float64."""
    formula: str = ""
    """The operator of a block graph that computes it, "" if there is none."""
    counts_as: Kind | None = None
    """The operation that it is by itself, in reports."""
    within: tuple[float, float] | None = None
    """Between which numbers all elements of its results are."""


_POSITIVE = (0.0, float("inf"))


def _sigmoid(x: Any) -> Any:
    return np.exp(-np.logaddexp(0, -x))


def _plain(family: Family, *names: str) -> dict[str, Operator]:
    """Return operators that numpy has by the same names."""
    return {name: Operator(family, getattr(np, name)) for name in names}


def _moved(family: Family, *names: str) -> dict[str, Operator]:
    return {name: Operator(family) for name in names}


def _counted(family: Family, kind: Kind, *names: str) -> dict[str, Operator]:
    return {name: Operator(family, counts_as=kind) for name in names}


OPERATORS: dict[str, Operator] = {
    "add": Operator("arithmetic", np.add, "add"),
    "subtract": Operator("arithmetic", np.subtract, "subtract"),
    "multiply": Operator("arithmetic", np.multiply, "multiply"),
    "divide": Operator("arithmetic", formula="divide"),
    "minimum": Operator("arithmetic", np.minimum, "minimum"),
    "maximum": Operator("arithmetic", np.maximum, "maximum"),
    "power": Operator("arithmetic", lambda a, b: np.power(np.asarray(a, "float64"), b)),
    "floor_divide": Operator("arithmetic", np.floor_divide),
    "floor_mod": Operator("arithmetic", np.mod),
    "mod": Operator("arithmetic", np.fmod),
    "dequantize": Operator("decoding"),
    "negative": Operator("function", np.negative, "minus"),
    "square": Operator("function", np.square, "square", within=_POSITIVE),
    "sqrt": Operator("function", np.sqrt, "sqrt", within=_POSITIVE),
    "rsqrt": Operator("function", FUNCTIONS["rsqrt"], "rsqrt"),
    "log": Operator("function", np.log, "log"),
    "exp": Operator("function", np.exp, "exp", "activation", _POSITIVE),
    "tanh": Operator("function", np.tanh, "tanh", "activation", (-1.0, 1.0)),
    "sigmoid": Operator("function", _sigmoid, "sigmoid", "activation", (0.0, 1.0)),
    "erf": Operator("function", erf, counts_as="activation", within=(-1.0, 1.0)),
    "sin": Operator("function", np.sin, within=(-1.0, 1.0)),
    "cos": Operator("function", np.cos, within=(-1.0, 1.0)),
    "nn.relu": Operator("function", FUNCTIONS["relu"], "relu", "activation"),
    "nn.silu": Operator("function", FUNCTIONS["silu"], "silu", "activation"),
    "nn.gelu": Operator("function", FUNCTIONS["gelu"], "gelu", "activation"),
    "nn.gelu_tanh": Operator("function", FUNCTIONS["gelu_tanh"], "gelu_tanh", "activation"),
    "nn.softplus": Operator("function", None, "softplus", "activation"),
    "nn.leakyrelu": Operator("function", counts_as="activation"),
    "abs": Operator("function", np.abs),
    "round": Operator("rounding", np.rint),
    **_plain("rounding", "floor", "ceil", "sign"),
    **_plain("comparison", "less", "less_equal", "greater", "greater_equal", "equal", "not_equal"),
    **_plain("test", "isnan", "isinf", "isfinite"),
    **_plain("logic", "logical_and", "logical_or", "logical_xor", "logical_not"),
    **_plain("bits", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    **_plain("bits", "left_shift", "right_shift"),
    "where": Operator("choice", lambda c, *sides: np.where(np.asarray(c) != 0, *sides)),
    "clip": Operator("choice", np.clip),
    "astype": Operator("cast", lambda x: x),
    **_moved("view", "reshape", "expand_dims", "squeeze", "flatten"),
    **_moved("permutation", "permute_dims"),
    **_moved("slice", "strided_slice"),
    **_moved("flip", "flip"),
    **_moved("broadcast", "broadcast_to"),
    **_moved("repetition", "repeat", "tile"),
    **_moved("split", "split"),
    **_moved("join", "concat", "stack"),
    **_moved("lookup", "take"),
    **_moved("gather", "index_tensor", "gather_elements", "gather_nd"),
    **_moved("reduction", "max", "min", "sum", "mean", "variance"),
    **_counted("norm", "norm", *(f"nn.{n}_norm" for n in ("rms", "layer", "group", "instance"))),
    "nn.softmax": Operator("softmax", counts_as="softmax", within=(0.0, 1.0)),
    "nn.log_softmax": Operator("softmax", counts_as="softmax"),
    **_counted("product", "matmul", "matmul", "einsum", "linear"),
    **_counted("product", "attention", *(f"nn.attention{n}" for n in ("", "_bias", "_var_len"))),
    **_counted("product", "convolution", *(f"nn.conv{n}d" for n in (1, 2, 3))),
    **_counted("product", "convolution", *(f"nn.conv{n}d_transpose" for n in (1, 2, 3))),
    **_counted("selection", "routing", "topk"),
}
"""By the name of the operator without ``relax.``."""


def named(*families: Family) -> tuple[str, ...]:
    """Return the full names of the operators of some families."""
    return tuple(f"relax.{name}" for name, found in OPERATORS.items() if found.family in families)


VIEWS = named("view")
"""Operators that only see a tensor in another shape."""

MOVEMENTS = named("view", "permutation", "slice", "flip", "broadcast", "repetition")
"""Operators whose results have elements of their first operand only."""

ALL_MOVEMENTS = (*MOVEMENTS, *named("split", "join", "lookup"))
"""Operators that compute nothing: their results have elements of their operands."""
