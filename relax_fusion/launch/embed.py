"""The pass that turns compiled kernels into code of the library."""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import ir, tirx

from ..transforms.modules import KERNELS_ATTR, with_external_module, with_functions
from ..tvm_ir import structural_map
from .body import kernel_of_attr
from .kernel import CompiledKernel
from .launcher import alias, launcher_module

LAUNCHERS_ATTR = "relax_fusion.launchers"
"""The module attribute that tells which launchers external modules define, and how many names each
has."""


@tvm.transform.module_pass(opt_level=0, name="EmbedTritonKernels")
class EmbedTritonKernels:
    """Attach a module that launches every kernel which `call_tir_extern` compiled.

    rewrite::

        PrimFuncs with relax_fusion.triton_kernels  ->  PrimFuncs without,
                                                        module attribute external_mods + launcher

    Run it behind the passes that may still remove functions.  A module without such PrimFuncs is
    left as it is; one that got more of them since an earlier run gets another launcher, with the
    kernels that the first lacks.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with its kernels embedded."""
        kernels: dict[str, CompiledKernel] = {}
        defined = {str(k): int(n) for k, n in (mod.attrs or {}).get(LAUNCHERS_ATTR, {}).items()}
        calls = Counter(defined)
        updated = {}
        for gvar, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or KERNELS_ATTR not in (func.attrs or {}):
                continue
            launchers = set()
            for symbol, attr in func.attrs[KERNELS_ATTR].items():
                if str(symbol) not in kernels:
                    kernels[str(symbol)] = kernel_of_attr(attr)
                launchers.add(kernels[str(symbol)].launcher)
            updated[gvar] = _own_names(func.without_attr(KERNELS_ATTR), launchers, calls)
        if not updated:
            return mod
        mod = with_functions(mod, updated).with_attr(LAUNCHERS_ATTR, dict(calls))
        mine = [kernels[symbol] for symbol in sorted(kernels)]
        return with_external_module(mod, launcher_module(mine, calls, defined))


def _own_names(func: tirx.PrimFunc, launchers: set[str], calls: Counter[str]) -> tirx.PrimFunc:
    """Return `func` with a name of its own for every call of a launcher, counted in `calls`.

    TVM declares the function that ``T.call_cpacked`` names anew at every call (0.27), so LLVM
    renames all but the first, and the library would lack them.
    """

    def rename(call: ir.Call) -> ir.Call:
        name = str(call.args[0].value) if call.op.same_as(_CPACKED) else ""
        if name not in launchers:
            return call
        calls[name] += 1
        own = alias(name, calls[name] - 1)
        return ir.Call(call.op, [ir.StringImm(own), *call.args[1:]], ret_ty=call.ty)

    return func.with_body(structural_map(func.body, (ir.Call, rename), order="post"))


_CPACKED = ir.Op.get("tirx.tvm_call_cpacked")
