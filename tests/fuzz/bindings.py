"""Functions as lists of bindings, which are written again after a change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import ir, relax

from relax_fusion.equivalence.sizes import variables
from relax_fusion.matching.effects import free_vars

Binding = tuple[relax.Var, relax.Expr, bool]
"""What is bound, its value, and whether it is a MatchCast."""

Bindings = list[Binding]

SIZES = {"seq_len": 5, "total_len": 7, "batch_size": 2, "m": 6, "c": 9, "b": 2, "s": 5, "t": 7}
"""Values of symbolic sizes by name; that of ``is6`` is 6, of others 3."""


def value_of(size: Any) -> int:
    """Return what a size is at run time: a number, or a variable."""
    name = getattr(size, "name", "")
    return int(size) if not name else int(name[2:]) if name[:2] == "is" else SIZES.get(name, 3)


@dataclass(frozen=True)
class Function:
    """A Relax function.

    Parameters
    ----------
    params : tuple of relax.Var
        What it is called with.
    bindings : tuple of (relax.Var, relax.Expr, bool)
        In order.
    results : tuple of relax.Var
        What it returns.
    base : IRModule
        The functions that it calls.
    cut : int, optional
        The binding with which a second dataflow block begins.
    dataflow : bool
        Whether the bindings are in dataflow blocks at all.
    bounds : mapping of str to int
        The largest values of symbolic sizes.
    """

    params: tuple[relax.Var, ...]
    bindings: tuple[Binding, ...]
    results: tuple[relax.Var, ...]
    base: ir.IRModule = field(default_factory=ir.IRModule)
    cut: int | None = None
    dataflow: bool = True
    bounds: Mapping[str, int] = field(default_factory=dict)

    def module(self) -> ir.IRModule:
        """Return a module in which this is ``main``; types are inferred anew."""
        builder = relax.BlockBuilder(self.base)
        known: dict[relax.Var, relax.Expr] = {}
        with builder.function("main", list(self.params)):
            ends = [len(self.bindings)] if self.cut is None else [self.cut, len(self.bindings)]
            begin = 0
            for end in ends:
                self._block(builder, (begin, end), known)
                begin = end
            results = [known.get(v, v) for v in self.results]
            builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
        return builder.get()

    def _block(
        self, builder: relax.BlockBuilder, span: tuple[int, int], known: dict[relax.Var, Any]
    ) -> None:
        begin, end = span
        if begin == end:
            return
        later = {v for _, value, _ in self.bindings[end:] for v in free_vars(value)}
        later |= set(self.results)
        if self.dataflow:
            with builder.dataflow():
                _emit(builder, self.bindings[begin:end], known, later)
        else:
            _emit(builder, self.bindings[begin:end], known, set())

    def script(self) -> str:
        """Return the function as TVMScript."""
        return str(self.module()["main"].script())


def _emit(
    builder: relax.BlockBuilder,
    bindings: Sequence[Binding],
    known: dict[relax.Var, Any],
    later: set[relax.Var],
) -> None:
    for var, value, is_cast in bindings:
        new = substituted(value, known)
        if is_cast:
            made = builder.match_cast(new, var.ty)
            if var in later:
                made = builder.emit_output(made)
        elif var in later:
            made = builder.emit_output(new)
        else:
            made = builder.emit(new)
        known[var] = made


def substituted(expr: Any, known: Mapping[relax.Var, relax.Expr]) -> Any:
    """Return an expression with other variables in it; the types of calls are left open."""
    if isinstance(expr, ir.Var):
        return known.get(expr, expr)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([substituted(f, known) for f in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(substituted(expr.tuple_value, known), int(expr.index))
    if isinstance(expr, relax.Call) and isinstance(
        expr.op, ir.Op | ir.GlobalVar | relax.ExternFunc
    ):
        args = [substituted(a, known) for a in expr.args]
        return relax.Call(expr.op, args, expr.attrs, expr.ty_args)
    return expr


def pruned(function: Function) -> Function:
    """Drop the bindings that no result needs, but those that overwrite something; and parameters.

    Parameters that say what a symbolic size is stay.
    """
    needed = set(function.results)
    kept: list[Binding] = []
    for binding in reversed(function.bindings):
        var, value, _ = binding
        if var in needed or writes(value) or isinstance(var.ty, relax.ShapeType):
            kept.append(binding)
            needed |= set(free_vars(value))
    params = tuple(p for p in function.params if p in needed or _tells_sizes(p))
    return replace(function, bindings=tuple(kept[::-1]), params=params, cut=None)


def writes(value: Any) -> bool:
    """Tell whether a value overwrites one of its operands."""
    return (
        isinstance(value, relax.Call)
        and isinstance(value.op, ir.Op)
        and value.op.name in ("relax.call_tir_inplace", "relax.call_inplace_packed")
    )


def _tells_sizes(param: relax.Var) -> bool:
    ty = param.ty
    if isinstance(ty, relax.TensorType):
        return bool(variables(ty.shape.values))
    return isinstance(ty, relax.ShapeType)


def smaller(function: Function) -> Iterator[Function]:
    """Yield functions that are one step simpler, the much simpler ones first."""
    if len(function.results) > 1:
        for result in function.results:
            yield pruned(replace(function, results=(result,)))
    if function.cut is not None:
        yield replace(function, cut=None)
    inner = [n for n, (v, _, _) in enumerate(function.bindings)]
    middle = len(inner) // 2
    if len(function.results) == 1:
        for n in (*inner[-2:-1], *inner[middle:], *inner):
            var = function.bindings[n][0]
            if isinstance(var.ty, relax.TensorType) and var not in function.results:
                yield pruned(replace(function, results=(var,)))
    for n in (*inner[:middle][::-1], *inner[middle:]):
        yield from _without(function, n)


def _without(function: Function, number: int) -> Iterator[Function]:
    """Yield functions in which a binding is a parameter, or its first operand."""
    var, value, _ = function.bindings[number]
    rest = (*function.bindings[:number], *function.bindings[number + 1 :])
    if isinstance(var.ty, relax.TensorType) and var not in function.results:
        yield pruned(replace(function, bindings=rest, params=(*function.params, var)))
    for source in free_vars(value):
        if source.ty == var.ty:
            known = {var: source}
            others = tuple((v, substituted(e, known), c) for v, e, c in rest)
            results = tuple(dict.fromkeys(known.get(r, r) for r in function.results))
            if all(any(r.same_as(v) for v, _, _ in others) for r in results):
                yield pruned(replace(function, bindings=others, results=results))
            return


def of(func: relax.Function, base: ir.IRModule) -> Function:
    """Return a function of a module as a list of bindings."""
    bindings = tuple(
        (b.var, b.value, isinstance(b, relax.MatchCast))
        for block in func.body.blocks
        for b in block.bindings
    )
    body = func.body.body
    results = tuple(body.fields) if isinstance(body, relax.Tuple) else (body,)
    return Function(tuple(func.params), bindings, results, base)
