"""What a launch may read ahead of its turn: arguments that no kernel writes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from tvm import ir, relax

CALL_TIR = ir.Op.get("relax.call_tir")
CALL_TIR_INPLACE = ir.Op.get("relax.call_tir_inplace")


@dataclass(frozen=True)
class Fixed:
    """What is known of a PrimFunc's arguments at all of its calls.

    Parameters
    ----------
    arguments : tuple of bool
        Whether every caller passes one of its own parameters (or a part of a tuple among them, or
        a constant), and changes it nowhere in place.
    leads : bool
        Whether it may be the first to be launched by a function.  The kernel in front of it is then
        the caller's, which may have written what the function gets as a parameter.
    """

    arguments: tuple[bool, ...]
    leads: bool


def fixed_arguments(
    mod: ir.IRModule, functions: Container[ir.GlobalVar]
) -> dict[ir.GlobalVar, Fixed]:
    """Return what is known of the arguments of each of `functions` that is called.

    Parameters
    ----------
    mod : IRModule
        Relax functions and what they call.
    functions : container of GlobalVar
        PrimFuncs, called by ``R.call_tir``, each of which launches a kernel that waits for the one
        in front.
    """
    found: dict[ir.GlobalVar, Fixed] = {}
    for _, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        bindings = list(_bindings(func.body))
        given = _given(func, bindings)
        leads = True
        for _, value, always in bindings:
            if _calls(value, CALL_TIR) and value.args[0] in functions:
                here = Fixed(tuple(_is_fixed(a, given) for a in value.args[1].fields), leads)
                before = found.get(value.args[0], here)
                pairs = zip(before.arguments, here.arguments, strict=True)
                found[value.args[0]] = Fixed(
                    tuple(a and b for a, b in pairs), before.leads or here.leads
                )
                leads = leads and not always
    return found


_Binding = tuple[relax.Var, relax.Expr, bool]


def _bindings(body: relax.Expr, always: bool = True) -> Iterator[_Binding]:
    """Yield variable and value of all bindings, in order, and whether they are always reached."""
    for block in body.blocks if isinstance(body, relax.SeqExpr) else ():
        for binding in block.bindings:
            yield binding.var, binding.value, always
            if isinstance(binding.value, relax.If):
                yield from _bindings(binding.value.true_branch, False)
                yield from _bindings(binding.value.false_branch, False)


def _given(func: relax.Function, bindings: list[_Binding]) -> set[relax.Var]:
    """Return the variables that stand for parameters, without those that a call may change."""
    source = {param: param for param in func.params}
    changed: set[relax.Var] = set()
    for var, value, _ in bindings:
        same = value.tuple_value if isinstance(value, relax.TupleGetItem) else value
        if isinstance(same, relax.Var) and same in source:
            source[var] = source[same]
        elif isinstance(value, relax.Call) and _may_write(value):
            changed |= {source[v] for v in _variables(value.args) if v in source}
    return {var for var, param in source.items() if param not in changed}


def _may_write(call: relax.Call) -> bool:
    """Tell whether a call may change an argument: in place, or out of sight."""
    return _calls(call, CALL_TIR_INPLACE) or not isinstance(call.op, ir.Op)


def _variables(args: Iterable[relax.Expr]) -> Iterator[relax.Var]:
    for arg in args:
        if isinstance(arg, relax.Var):
            yield arg
        elif isinstance(arg, relax.Tuple):
            yield from _variables(arg.fields)


def _calls(value: relax.Expr, op: ir.Op) -> bool:
    return isinstance(value, relax.Call) and value.op.same_as(op)


def _is_fixed(arg: relax.Expr, given: set[relax.Var]) -> bool:
    return isinstance(arg, ir.GenericConst) or (isinstance(arg, relax.Var) and arg in given)
