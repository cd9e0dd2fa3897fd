"""What the pipeline can be told, and the checks of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import tvm
from pydantic import AfterValidator, InstanceOf, SkipValidation
from tvm import tirx
from tvm.relax.frontend.nn import ExternModule
from tvm.target import Target

from .algebra import AlgebraOptions
from .canonical import CANONICAL
from .errors import PipelineError
from .estimator.database import Database, Measured
from .estimator.family import Backend
from .hardware.target import has_triton, is_cuda, make_target
from .launch.nvrtc import Nvrtc, find_nvrtc, require_nvrtc
from .passes import PATTERNS
from .passes.allowed import require_int8_rows, require_tf32
from .passes.options import Bound, FuseOptions, Plans
from .report import Report
from .transforms.debug_dump import Wanted
from .validation import Natural, check, plain, shown
from .workload.expert_load import ExpertLoad, read_expert_load

_TOLD = {"cublas_gemm", "allreduce_strategy", "variable_bounds", "use_cuda_graph", "backend"}
_TOLD |= {"dump_functions", "dump_phases"}
_TOLD |= {"database", "disable", "cubins", "always_fuse", "allow_tf32", "validate", "exact"}
_TOLD |= {"allow_int8_rows", "expert_load"}
"""Fields that a dump tells of."""


def _demand(holds: Callable[[Any], bool], needs: str) -> AfterValidator:
    """Return a check of a field's value that is no matter of its type."""

    def demand(value: Any) -> Any:
        if not holds(value):
            raise ValueError(needs)
        return value

    return AfterValidator(demand)


_OTHERS = (
    *("RouteExperts", "FuseDequantize", "FoldReshapes"),
    "FuseTransposeMatmul",
    *("FoldConstants", "MarkFixedArguments", "ReturnReshapedViews", "RewriteReshapes"),
    *("CompileAhead", "CaptureCUDAGraphs", "RecordGraph", "RecordWork", "ReportLeftovers"),
    *("RecordKernels", "AppendInAttention", "MoveViews", "JoinRotations"),
    *("LayOutWeights", "AddInPlace"),
)
"""Other passes of ours without which a module computes the same."""

_KEY = re.compile("[0-9a-f]{8}")


def optional_passes() -> list[str]:
    """Return the names of the passes that may be left out, in the order in which they run."""
    return [*CANONICAL, *PATTERNS, *_OTHERS]


def known_pass(name: str) -> str:
    """Return what can be left out: the name of a pass, or the key of a workload.

    Raises `ValueError` if it is neither.
    """
    if name not in optional_passes() and not _KEY.fullmatch(name):
        known = ", ".join([*CANONICAL, "RouteExperts", *PATTERNS])
        raise ValueError(f"must be one of {known}, or a workload key (8 hex digits)")
    return name


PassName = Annotated[str, AfterValidator(known_pass)]
Identifier = Annotated[str, _demand(str.isidentifier, "must be an identifier")]
Unavailable = Annotated[
    bool, _demand(lambda wanted: not wanted, "must be False: TVM's wheels lack these kernels")
]


