"""Three calls for a module that somebody brings: `partition`, `tuning.tune`, `build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.target import Target

from .errors import ModuleTypeError
from .options import PipelineOptions, make_options
from .phases import recovered, run_once, run_phases
from .pipeline import PHASES
from .validation import shown


def partition(mod: ir.IRModule, target: Target | str | None = None, **pipeline: Any) -> ir.IRModule:
    """Put fused kernels in the place of the chains of a module, and leave the rest as it is.

    These are the first two phases of the pipeline.  What is left are operators of Relax, for other
    passes, or for `build`.

    Parameters
    ----------
    mod : tvm.IRModule
        A Relax module, of static or dynamic shapes; it is not modified.
    target : Target or str, optional
        A target, or a name that `relax_fusion.make_target` knows; the target in scope by default.
    **pipeline
        Other arguments of the pipeline: ``database``, ``disable``, ``variable_bounds``, ...

    Returns
    -------
    tvm.IRModule
        The module with calls of the fused kernels.

    Raises
    ------
    ModuleTypeError
        If `mod` is no module; the message says how to get one.
    PipelineError
        If an argument is unknown or has a value that it cannot take.
    TargetError
        If no device is known for the target.
    """
    check_module(mod)
    return run_phases(make_options(target, pipeline), PHASES[:2])(mod)


def build(
    mod: ir.IRModule, target: Target | str | None = None, **pipeline: Any
) -> tvm.runtime.Executable:
    """Compile a module, partitioned or not, by the whole pipeline.

    Parameters
    ----------
    mod, target, **pipeline
        As of `partition`.

    Returns
    -------
    tvm.runtime.Executable
        For `tvm.relax.VirtualMachine`, or to be exported.

    Raises
    ------
    ModuleTypeError, PipelineError, TargetError
        As `partition`.
    """
    check_module(mod)

    def compiled(options: PipelineOptions) -> tvm.runtime.Executable:
        @tvm.transform.module_pass(opt_level=0, name="relax_fusion")
        def phases(mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
            return run_once(options, PHASES, mod)

        return tvm.compile(mod, options.target, relax_pipeline=phases)

    return recovered(compiled, make_options(target, pipeline))


_FILE = "read it by relax_fusion.frontends.read_model, and pass the result's .mod"
_TORCH = "relax_fusion.frontends.torch.from_exported_program"
_BY_CLASS = {
    "torch.nn.modules.module.Module": f"export it by torch.export.export, and call {_TORCH}",
    "torch.export.exported_program.ExportedProgram": f"call {_TORCH} first",
    "tvm.relax.frontend.nn.core.Module": "call its export_tvm first",
    "onnx.onnx_ml_pb2.ModelProto": "call tvm.relax.frontend.onnx.from_onnx first, or save it and "
    + _FILE,
}
"""What makes a module of an object, by the full name of its class, whose package is not imported
for it."""


def check_module(given: Any) -> None:
    """Refuse what is no module.

    Raises `ModuleTypeError` if it is none; the message says how to get one.
    """
    if not isinstance(given, ir.IRModule):
        kind = type(given)
        what = "None" if given is None else f"a {kind.__module__}.{kind.__qualname__}"
        raise ModuleTypeError(f"mod is {what}; must be a tvm.IRModule: {_advice(given)}")


def _advice(given: Any) -> str:
    if isinstance(getattr(given, "mod", None), ir.IRModule):
        return "pass its .mod"
    if isinstance(given, relax.Function):
        return "pass tvm.IRModule.from_expr(function)"
    if isinstance(given, tirx.PrimFunc):
        return "call it by R.call_tir in a function of Relax, in a module with both"
    if isinstance(given, str | Path):
        return f"{shown(str(given))} may be a file; {_FILE}"
    classes = [f"{each.__module__}.{each.__qualname__}" for each in type(given).__mro__]
    found = next((_BY_CLASS[name] for name in classes if name in _BY_CLASS), None)
    return found or "write one in TVMScript, or import a model by relax_fusion.frontends.read_model"
