"""The sources of kernels: recorded for a report, and compiled while the module is still matched."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import field, replace
from functools import partial

from tvm import ir, tirx
from tvm.target import Target

from ..errors import RelaxFusionError
from ..estimator.tile_plan import PLAN_ATTR
from ..hardware.target import device_of
from ..launch.cuda_source import CUDASource, compiler_of_pipeline
from ..report.material import Source, Text
from ..transforms.fixed_arguments import Fixed
from ..transforms.modules import functions_of, module_pass
from .emit import fused_of
from .launches import AnyStep, SourceStep


@module_pass
class RecordSources:
    """Record in `sources` where the texts of all kernels come from; the module stays as it is.

    It has to come behind `ScheduleKernels` and in front of `EmitTritonKernels`.  Nothing is
    compiled, and no text is written before it is asked for.
    """

    target: Target
    sources: list[Source]

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Look at every PrimFunc of `mod`, and return it."""
        for gvar, func in functions_of(mod, tirx.PrimFunc).items():
            load = partial(_texts, gvar.name_hint, func, self.target)
            self.sources.append(Source(gvar.name_hint, load))
        return mod


def _texts(name: str, func: tirx.PrimFunc, target: Target) -> list[Text]:
    """Return each text once: of launches in their order, then of scheduled loops.

    Loops that wait for a back end to emit kernels in their place are no kernel's text.
    """
    fused, attrs = fused_of(func), func.attrs or {}
    cases = fused.cases(device_of(target)) if fused is not None else ()
    texts = [_text(step) for _, launched in cases for step in launched]
    if bool(attrs.get("tirx.is_scheduled", 0)) or PLAN_ATTR not in attrs:
        texts.append(Text(name, "TVMScript", func.script(show_meta=False)))
    return list(dict.fromkeys(texts))


def _text(step: AnyStep) -> Text:
    if isinstance(step, SourceStep):
        return Text(step.source.entry, "CUDA C++", step.source.text)
    function = step.function
    return Text(function.fn.__name__, "Triton", str(function.src))


@module_pass
class CompileAhead:
    """Begin to compile the kernels in CUDA C++ of new fused PrimFuncs; the module stays as it is.

    Matching takes one core, and NVRTC needs no Python.  `EmitTritonKernels` takes what is there and
    tells what was wrong.  It knows more then: here weights are taken for parameters of the function
    and not for what it launches first needs, so that a kernel may turn out to be compiled in vain.

    declines when: no pipeline is running whose end would wait for the threads, or without NVRTC.
    """

    target: Target
    seen: set[str] = field(default_factory=set, init=False)

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
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
        every = (True,) * len(fused.inputs)
        fixed = Fixed(every, False, every)
        cases = replace(fused, fixed=fixed).cases(device_of(self.target))
        steps = [step for _, launched in cases for step in launched]
        return [step.source for step in steps if isinstance(step, SourceStep)]
