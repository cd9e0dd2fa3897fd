"""What a launch may read ahead of its turn: arguments that no kernel writes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from tvm import ir, relax, tirx
from tvm.target import Target

from ..compute import description
from ..hardware.target import device_of, is_gpu
from ..matching.effects import Memory
from ..matching.expressions import found_in
from ..matching.pattern import is_call
from ..matching.stages import is_view
from ..tvm_ir import SBlockRealize, structural_equal
from .modules import bindings_of, functions_of, module_pass, with_functions
from .parts import marked_parts, part_of

CALLS = "tirx.tvm_call_", "tirx.call_extern"
"""Operators of these names, or whose names begin so, call what may have effects of its own."""

FIXED_ATTR = "relax_fusion.fixed_arguments"
"""PrimFunc attribute: the fields of `Fixed`."""


@dataclass(frozen=True)
class Fixed:
    """What is known of a PrimFunc's arguments at all of its calls."""

    arguments: tuple[bool, ...]
    """Whether every caller passes one of its own parameters (or a part of a tuple among them, or a
    constant), and changes it nowhere in place."""
    leads: bool
    """Whether it may be the first to be launched by a function: without elements, nothing is.  The
    kernel in front of it is then the caller's, which may have written what the function gets as a
    parameter."""
    settled: tuple[bool, ...]
    """Whether every argument is written before the kernel in front of the function's begins: behind
    what wrote it last, another one waits that is surely launched."""

    @classmethod
    def of(cls, func: tirx.PrimFunc) -> Fixed | None:
        """Return what the attribute of a function says, None if it has none."""
        found = (func.attrs or {}).get(FIXED_ATTR)
        if found is None:
            return None
        arguments, settled = (tuple(map(bool, found[name])) for name in ("arguments", "settled"))
        return cls(arguments, bool(found["leads"]), settled)

    def to_attr(self) -> dict[str, object]:
        """Return the attribute."""
        settled = list(self.settled)
        return {"arguments": list(self.arguments), "leads": self.leads, "settled": settled}

    def both(self, other: Fixed) -> Fixed:
        """Return what is known of the arguments at the calls of both."""
        fixed, settled = (
            tuple(a and b for a, b in zip(one, two, strict=True))
            for one, two in ((self.arguments, other.arguments), (self.settled, other.settled))
        )
        return Fixed(fixed, self.leads or other.leads, settled)


@module_pass
class MarkFixedArguments:
    """Tell fused functions which of their arguments no kernel writes.

    rewrite: ``f(x, w, out)`` -> ``f(x, w, out)`` with the attribute `FIXED_ATTR`

    Their kernels then ask for weights before the kernel in front of them has ended.

    declines when: the device, a function's own or the one given, has no launches that begin early.
    """

    target: Target

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with its fused functions marked."""
        if not device_of(self.target).capabilities.dependent_launch:
            return mod
        funcs = functions_of(mod, tirx.PrimFunc)
        launching = {gvar for gvar, func in funcs.items() if self._launches(func)}
        marked = {
            gvar: funcs[gvar].with_attr(FIXED_ATTR, fixed.to_attr())
            for gvar, fixed in fixed_arguments(mod, launching).items()
            if description(funcs[gvar]) is not None
        }
        return with_functions(mod, marked)

    def _launches(self, func: tirx.PrimFunc) -> bool:
        """Tell whether all that a function does is to launch kernels, at least one.

        Reshapes become views.  What calls others may launch nothing itself.
        """
        if not is_gpu((func.attrs or {}).get("target", self.target)):
            return False
        if not isinstance(func.body, SBlockRealize) or any(
            not isinstance(call.op, ir.Op) or call.op.name.startswith(CALLS)
            for call in found_in(func.body, ir.Call)
        ):
            return False
        return not is_view(func)


def fixed_arguments(
    mod: ir.IRModule, functions: Container[ir.GlobalVar]
) -> dict[ir.GlobalVar, Fixed]:
    """Return what is known of the arguments of each of `functions` that is called.

    Those are PrimFuncs, called by ``R.call_tir``, each of which launches a kernel that waits for
    the one in front.
    """
    found: dict[ir.GlobalVar, Fixed] = {}
    marked = marked_parts(mod)
    for _, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        memory = Memory(func, mod)
        fixed = (memory.given | memory.constants) - memory.written
        launched: list[list[ir.Expr]] = []
        filled: dict[int, int] = {}  # how many were launched when a place had been written
        whole: dict[ir.Expr, ir.Expr] = {}  # of which kernels read a part
        for binding, in_branch in bindings_of(func.body):
            value = binding.value
            if (part := part_of(marked, value)) is not None:
                whole[binding.var] = part[0]
            if is_call(value, "relax.call_tir") and value.args[0] in functions:
                sizes = _sizes(value)
                args = [memory.of(whole.get(a, a)) for a in value.args[1].fields]
                here = Fixed(
                    tuple(places <= fixed for places in args),
                    not _is_behind(sizes, launched),
                    tuple(
                        places.isdisjoint(memory.written)
                        and _is_behind(
                            sizes, launched[max((filled.get(p, 0) for p in places), default=0) :]
                        )
                        for places in args
                    ),
                )
                before = found.get(value.args[0])
                found[value.args[0]] = here if before is None else before.both(here)
                launched += [] if in_branch else [sizes]
            for place in memory.of(binding.var):
                filled.setdefault(place, len(launched))
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


def _is_behind(sizes: Sequence[ir.Expr], launched: Sequence[Sequence[ir.Expr]]) -> bool:
    """Tell whether one of some calls launches a kernel where a call of these sizes does."""
    return any(
        all(any(structural_equal(o, s) for s in sizes) for o in others) for others in launched
    )
