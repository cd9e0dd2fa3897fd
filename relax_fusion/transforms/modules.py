"""Modules with other functions: everything else that a module carries stays as it is.

Besides functions, a module has attributes, external modules among them, and global infos, which
hold its virtual devices.  A module that is built anew from its functions loses them, and then
whatever names a virtual device fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from ..matching.effects import Memory
from ..tvm_ir import structural_map

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Return a decorator that does nothing: only type checkers want to know."""
        return lambda decorator: decorator


EXTERNAL_MODULES = "external_mods"
"""Module attribute: what TVM links into the library."""

OPAQUE = 8
"""TVM's OpPatternKind of a PrimFunc that FuseOps fuses with no other."""

KERNELS_ATTR = "relax_fusion.triton_kernels"
"""PrimFunc attribute: the kernels that the function launches, by symbol, as JSON and image."""

APPEND_ATTR = "relax_fusion.append"
"""PrimFunc attribute: at which head of what is appended ``keys`` and ``values`` begin."""


@dataclass_transform(frozen_default=True)
def module_pass(cls: type) -> Any:
    """Make a pass of TVM, of the name of a class whose fields are its options.

    Parameters
    ----------
    cls : type
        A `FusingPass`, or a class whose `_rewrite` takes a module, and returns another or the same.

    Returns
    -------
    type
        A pass of TVM, made with the values of the fields.
    """

    def transform_module(self: Any, mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
        return self._rewrite(mod)

    if not hasattr(cls, "transform_module"):
        cls.transform_module = transform_module  # type: ignore[attr-defined]
    return tvm.transform.module_pass(dataclass(frozen=True)(cls), opt_level=0)


def functions_of(mod: ir.IRModule, kind: type) -> dict[ir.GlobalVar, Any]:
    """Return the functions of a kind, such as ``relax.Function``, by their variables."""
    return {gvar: func for gvar, func in mod.functions_items() if isinstance(func, kind)}


def bindings_of(body: relax.Expr, in_branch: bool = False) -> Iterator[tuple[relax.Binding, bool]]:
    """Yield the bindings of a body in order, and whether each is in a branch of a condition.

    Those of both branches come in front of their condition.
    """
    for block in body.blocks if isinstance(body, relax.SeqExpr) else ():
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from bindings_of(binding.value.true_branch, True)
                yield from bindings_of(binding.value.false_branch, True)
            yield binding, in_branch


def is_narrow(func: tirx.PrimFunc) -> bool:
    """Tell whether a parameter of a function has a size that is no int64."""
    sizes = [d for p in func.params if tirx.is_buffer_var(p) for d in p.ty.shape]
    return any(str(d.ty.dtype) != "int64" for d in sizes)


def rewritten(
    mod: ir.IRModule, mutator: relax.PyExprMutator, *, memory: bool = False
) -> ir.IRModule:
    """Return the module of `mutator` with each Relax function of `mod` as it rewrites that.

    With `memory`, the mutator is given before the function's name, and what it does to memory.
    """
    for gvar, func in functions_of(mod, relax.Function).items():
        if memory:
            mutator.function, mutator.memory = gvar.name_hint, Memory(func, mod)
        mutator.builder_.update_func(gvar, mutator.visit_expr(func))
    return mutator.builder_.get()


def with_kernels(
    mod: ir.IRModule,
    mutator: relax.PyExprMutator,
    schedule: Callable[[tirx.PrimFunc], tirx.PrimFunc],
) -> ir.IRModule:
    """Return `mod` as a mutator rewrites it that lists PrimFuncs it has `made`, these scheduled.

    Where it has made none, that is `mod` itself.
    """
    new = rewritten(mod, mutator, memory=True)
    if not mutator.made:
        return mod
    for gvar, func in functions_of(new, relax.Function).items():
        new.update_func(gvar, relax.analysis.remove_all_unused(func))
    for gvar in mutator.made:
        new.update_func(gvar, schedule(new[gvar]))
    return new


def with_functions(
    mod: ir.IRModule,
    functions: Mapping[ir.GlobalVar, ir.BaseFunc],
    without: Iterable[ir.GlobalVar] = (),
) -> ir.IRModule:
    """Return a copy of `mod` with some functions removed, and then others replaced or added.

    A variable of the module replaces its function, a new one adds a function.
    """
    copy = mod.clone()
    for gvar in without:
        del copy[gvar]
    for gvar, func in functions.items():
        copy.update_func(gvar, func)
    return copy


def mapped(mod: ir.IRModule, *rewrite: Any) -> ir.IRModule:
    """Return `mod` with the nodes of PrimFuncs rewritten, from the leaves on.

    Each pair is a type and what takes a node of it and returns what stands in its place; one after
    the other.  A PrimFunc in which nothing is rewritten stays the same object.
    """
    updated = {}
    for gvar, func in functions_of(mod, tirx.PrimFunc).items():
        body = func.body
        for pair in rewrite:
            body = structural_map(body, pair, order="post")
        if not body.same_as(func.body):
            updated[gvar] = func.with_body(body)
    return with_functions(mod, updated)


def with_external_module(mod: ir.IRModule, library: tvm_ffi.Module) -> ir.IRModule:
    """Return a copy of `mod` that links `library` too."""
    there = (mod.attrs or {}).get(EXTERNAL_MODULES, [])
    return mod.with_attr(EXTERNAL_MODULES, [*there, library])


def kept(var: relax.Var) -> relax.Binding:
    """Return a binding that reads `var` in an impure call, which no pass removes."""
    copy = relax.Call(relax.ExternFunc("vm.builtin.copy"), [var], ty_args=[var.ty])
    copy = relax.BlockBuilder().normalize(copy)
    return relax.VarBinding(relax.Var(f"{var.name}_kept", copy.ty), copy)


def module_of(functions: Mapping[ir.GlobalVar, ir.BaseFunc]) -> ir.IRModule:
    """Return a module of functions alone, to make one of them that goes into another module."""
    return ir.IRModule(dict(functions))
