"""Running the phases of a pipeline; a step that fails is left out.

What compiles without this library compiles with it, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import tvm
from tvm import ir
from tvm.ir.transform import Pass

from .errors import (
    DatabaseError,
    EquivalenceError,
    MissingPackageError,
    PipelineError,
    TargetError,
    TilePlanError,
    TuningError,
    VersionError,
    warn,
)
from .launch.cuda_source import source_compiler
from .matching.known_effects import known_effects
from .options import PipelineOptions, choices, dumped, optional_passes
from .report import LeftOut, Material, Report
from .transforms.debug_dump import phase_runner, reported
from .transforms.running import CALLER, as_themselves, enter, no_cycles_collected, running
from .validation import printable

Phase = tuple[str, Callable[[PipelineOptions], list[Pass]], str]
"""The file that a dump writes behind a phase, the function of its passes, and what it is doing."""


def run_phases(options: PipelineOptions, phases: Sequence[Phase]) -> Pass:
    """Return a pass that runs phases in turn, and dumps the module and the report, if asked."""
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


_NOT_OURS = (
    *(PipelineError, TargetError, TilePlanError, EquivalenceError, DatabaseError, TuningError),
    *(MissingPackageError, VersionError, MemoryError),
)
"""The caller is told of these errors at once: bad arguments, wrong kernels where checks are strict,
and what leaving a pass out would not help."""

_MOST = 8
"""At most this many steps are left out one after the other, because each failed, before all are."""

_PREFIX = "relax_fusion:"

Made = TypeVar("Made")


def recovered(attempt: Callable[[PipelineOptions], Made], options: PipelineOptions) -> Made:
    """Compile; where that fails, compile without the step of ours that fails.

    A pass of ours that fails itself is left out, and so is a chain of which no kernel can be made.
    Where another pass fails, or TVM behind the passes, all of ours are left out, then half of those
    that may be the reason, and so on, until one or a few are left.  Each is in `Report.left_out`,
    and a `RuntimeWarning` names them.  A chain to which the caller gave a plan is not left out.
    Where that warning is made an error, by ``warnings.filterwarnings("error", "relax_fusion:")``,
    nothing is left out: the error is raised.

    `attempt`: compiles with some options, of which `disable` differs.
    Raises what the first attempt raised, if nothing of ours is the reason; its message says in
    which pass.
    """
    tries = _Tries(attempt, options)
    if tries.succeed(()):
        return tries.made[-1]
    first = tries.failed[-1]
    if _is_strict():
        raise first.error
    found = _told(tries) or _searched(tries)
    if found is None:
        raise _named(first)
    if tries.last != (*found,):
        tries.succeed(found)
    names = "; ".join(map(str, tries.left_out(found)))
    warn(f"{_PREFIX} compiled without {names}")
    return tries.made[-1]


@dataclass(frozen=True)
class _Failure:
    """What an attempt raised, in which pass, and making the kernel of which workload."""

    error: Exception
    where: str
    chain: str

    @property
    def culprit(self) -> str:
        """What may be left out and failed itself; empty if it is not known."""
        return self.chain or (self.where if self.where in optional_passes() else "")


class _Tries(Generic[Made]):
    """Attempts without some steps, each of which begins with the report as it was."""

    def __init__(self, attempt: Callable[[PipelineOptions], Made], options: PipelineOptions):
        self.attempt, self.options = attempt, options
        self.made: list[Made] = []
        self.failed: list[_Failure] = []
        self.last: tuple[str, ...] = ()
        self.reasons: dict[str, _Failure] = {}
        self.before = _copied(options.report) if options.report is not None else None

    def succeed(self, left: Iterable[str]) -> bool:
        """Compile without some steps; tell whether that works."""
        self.last, report = (*left,), self.options.report
        if report is not None and self.before is not None:
            _restore(report, self.before)
            report.left_out += self.left_out(self.last)
        enter("")
        try:
            disable = tuple(dict.fromkeys((*self.options.disable, *self.last)))
            self.made = [self.attempt(replace(self.options, disable=disable))]
        except _NOT_OURS:
            raise
        except Exception as err:
            where, chain = running()
            if where == CALLER:
                raise
            self.failed.append(_Failure(err, where, chain))
            return False
        return True

    def left_out(self, left: Iterable[str]) -> list[LeftOut]:
        """Return records of what is left out, with what failed where it was not."""
        found = []
        for name in left:
            why = self.reasons.get(name, self.failed[0])
            text = next((line for line in str(why.error).splitlines() if line.strip()), "")
            error = printable(f"{type(why.error).__name__}: {text.strip()}")
            found.append(LeftOut(name, why.where or "code generation", error))
        return found


def _copied(report: Report) -> Report:
    """Return a copy of a report, with lists of its own."""
    material = Material(**{name: copy(value) for name, value in vars(report.material).items()})
    return Report(**{**{n: copy(v) for n, v in vars(report).items()}, "material": material})


def _restore(report: Report, before: Report) -> None:
    """Forget what was added to a report since a copy was made; its lists stay the same objects."""
    for mine, old in ((report.material, before.material), (report, before)):
        for name, value in vars(old).items():
            own = getattr(mine, name)
            if isinstance(own, list):
                own[:] = value
            elif isinstance(own, dict):
                own.clear()
                own.update(value)
            elif own is not report.material:
                setattr(mine, name, value)


def _told(tries: _Tries[Made]) -> list[str] | None:
    """Leave out, one after the other, what fails itself; None if that does not help."""
    left: list[str] = []
    while len(left) < _MOST:
        name = tries.failed[-1].culprit
        if name in left:  # a kernel that the caller gave a plan
            raise tries.failed[-1].error
        if not name:
            return None
        left.append(name)
        tries.reasons[name] = tries.failed[-1]
        if tries.succeed(left):
            return left
    return None


def _searched(tries: _Tries[Made]) -> list[str] | None:
    """Find by halves what to leave out, if all that is ours; None if that does not help."""
    known = list(tries.reasons)
    suspects = [
        *known,
        *(n for n in optional_passes() if n not in {*tries.options.disable, *known}),
    ]
    if not tries.succeed(suspects):
        return None
    while len(suspects) > 1:
        half = len(suspects) // 2
        parts: Sequence[list[str]] = (suspects[:half], suspects[half:])
        part = next((part for part in parts if tries.succeed(part)), None)
        if part is None:
            break
        suspects = part
    return suspects


def _is_strict() -> bool:
    """Tell whether the warning would be an error."""
    with warnings.catch_warnings(record=True):
        try:
            warnings.warn(_PREFIX, RuntimeWarning, stacklevel=1)
        except RuntimeWarning:
            return True
    return False


def _named(failure: _Failure) -> Exception:
    """Return an error whose message says in which pass it was raised."""
    error, where = failure.error, failure.where or "code generation, behind all passes"
    told = f"in {where}, and without the passes of relax_fusion as well"
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n({told})", *error.args[1:])
    else:
        error.args = (*error.args, f"({told})")
    return error
