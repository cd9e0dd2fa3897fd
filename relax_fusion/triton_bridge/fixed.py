"""What a launch may read ahead of its turn: arguments that no kernel writes."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, relax, tirx

from ..matching.effects import Memory
from ..matching.pattern import is_call


@dataclass(frozen=True)
class Fixed:
    """What is known of a PrimFunc's arguments at all of its calls.

    Parameters
    ----------
    arguments : tuple of bool
        Whether every caller passes one of its own parameters (or a part of a tuple among them, or
        a constant), and changes it nowhere in place.
    leads : bool
        Whether it may be the first to be launched by a function: without elements, nothing is.  The
        kernel in front of it is then the caller's, which may have written what the function gets as
        a parameter.
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
        memory = Memory(func, mod)
        fixed = (memory.given | memory.constants) - memory.written
        launched: list[list[ir.Expr]] = []
        for value, always in _values(func.body):
            if is_call(value, "relax.call_tir") and value.args[0] in functions:
                sizes = _sizes(value)
                leads = not any(_implies(sizes, others) for others in launched)
                here = Fixed(tuple(memory.of(a) <= fixed for a in value.args[1].fields), leads)
                before = found.get(value.args[0], here)
                pairs = zip(before.arguments, here.arguments, strict=True)
                found[value.args[0]] = Fixed(
                    tuple(a and b for a, b in pairs), before.leads or here.leads
                )
                launched += [sizes] if always else []
    return found


def _sizes(call: relax.Call) -> list[ir.Expr]:
    """Return what must not be 0 for a call to launch anything: factors of its result's sizes."""
    ty = call.ty_args[0]
    open_sizes = list((ty.fields[0] if isinstance(ty, ir.TupleType) else ty).shape.values)
    found: list[ir.Expr] = []
    while open_sizes:
        size = open_sizes.pop()
        if isinstance(size, tirx.Mul):
            open_sizes += [size.a, size.b]
        elif not (isinstance(size, tirx.IntImm) and int(size) > 0):
            found.append(size)
    return found


def _implies(sizes: Sequence[ir.Expr], others: Sequence[ir.Expr]) -> bool:
    """Tell whether none of `others` is 0 where none of `sizes` is."""
    return all(any(tvm_ffi.structural_equal(o, s) for s in sizes) for o in others)


def _values(body: relax.Expr, always: bool = True) -> Iterator[tuple[relax.Expr, bool]]:
    """Yield all that is bound, in order, and whether it is always reached."""
    for block in body.blocks if isinstance(body, relax.SeqExpr) else ():
        for binding in block.bindings:
            yield binding.value, always
            if isinstance(binding.value, relax.If):
                yield from _values(binding.value.true_branch, False)
                yield from _values(binding.value.false_branch, False)