@dataclass(frozen=True)
class PipelineOptions:
    """Everything that the pipeline can be told.

    Parameters
    ----------
    target : Target
        What to compile for.
    flashinfer, faster_transformer : bool
        Taken for MLC-LLM's sake.  Their kernels are not part of TVM's wheels: True is refused.
    cublas_gemm : bool
        Hand matmuls that no pass of ours took to cuBLAS; refused where TVM was built without.
    allreduce_strategy : int
        Strategy of `relax.transform.IPCAllReduceRewrite`; 0 for none.
    variable_bounds : mapping of str to int
        Largest values of symbolic variables, for memory planning and for the estimator.
    use_cuda_graph : bool
        On CUDA, record launches whose shapes are static as CUDA graphs, and replay them in later
        calls: a decoder's projections between two attentions, while its prefill with a symbolic
        length stays as it is.  A graph holds the addresses of the weights, the parameters behind
        the function's ``num_input``; passing others costs another recording.  A PassContext with
        the option ``relax.backend.use_cuda_graph`` is obeyed instead, as by TVM's own pipelines.
    cuda_graph_symbolic_capture_hints : mapping of str to list of str
        By function: symbolic variables, such as a batch size, for each value of which a CUDA graph
        may be recorded; they need a bound in `variable_bounds`, so that memory can be planned.
        Functions that the module lacks are passed over, as MLC-LLM does.
    additional_tirs : mapping of str to PrimFunc
        Added to the module under these names.
    metadata : mapping
        Attached, as JSON, as the function ``_metadata``.
    ext_mods : sequence of ExternModule
        Linked into the library.
    debug_dump : Path, optional
        Directory for ``debug-phase0.py`` to ``debug-phase4.py`` and ``debug-final.py``, for
        ``passes.json`` (what each pass changed), and for ``report.json``.
    dump_functions, dump_phases : tuple of str
        What is dumped: functions, with those that they call, and phases, by what their files have
        behind ``debug-phase``, or ``final``; all by default.
    backend : {"auto", "tir", "triton"}
        Which families of kernels are looked at.  By default all that the device has, of which for
        each size the one of the least price is taken; "tir": scheduled TIR alone; "triton": Triton
        and CUDA C++, and TIR where these have no kernel.
    plans : mapping of str to TilePlan or PlanTable
        Plans that replace the estimator's, by workload key or pass name.
    database : Path, optional
        A tuning database, as `relax_fusion.tune` writes it: where plans were measured, the fastest
        is taken.
    expert_load : Path, optional
        How many rows went to each expert, as ``relax-fusion workloads --record`` writes it: plans
        of matmuls by experts are chosen for that.
    allow_tf32 : bool
        Let tensor cores multiply float32 as tf32, with 10 bits of mantissa, as PyTorch does with
        ``torch.backends.cuda.matmul.allow_tf32``; refused where the target has none.
    allow_int8_rows : bool
        Let CPUs round rows to int8, each by its largest number, in front of weights of 4 and 8
        bits: many rows take a third of the time, and results err by about a hundredth.  Refused
        where the target has neither AVX-512 VNNI nor AVX-VNNI.
    cubins : bool
        On CUDA, compile TVM's kernels now and not when the library is loaded, so that it runs
        where no Python is.
    always_fuse : bool
        Fuse also where the estimator predicts a loss: to look at kernels, or to measure them.
    exact : bool
        Keep to algebraic rules that round as `docs/numerics.md` says; False allows others, whose
        results may overflow, or lose digits, where the graph's do not.
    validate : bool or "strict"
        Interpret what every kernel replaces beside what it computes, by numpy, and leave a chain
        alone where they differ; "strict" raises `EquivalenceError` there.
    disable : iterable of str
        Names of passes that are left out: fusing ones, and those of `relax_fusion.canonical`; and
        keys of workloads, whose chains are left alone.
    report : Report, optional
        Receives every decision, and which rule scheduled which function.
    progress : callable, optional
        Called with a sentence at the start of each phase.
    """

    target: Target
    flashinfer: Unavailable = False
    cublas_gemm: bool = False
    faster_transformer: Unavailable = False
    allreduce_strategy: Natural = 0
    variable_bounds: Mapping[str, Bound] = field(default_factory=dict)
    use_cuda_graph: bool = True
    cuda_graph_symbolic_capture_hints: Mapping[str, Sequence[str]] = field(default_factory=dict)
    additional_tirs: Mapping[Identifier, tirx.PrimFunc] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ext_mods: Sequence[ExternModule] = ()
    debug_dump: Path | None = None
    dump_functions: tuple[str, ...] = ()
    dump_phases: tuple[str, ...] = ()
    backend: Backend = "auto"
    plans: Annotated[Plans, SkipValidation] = field(default_factory=dict)
    database: Path | None = None
    expert_load: Path | None = None
    disable: tuple[PassName, ...] = ()
    cubins: bool = False
    always_fuse: bool = False
    allow_tf32: bool = False
    allow_int8_rows: bool = False
    exact: bool = True
    validate: bool | Literal["strict"] = False
    report: InstanceOf[Report] | None = None
    progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        check(self, PipelineError)
        if self.backend == "triton" and not has_triton(self.target):
            raise PipelineError(
                f"backend {self.backend!r} needs a CUDA target, sm_80 or newer: {self.target}"
            )
        if self.allow_tf32:
            require_tf32(self.target)
        if self.allow_int8_rows:
            require_int8_rows(self.target)
        if self.cubins and is_cuda(self.target):
            require_nvrtc()
        if self.cublas_gemm and tvm.get_global_func("relax.ext.cublas", True) is None:
            raise PipelineError("cublas_gemm=True needs a TVM that was built with cuBLAS")
        try:
            json.dumps(dict(self.metadata), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as err:
            raise PipelineError(f"metadata is {shown(self.metadata)}; not JSON: {err}") from err
        if self.debug_dump is not None and not _can_be_named(self.debug_dump):
            raise PipelineError(f"debug_dump is {shown(str(self.debug_dump))}; must be a directory")
        if self.debug_dump is None and (self.dump_functions or self.dump_phases):
            name = "dump_functions" if self.dump_functions else "dump_phases"
            raise PipelineError(f"{name} needs debug_dump: the directory of the dump")
        self._check_plans()

    def _check_plans(self) -> None:
        """Refuse the name of a plan that could never be asked for, such as a misspelt pass."""
        _ = self.fuse  # checks the plans themselves
        for name in self.plans:
            if name not in PATTERNS and not _KEY.fullmatch(str(name)):
                raise PipelineError(
                    f"plans names {shown(name)}; it must be a workload key (8 hex digits) or one "
                    f"of {', '.join(PATTERNS)}"
                )

    @property
    def fuse(self) -> FuseOptions:
        """The part that the fusing passes see."""
        decisions = self.report.decisions if self.report is not None else None
        return FuseOptions(
            self.target,
            self.plans,
            self.variable_bounds,
            decisions,
            self.always_fuse,
            self.backend if self.uses_triton else "tir",
            self.allow_tf32,
            self.validate,
            self.measured,
            self.disable,
            self.allow_int8_rows,
            self.expert_counts,
        )

    @property
    def algebra(self) -> AlgebraOptions:
        """The part that the pass of algebraic rules sees."""
        rewrites = self.report.rewrites if self.report is not None else None
        bounds = self.variable_bounds
        return AlgebraOptions(self.target, bounds, self.exact, self.validate, rewrites)

    @cached_property
    def measured(self) -> Measured | None:
        """What the database has of the target, as it was when it was first asked for."""
        return Database(self.database).measured(str(self.target)) if self.database else None

    @cached_property
    def expert_counts(self) -> ExpertLoad | None:
        """How many rows went to each expert, as the file says when it is first asked for."""
        return read_expert_load(self.expert_load) if self.expert_load else None

    @property
    def nvrtc(self) -> Nvrtc | None:
        """What compiles CUDA kernels ahead of time; None if they are compiled on load."""
        return find_nvrtc() if self.cubins and is_cuda(self.target) else None

    @property
    def uses_triton(self) -> bool:
        """Whether fused kernels may be others than scheduled TIR."""
        return self.backend != "tir" and has_triton(self.target)


def dumped(options: PipelineOptions, files: Sequence[str]) -> Wanted:
    """Return what is to be dumped; `files` are those of the phases that there are.

    Raises `PipelineError` if a phase is to be dumped that there is not.
    """
    wanted = Wanted(options.debug_dump, options.dump_functions, options.dump_phases)
    wanted.check_phases(files)
    return wanted


def choices(options: PipelineOptions) -> dict[str, str]:
    """Return the model, if it is known, and what is not as by default, as text for people."""
    model = options.report.material.model if options.report is not None else ""
    told = {"model": model} if model else {}
    told["target"] = str(options.target)
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name in _TOLD and value != _default(each):
            told[each.name] = _text(value)
    return told


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _text(value: Any) -> str:
    """Return the value of a simple field as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _can_be_named(path: Path) -> bool:
    """Tell whether the operating system could have a file of that name."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def make_options(target: Target | str | None, kwargs: dict[str, Any]) -> PipelineOptions:
    """Check the names of the arguments and bring their values into the types of the fields."""
    known = [f.name for f in fields(PipelineOptions)]
    unknown = [name for name in kwargs if name not in known]
    if unknown:
        raise PipelineError(
            f"the pipeline has no argument {unknown[0]!r}; it takes {', '.join(known)}"
        )
    given = {k: v for k, v in kwargs.items() if v is not None}
    if target is None:
        target = Target.current(allow_none=True)
        if target is None:
            raise PipelineError("no target: pass target=... or call within `with target:`")
    for name in ("debug_dump", "database", "expert_load"):
        if isinstance(given.get(name), str | os.PathLike):
            given[name] = Path(given[name])
    if "debug_dump" in given:  # the report is written beside the modules
        given.setdefault("report", Report())
    bounds = given.get("variable_bounds")
    if isinstance(bounds, Mapping):
        given["variable_bounds"] = {name: plain(bound) for name, bound in bounds.items()}
    for name in ("disable", "dump_functions", "dump_phases"):
        if isinstance(given.get(name), str):
            given[name] = (given[name],)
        elif isinstance(given.get(name), Iterable):
            given[name] = tuple(given[name])
    return PipelineOptions(make_target(target), **given)
