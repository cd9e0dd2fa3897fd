"""The memory that functions take for what they compute on the way, ours and TVM's."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import tvm
from tvm import ir, relax, topi

from ..matching.expressions import found_in
from ..matching.pattern import calls_in
from ..transforms.modules import functions_of, module_pass
from .record_graph import bytes_of, sizes_of_symbols


def _planned(mod: ir.IRModule, bounds: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of functions' storage, and of tensors that have storage of their own.

    Symbolic sizes count as in the rest of a report: see `sizes_of_symbols`.
    """
    found = {}
    for gvar, func in functions_of(mod, relax.Function).items():
        storage = calls_in(func, "relax.memory.alloc_storage")
        types = [relax.TensorType(call.args[0], "uint8") for call in storage]
        types += [call.ty for call in calls_in(func, "relax.builtin.alloc_tensor")]
        sizes = sizes_of_symbols(func, bounds)
        found[gvar.name_hint] = sum(bytes_of(ty, sizes) for ty in types)
    return found


@module_pass
class RecordMemory:
    """Record the memory that each function takes, once it is planned; the module stays as it is."""

    memory: MutableMapping[str, int]
    """Gets the bytes by function, of results too; not those of parameters and constants."""
    bounds: Mapping[str, int]
    """Largest values of symbolic variables."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        self.memory.update(_planned(mod, self.bounds))
        return mod


@module_pass
class RecordTVMMemory:
    """Record the memory that TVM's default pipeline would take for each function.

    declines when: the module has arrays as constants, of which TVM computes others when it
    compiles; or TVM cannot lower it.

    `memory` and `bounds` are those of `RecordMemory`.
    """

    memory: MutableMapping[str, int]
    bounds: Mapping[str, int]

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Plan a copy of `mod`, and return `mod`."""
        if any(map(_has_arrays, functions_of(mod, relax.Function).values())):
            return mod
        try:
            level = tvm.transform.PassContext.current().opt_level
            with tvm.transform.PassContext(opt_level=level):
                planned = tvm.transform.Sequential(_default_passes())(mod)
        except Exception:  # whatever TVM raises where it cannot lower a module
            return mod
        self.memory.update(_planned(planned, self.bounds))
        return mod


def _take(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Look rows up in a mode in which TVM does not warn of what nobody will run."""
    return builder.call_te(topi.take, *call.args, axis=call.attrs.axis, mode="clip")


def _has_arrays(func: relax.Function) -> bool:
    """Tell whether a function has constants other than numbers."""
    constants = found_in(func.body, ir.Constant)
    return any(isinstance(c.ty, relax.TensorType) and c.ty.ndim > 0 for c in constants)


def _default_passes() -> list[tvm.transform.Pass]:
    """Return the passes of TVM's default pipelines as far as they decide about memory."""
    lower = relax.transform
    return [
        *(relax.backend.DispatchSampling(), relax.backend.DispatchSortScan()),
        lower.LegalizeOps({"relax.take": _take}),
        *(lower.AnnotateTIROpPattern(), lower.FuseOps(), lower.FuseTIR()),
        *(lower.RewriteDataflowReshape(), lower.ToNonDataflow(), lower.RemovePurityChecking()),
        *(lower.CallTIRRewrite(), lower.StaticPlanBlockMemory()),
    ]
