"""The pass that begins to compile kernels in CUDA C++ while the module is still being matched."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import tvm
from tvm import ir, tirx
from tvm.target import Target

from ..errors import RelaxFusionError
from ..hardware.target import device_of
from ..launch.cuda_source import CUDASource, compiler_of_pipeline
from ..transforms.fixed_arguments import Fixed
from ..transforms.modules import functions_of
from .emit import fused_of
from .steps import SourceStep


@tvm.transform.module_pass(opt_level=0, name="CompileAhead")
class CompileAhead:
    """Begin to compile the kernels in CUDA C++ of new fused PrimFuncs; the module stays as it is.

    Matching takes one core, and NVRTC needs no Python.  `EmitTritonKernels` takes what is there and
    tells what was wrong.  It knows more then: here weights are taken for parameters of the function
    and not for what it launches first needs, so that a kernel may turn out to be compiled in vain.

    declines when: no pipeline is running whose end would wait for the threads, or without NVRTC.

    Parameters
    ----------
    target : Target
        A CUDA target.
    """

    def __init__(self, target: Target):
        self.target = target
        self.seen: set[str] = set()

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return `mod` itself."""
        compiler = compiler_of_pipeline()
        if compiler is None:
            return mod
        for gvar, func in functions_of(mod, tirx.PrimFunc).items():
            if gvar.name_hint not in self.seen:
                self.seen.add(gvar.name_hint)
                with suppress(RelaxFusionError):
                    compiler.start(self._sources(func))
        return mod

    def _sources(self, func: tirx.PrimFunc) -> list[CUDASource]:
        fused = fused_of(func)
        if fused is None:
            return []
        fixed = Fixed((True,) * len(fused.inputs), leads=False)
        cases = replace(fused, fixed=fixed).cases(device_of(self.target))
        steps = [step for _, launched in cases for step in launched]
        return [step.source for step in steps if isinstance(step, SourceStep)]
