"""The operations that transformers are made of, wherever they stand and however they are written.

What is recognised here is more than what any pass fuses: a report asks what was left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from tvm import relax

from ..report.coverage import Kind
from .activations import activation
from .constants import binary, scalar
from .linear import linear
from .movements import static_slice
from .norms import normalisation
from .pattern import BlockView, Refused, is_call
from .rotation import rotation_at
from .shapes import dtype_of, same_shape, shape_of

OPERATORS: dict[str, Kind] = {
    **dict.fromkeys(("relax.matmul", "relax.einsum", "relax.linear"), "matmul"),
    **dict.fromkeys((f"relax.nn.{n}_norm" for n in ("rms", "layer", "group", "instance")), "norm"),
    **dict.fromkeys(("relax.nn.softmax", "relax.nn.log_softmax"), "softmax"),
    **dict.fromkeys((f"relax.nn.attention{n}" for n in ("", "_bias", "_var_len")), "attention"),
    **dict.fromkeys((f"relax.nn.{n}" for n in ("silu", "gelu", "gelu_tanh")), "activation"),
    **dict.fromkeys((f"relax.nn.{n}" for n in ("relu", "leakyrelu", "softplus")), "activation"),
    **dict.fromkeys((f"relax.{n}" for n in ("tanh", "sigmoid", "erf", "exp")), "activation"),
}
"""Operators that are such an operation by themselves."""

MOVES = {
    f"relax.{name}"
    for name in (
        *("reshape", "permute_dims", "expand_dims", "squeeze", "flatten", "broadcast_to"),
        *("strided_slice", "split", "concat", "stack", "astype", "memory.view"),
    )
}
"""Operators that only move or cast elements."""

_JOINS = ("relax.concat", "relax.stack")
_MOST_STEPS = 16
"""How far a rotation's moves are followed."""


@dataclass(frozen=True)
class Operation:
    """An operation: what it is, the bindings that it takes, the last of them its result."""

    kind: Kind
    covers: tuple[relax.Var, ...]
    written_out: bool = False

    @property
    def var(self) -> relax.Var:
        """Its result."""
        return self.covers[-1]


def operations(view: BlockView, is_kernel: Callable[[relax.Expr], bool]) -> Iterator[Operation]:
    """Return the operations of a block, in the order of their results.

    Parameters
    ----------
    view : BlockView
        The block.
    is_kernel : callable
        Whether a value is the call of a fused kernel, which is not looked into.
    """
    found: list[Operation] = []
    inside: set[relax.Var] = set()
    for binding in reversed(view.bindings):
        var, value = binding.var, binding.value
        if var in inside or isinstance(value, relax.Var) or is_kernel(value):
            continue
        operation = _operation(view, var)
        if operation is not None:
            found.append(operation)
            inside.update(operation.covers)
    yield from reversed(found)


def _operation(view: BlockView, var: relax.Var) -> Operation | None:
    """Return the operation whose result `var` is."""
    value = view.defs[var]
    if is_call(value, *OPERATORS):
        kind = OPERATORS[value.op.name]
        return Operation(kind, (var,)) if kind != "activation" or "float" in dtype_of(var) else None
    if is_call(value, "relax.call_tir"):
        return Operation("matmul", (var,)) if _is_projection(view, var) else None
    for kind, read in _WRITTEN_OUT:
        covers = read(view, var)
        if covers is not None:
            return Operation(kind, (*(v for v in covers if v is not var), var), True)
    return None


def _is_projection(view: BlockView, var: relax.Var) -> bool:
    try:
        return linear(view, var) is not None
    except Refused:
        return True


def _norm(view: BlockView, var: relax.Var) -> tuple[relax.Var, ...] | None:
    """Read ``x / sqrt(mean(..) + eps)``, over whatever axes."""
    try:
        norm = normalisation(view, var)
    except Refused:
        return (var,)
    if norm is not None:
        return norm.covers
    for _, factor in binary(view, var, "relax.multiply"):
        root = view.call(factor, "relax.rsqrt", "relax.power")
        if root is not None and _is_mean(view, root.args[0]):
            return (factor, var)
    quotient = view.call(var, "relax.divide")
    root = view.call(quotient.args[1], "relax.sqrt") if quotient is not None else None
    return (var,) if root is not None and _is_mean(view, root.args[0]) else None


def _is_mean(view: BlockView, expr: relax.Expr) -> bool:
    """Tell whether a value is ``mean(..) + eps`` or ``variance(..) + eps``."""
    return any(
        scalar(view, eps) is not None
        and view.call(mean, "relax.mean", "relax.variance") is not None
        for mean, eps in binary(view, expr, "relax.add")
    )


