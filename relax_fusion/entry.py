"""Three calls for a module that somebody brings: `partition`, `tuning.tune`, `build`."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import ir
from tvm.target import Target

from .given import check_module
from .options import PipelineOptions, make_options
from .phases import run_once, run_phases
from .pipeline import PHASES
from .recovery import recovered


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
