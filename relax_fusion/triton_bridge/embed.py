"""The pass that turns compiled kernels into code of the library."""

from __future__ import annotations

import tvm
from tvm import ir, tirx

from .kernel import CompiledKernel
from .launcher import launcher_module
from .prim_func import KERNELS_ATTR, kernel_of_attr


@tvm.transform.module_pass(opt_level=0, name="EmbedTritonKernels")
class EmbedTritonKernels:
    """Attach a module that launches every kernel which `call_tir_extern` compiled.

    rewrite::

        PrimFuncs with relax_fusion.triton_kernels  ->  PrimFuncs without,
                                                        module attribute external_mods + launcher

    Run it once, behind the passes that may still remove functions.  A module without such
    PrimFuncs is left as it is.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with its kernels embedded."""
        kernels: dict[str, CompiledKernel] = {}
        updated = {}
        for gvar, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or KERNELS_ATTR not in (func.attrs or {}):
                continue
            for symbol, attr in func.attrs[KERNELS_ATTR].items():
                if str(symbol) not in kernels:
                    kernels[str(symbol)] = kernel_of_attr(attr)
            updated[gvar] = func.without_attr(KERNELS_ATTR)
        if not updated:
            return mod
        mod = ir.IRModule({**dict(mod.functions_items()), **updated}, attrs=mod.attrs)
        there = list((mod.attrs or {}).get("external_mods", []))
        launcher = launcher_module(kernels[symbol] for symbol in sorted(kernels))
        return mod.with_attr("external_mods", [*there, launcher])