def _softmax(view: BlockView, var: relax.Var) -> tuple[relax.Var, ...] | None:
    """Read ``exp(x) / sum(exp(x))``."""
    quotient = view.call(var, "relax.divide")
    if quotient is None or view.call(quotient.args[0], "relax.exp") is None:
        return None
    total = view.call(quotient.args[1], "relax.sum")
    same = total is not None and total.args[0].same_as(quotient.args[0])
    return (quotient.args[0], quotient.args[1], var) if same else None


def _rope(view: BlockView, var: relax.Var) -> tuple[relax.Var, ...] | None:
    """Read a rotation of pairs of features, however far apart they are.

    Either a sum of products where one factor is the other's, moved and negated in part; or parts
    put together of which one is ``a c - b s`` and another ``b c + a s``.
    """
    found = rotation_at(view, var)
    if found is not None:
        return found.covers
    for plain, turned in binary(view, var, "relax.add"):
        for source, _ in binary(view, plain, "relax.multiply"):
            for moved, _ in binary(view, turned, "relax.multiply"):
                if same_shape(shape_of(source), shape_of(moved)) and _turns(view, moved, source):
                    return (plain, turned, var)
    call = view.call(var, *_JOINS)
    if call is None or not isinstance(call.args[0], relax.Tuple):
        return None
    parts = [root_of(view, field)[0] for field in call.args[0].fields]
    return (*parts, var) if any(_are_turned(view, a, b) for a in parts for b in parts) else None


def _turns(view: BlockView, moved: relax.Expr, source: relax.Expr) -> bool:
    """Tell whether `moved` is parts of `source` put together, some of them negated."""
    root, stack, met = root_of(view, source)[0], [moved], set()
    for _ in range(_MOST_STEPS):
        expr = root_of(view, stack.pop())[0] if stack else root
        if expr.same_as(root):
            met.add("source")
            continue
        call = view.call(expr, *_JOINS, "relax.negative", "relax.multiply")
        if is_call(call, *_JOINS) and isinstance(call.args[0], relax.Tuple):
            met.add("joined")
            stack.extend(call.args[0].fields)
        elif call is not None:
            factors = [scalar(view, a) for a in call.args]
            if is_call(call, "relax.negative") or -1.0 in factors:
                met.add("negated")
            stack += [a for a, factor in zip(call.args, factors, strict=True) if factor is None]
    return met == {"source", "joined", "negated"}


def _are_turned(view: BlockView, first: relax.Expr, second: relax.Expr) -> bool:
    """Read ``a c - b s`` and ``b c + a s``."""
    minus, plus = view.call(first, "relax.subtract"), view.call(second, "relax.add")
    if minus is None or plus is None:
        return False
    products = [view.call(arg, "relax.multiply") for arg in (*minus.args, *plus.args)]
    if any(p is None for p in products):
        return False
    sources = [{_elements(view, a) for a in p.args} for p in products if p is not None]
    ac, bs = sources[:2]
    return any(
        len(ac & bc) == len(bs & bc) == len(ac & as_) == len(bs & as_) == 1
        for bc, as_ in (sources[2:], sources[:1:-1])
    )


def _elements(view: BlockView, expr: relax.Expr) -> Hashable:
    """Return what tells tensors apart by their elements: a part by what it is of, and where."""
    while (
        call := view.call(expr, "relax.reshape", "relax.expand_dims", "relax.astype")
    ) is not None:
        expr = call.args[0]
    value = view.definition(expr)
    if isinstance(value, relax.TupleGetItem):
        return value.tuple_value, int(value.index)
    cut = static_slice(view, expr)
    return expr if cut is None else (cut.source, cut.axis, cut.start, cut.stop)


def _activation(view: BlockView, var: relax.Var) -> tuple[relax.Var, ...] | None:
    found = activation(view, var)
    return found.covers if found is not None and "float" in dtype_of(var) else None


_WRITTEN_OUT: tuple[
    tuple[Kind, Callable[[BlockView, relax.Var], tuple[relax.Var, ...] | None]], ...
] = (("norm", _norm), ("softmax", _softmax), ("rope", _rope), ("activation", _activation))


def root_of(view: BlockView, expr: relax.Expr) -> tuple[relax.Expr, list[str]]:
    """Return what moves and casts made `expr` of, and their operators from there on."""
    steps: list[str] = []
    while True:
        value = view.definition(expr)
        if isinstance(value, relax.TupleGetItem):
            expr = value.tuple_value
        elif is_call(value, *MOVES) and not isinstance(value.args[0], relax.Tuple):
            steps.append(value.op.name.removeprefix("relax."))
            expr = value.args[0]
        else:
            return expr, steps[::-1]
