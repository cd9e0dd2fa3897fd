"""The texts of the kernels that a PrimFunc with plans for Triton launches, for a report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import tvm
from tvm import ir, tirx
from tvm.target import Target

from ..estimator.tile_plan import PLAN_ATTR
from ..hardware.target import device_of, has_triton
from ..inventory.record_graph import RecordSources
from ..report.material import Source, Text
from ..transforms.modules import functions_of
from .emit import fused_of
from .steps import AnyStep, SourceStep


@tvm.transform.module_pass(opt_level=0, name="RecordTritonSources")
@dataclass(frozen=True)
class RecordTritonSources:
    """Record where the texts of Triton's and CUDA's kernels come from; the module stays as it is.

    It has to come in front of `EmitTritonKernels`.  Nothing is compiled.

    Parameters
    ----------
    target : Target
        A CUDA target.
    sources : list of Source
        Gets one for each PrimFunc that has kernels of Triton's back end.
    """

    target: Target
    sources: list[Source]

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Look at every PrimFunc of `mod`, and return it."""
        for gvar, func in functions_of(mod, tirx.PrimFunc).items():
            if (func.attrs or {}).get(PLAN_ATTR) is not None:
                load = partial(_texts, func, self.target)
                self.sources.append(Source(gvar.name_hint, load))
        return mod


def record_sources(target: Target, sources: list[Source]) -> list[ir.transform.Pass]:
    """Return the passes that tell a report where the texts of all kernels are; they write none.

    Parameters
    ----------
    target : Target
        What is compiled for.
    sources : list of Source
        As in `RecordTritonSources`.
    """
    triton = [RecordTritonSources(target, sources)] if has_triton(target) else []
    return [*triton, RecordSources(sources)]


def _texts(func: tirx.PrimFunc, target: Target) -> list[Text]:
    """Return each text once, in the order of the launches."""
    fused = fused_of(func)
    if fused is None:
        return []
    steps = (step for _, launched in fused.cases(device_of(target)) for step in launched)
    return list(dict.fromkeys(_text(step) for step in steps))


def _text(step: AnyStep) -> Text:
    if isinstance(step, SourceStep):
        return Text(step.source.entry, "CUDA C++", step.source.text)
    function = step.function
    return Text(function.fn.__name__, "Triton", str(function.src))
