"""Running the phases of a pipeline: their passes in turn, with dumps and a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import ir
from tvm.ir.transform import Pass

from .launch.cuda_source import source_compiler
from .matching.known_effects import known_effects
from .options import PipelineOptions, choices, dumped
from .recovery import recovered
from .transforms.debug_dump import phase_runner, reported
from .transforms.running import CALLER, as_themselves, enter, no_cycles_collected

Phase = tuple[str, Callable[[PipelineOptions], list[Pass]], str]
"""The file that a dump writes behind a phase, the function of its passes, what it is doing."""


def run_phases(options: PipelineOptions, phases: Sequence[Phase]) -> Pass:
    """Return a pass that runs phases in turn, and dumps the module and the report, if asked.

    Parameters
    ----------
    options : PipelineOptions
        What each phase is given.
    phases : sequence of tuple
        As in `PHASES`.
    """
    dumped(options, [file for file, *_ in phases])

    @tvm.transform.module_pass(opt_level=0, name="relax_fusion")
    def run(mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        return recovered(lambda chosen: run_once(chosen, phases, mod), options)

    return run


def run_once(options: PipelineOptions, phases: Sequence[Phase], mod: ir.IRModule) -> ir.IRModule:
    """Run phases in turn; where one fails, raise."""
    target, wanted = options.target, dumped(options, [file for file, *_ in phases])
    dump = phase_runner(wanted, mod, choices(options))
    report = reported(options.report, target, options.fuse.backend, options.debug_dump)
    with report, target, no_cycles_collected(), known_effects(), source_compiler(), dump as perform:
        for file, phase, doing in phases:
            if options.progress is not None:
                enter(CALLER)
                with as_themselves():
                    options.progress(doing)
            passes = [one for one in phase(options) if one.info.name not in options.disable]
            mod = perform(file, doing, passes, mod)
    enter("")
    return mod
