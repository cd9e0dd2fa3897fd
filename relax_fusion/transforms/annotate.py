"""Small passes that attach information to a module before and after fusing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import ir, relax, tirx

from ..canonical.rewriter import UPPER
from ..errors import PipelineError, warn
from ..matching.expressions import found_in
from ..matching.pattern import calls_in, operator_of
from ..matching.shapes import as_dim, shape_of, shape_text
from ..validation import MOST_ELEMENTS
from .modules import functions_of, module_pass, with_functions
from .whole_graph import HINTS_ATTR


class UnknownVariableWarning(UserWarning):
    """A bound is for a symbolic variable that no function of the module has."""


_LOWERED = ("relax.memory.", "relax.vm.", "vm.builtin.alloc_shape_heap")
"""Memory planning and the passes behind it put calls into functions whose names begin like
these."""


@module_pass
class RefuseLowered:
    """Refuse a module that a pipeline has lowered to instructions of the VM already."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return `mod` itself."""
        for gvar, func in functions_of(mod, relax.Function).items():
            for call in found_in(func, relax.Call):
                op = call.op
                name = op.global_symbol if isinstance(op, relax.ExternFunc) else operator_of(call)
                if name.startswith(_LOWERED):
                    raise PipelineError(
                        f"function {gvar.name_hint!r} calls {name}: a pipeline has lowered it "
                        "already; compile it with relax_pipeline=None, or give the module from "
                        "before"
                    )
        return mod


@module_pass
class AttachFunctionAttrs:
    """Attach bounds of symbolic variables and CUDA graph hints to the Relax functions.

    rewrite: ``def decode(...)`` ->
    ``def decode(...): R.func_attr({"tir_var_upper_bound": ..., ...})``
    """

    bounds: Mapping[str, int]
    """Largest values of symbolic variables; they go to every function."""
    hints: Mapping[str, Sequence[str]]
    """By function name: variables that a captured CUDA graph may depend on.  A name that the module
    lacks is no error: MLC-LLM gives the same ones for every model."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with attributes; `mod` itself if there are none to attach."""
        updated, known = {}, set()
        for gvar, func in functions_of(mod, relax.Function).items():
            known |= {var.name for var in relax.analysis.defined_symbolic_vars(func)}
            if self.bounds:
                _check_sizes(func, self.bounds)
                bounds = (func.attrs or {}).get(UPPER, {})
                func = func.with_attr(UPPER, {**bounds, **self.bounds})
            if gvar.name_hint in self.hints:
                own = list((func.attrs or {}).get(HINTS_ATTR, ()))
                func = func.with_attr(HINTS_ATTR, [*own, *self.hints[gvar.name_hint]])
            updated[gvar] = func
        for name in self.bounds.keys() - known:
            told = f"which no function has; they have {', '.join(sorted(known)) or 'none'}"
            warn(f"variable_bounds names {name!r}, {told}", UnknownVariableWarning)
        return with_functions(mod, updated) if self.bounds or self.hints else mod


@module_pass
class AttachAdditionalPrimFuncs:
    """Add PrimFuncs to the module under given names, callable from outside.

    rewrite: ``module`` -> ``module; @T.prim_func def name(...)`` for each name
    """

    functions: Mapping[str, tirx.PrimFunc]
    """By the names that they get; a name that the module has already is refused."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with the functions; refuse a name that is taken."""
        taken = {g.name_hint for g in mod.get_global_vars()}
        for name in self.functions:
            if name in taken:
                raise PipelineError(f"additional_tirs names {name!r}, which the module has already")
        new = {
            ir.GlobalVar(name): func.with_attr("global_symbol", name)
            for name, func in self.functions.items()
        }
        return with_functions(mod, new) if new else mod


@module_pass
class AttachMetadata:
    """Add a function ``_metadata`` that returns a JSON string, as MLC-LLM's engine expects.

    The planned memory of each function, in bytes, is part of it.

    rewrite: ``module`` -> ``module; def _metadata(): return R.str("{...}")``
    """

    metadata: Mapping[str, Any]
    """What to attach, JSON-serialisable; nothing is added if it is empty."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with the function; `mod` itself if there is no metadata."""
        if not self.metadata:
            return mod
        content = {**self.metadata, "memory_usage": _memory_usage(mod)}
        builder = relax.BlockBuilder(mod)
        with builder.function("_metadata", params=[]):
            builder.emit_func_output(ir.StringImm(json.dumps(content)))
        return builder.get()


def _check_sizes(func: relax.Function, bounds: Mapping[str, int]) -> None:
    """Refuse bounds with which a tensor would have more bytes than 64 bits can count."""
    for var in relax.analysis.all_vars(func):
        shape = shape_of(var)
        if shape is None:
            continue
        sizes = [as_dim(size, bounds) for size in shape]
        most = math.prod(d if isinstance(d, int) else d.upper or 1 for d in sizes)
        if most > MOST_ELEMENTS:
            raise PipelineError(
                f"variable_bounds give {var.name}, of shape {shape_text(shape)}, {most} elements; "
                f"at most {MOST_ELEMENTS} are possible"
            )


def _memory_usage(mod: ir.IRModule) -> dict[str, int]:
    """Sum the bytes of the storage that the planner allocated in each function."""
    usage = {}
    for gvar, func in functions_of(mod, relax.Function).items():
        storage = calls_in(func, "relax.memory.alloc_storage")
        sizes = [d for call in storage for d in call.args[0].values]
        usage[gvar.name_hint] = sum(int(d) for d in sizes if isinstance(d, tirx.IntImm))
    return usage
