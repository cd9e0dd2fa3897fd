"""The pipeline ``relax_fusion``: six phases, each a function that returns a list of passes.

The phases and their keyword arguments are those of MLC-LLM's pipeline, so that one can stand in for
the other.  A user can take five of the functions and replace one::

    with target:
        for phase in (phase0_annotate, phase1_fuse, my_phase2, phase3_tir, phase4_schedule, ...):
            mod = tvm.transform.Sequential(phase(options))(mod)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.ir.transform import Pass
from tvm.s_tir import dlight as dl
from tvm.target import Target

from .annotate import AttachAdditionalPrimFuncs, AttachFunctionAttrs, AttachMetadata
from .dlight_rules import AttentionRule, ContractionRule, CPUSpatialRule, ScalarMatmulRule
from .errors import PipelineError
from .legalize import LEGALIZE_MAP, FoldReshapes, FuseTransposeMatmul, UnshareTransposes
from .lowering import FuseOptions, Plans
from .passes import PATTERNS
from .report import Report
from .target import is_cpu, is_cuda, make_target

BACKENDS = ("auto", "tir", "triton")


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
    cuda_graph_symbolic_capture_hints : mapping of str to list of str
        By function: symbolic variables whose values a CUDA graph may be captured for.
    additional_tirs : mapping of str to PrimFunc
        Added to the module under these names.
    metadata : mapping
        Attached, as JSON, as the function ``_metadata``.
    ext_mods : sequence of ExternModule
        Linked into the library.
    debug_dump : Path, optional
        Directory for ``debug-phase0.py`` to ``debug-phase4.py`` and ``debug-final.py``.
    backend : {"auto", "tir", "triton"}
        Who emits fused kernels.
    plans : mapping of str to TilePlan or PlanTable
        Plans that replace the estimator's, by workload key or pass name.
    always_fuse : bool
        Fuse also where the estimator predicts a loss: to look at kernels, or to measure them.
    disable : iterable of str
        Names of passes that are left out.
    report : Report, optional
        Receives every decision.
    progress : callable, optional
        Called with a sentence at the start of each phase.
    """

    target: Target
    flashinfer: bool = False
    cublas_gemm: bool = False
    faster_transformer: bool = False
    allreduce_strategy: int = 0
    variable_bounds: Mapping[str, int] = field(default_factory=dict)
    cuda_graph_symbolic_capture_hints: Mapping[str, Sequence[str]] = field(default_factory=dict)
    additional_tirs: Mapping[str, tirx.PrimFunc] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ext_mods: Sequence[Any] = ()
    debug_dump: Path | None = None
    backend: str = "auto"
    plans: Plans = field(default_factory=dict)
    disable: tuple[str, ...] = ()
    always_fuse: bool = False
    report: Report | None = None
    progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        """Refuse values that no phase could honour."""
        if self.backend not in BACKENDS:
            raise PipelineError(f"backend is {self.backend!r}; it must be one of {BACKENDS}")
        if self.backend == "triton":
            raise PipelineError("backend 'triton' has no kernels in this version; use 'tir'")
        unknown = sorted(set(self.disable) - set(PATTERNS))
        if unknown:
            raise PipelineError(
                f"disable names {unknown[0]!r}; the passes are {', '.join(PATTERNS)}"
            )
        for name, ok in (("flashinfer", False), ("faster_transformer", False)):
            if getattr(self, name) and not ok:
                raise PipelineError(f"{name}=True needs kernels that TVM's wheels do not have")
        if self.cublas_gemm and tvm.get_global_func("relax.ext.cublas", True) is None:
            raise PipelineError("cublas_gemm=True needs a TVM that was built with cuBLAS")
        self._check_bounds()
        self._check_plans()

    def _check_bounds(self) -> None:
        if not isinstance(self.variable_bounds, Mapping):
            raise PipelineError(f"variable_bounds is {self.variable_bounds!r}; must be a mapping")
        for name, value in self.variable_bounds.items():
            fits = isinstance(value, int) and not isinstance(value, bool)
            if not fits or not 1 <= value < 2**63:
                detail = f"is {value!r}; it must be an integer >= 1 that fits 64 bits"
                raise PipelineError(f"variable_bounds[{name!r}] {detail}")

    def _check_plans(self) -> None:
        """Refuse the name of a plan that could never be asked for, such as a misspelt pass."""
        _ = self.fuse  # checks the plans themselves
        for name in self.plans:
            if name not in PATTERNS and not re.fullmatch(r"[0-9a-f]{8}", str(name)):
                raise PipelineError(
                    f"plans names {name!r}; it must be a workload key (8 hex digits) or one of "
                    f"{', '.join(PATTERNS)}"
                )

    @property
    def fuse(self) -> FuseOptions:
        """The part that the fusing passes see."""
        decisions = self.report.decisions if self.report is not None else None
        return FuseOptions(
            self.target, self.plans, self.variable_bounds, decisions, self.always_fuse
        )


def phase0_annotate(options: PipelineOptions) -> list[Pass]:
    """Attach what later phases need to know: bounds, capture hints, extra functions, the target."""
    return [
        AttachFunctionAttrs(options.variable_bounds, options.cuda_graph_symbolic_capture_hints),
        AttachAdditionalPrimFuncs(options.additional_tirs),
        tirx.transform.BindTarget(options.target),
    ]


def phase1_fuse(options: PipelineOptions) -> list[Pass]:
    """Rewrite the operator graph: our patterns first, then libraries for what is left."""
    passes: list[Pass] = [
        relax.transform.ConvertToDataflow(min_size=1),
        relax.transform.CanonicalizeBindings(),
    ]
    passes += [make(options.fuse) for name, make in PATTERNS.items() if name not in options.disable]
    if options.cublas_gemm:
        from tvm.relax.backend.cuda.cublas import partition_for_cublas

        passes += [
            ir.transform.module_pass(lambda mod, _: partition_for_cublas(mod), opt_level=0),
            relax.transform.RunCodegen(),
        ]
    return [*passes, FoldReshapes(), UnshareTransposes(), FuseTransposeMatmul()]


def phase2_lower(options: PipelineOptions) -> list[Pass]:
    """Turn the remaining operators into PrimFuncs and fuse the element-wise ones, as TVM does."""
    del options
    return [
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        relax.transform.LegalizeOps(dict(LEGALIZE_MAP)),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]


def phase3_tir(options: PipelineOptions) -> list[Pass]:
    """Clean up on the level of PrimFuncs."""
    del options
    return [relax.transform.DeadCodeElimination()]


def phase4_schedule(options: PipelineOptions) -> list[Pass]:
    """Schedule every PrimFunc: ours by their plans, the others by safe rules."""
    rules = [ContractionRule(), AttentionRule()]
    if is_cpu(options.target):
        rules += [CPUSpatialRule()]
    else:
        rules += [
            ScalarMatmulRule(),
            dl.gpu.GEMV(),
            dl.gpu.Reduction(),
            dl.gpu.GeneralReduction(),
            dl.gpu.Fallback(),
        ]
    return [dl.ApplyDefaultSchedule(*rules)]


def phase5_bytecode(options: PipelineOptions) -> list[Pass]:
    """Lower Relax to VM bytecode: memory planning, CUDA graphs, shapes, external modules."""
    passes: list[Pass] = [
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
    ]
    if options.allreduce_strategy:
        passes.append(relax.transform.IPCAllReduceRewrite(options.allreduce_strategy))
    passes += [relax.transform.StaticPlanBlockMemory(), AttachMetadata(dict(options.metadata))]
    if is_cuda(options.target):
        passes += [relax.transform.RewriteCUDAGraph(), relax.transform.LowerGPUIPCAllocStorage()]
    passes += [
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]
    if options.ext_mods:
        passes.append(relax.transform.AttachExternModules(list(options.ext_mods)))
    return passes


PHASES: tuple[tuple[str, Callable[[PipelineOptions], list[Pass]], str], ...] = (
    ("debug-phase0.py", phase0_annotate, "annotating"),
    ("debug-phase1.py", phase1_fuse, "fusing operators"),
    ("debug-phase2.py", phase2_lower, "lowering to TIR"),
    ("debug-phase3.py", phase3_tir, "cleaning up TIR"),
    ("debug-phase4.py", phase4_schedule, "scheduling kernels"),
    ("debug-final.py", phase5_bytecode, "lowering to VM bytecode"),
)
"""The phases in order: the file that a dump writes after each, the function, what it is doing."""


@relax.register_pipeline("relax_fusion")
def relax_fusion_pipeline(target: Target | str | None = None, **kwargs: Any) -> Pass:
    """Make the pipeline; what ``relax.get_pipeline("relax_fusion", target=..., ...)`` calls.

    Parameters
    ----------
    target : Target or str, optional
        A target, or a name that `relax_fusion.make_target` knows; the target in scope by default.
    **kwargs
        The other fields of `PipelineOptions`; None stands for a field's default.

    Returns
    -------
    tvm.transform.Pass
        Takes a Relax module, gives one that `tvm.compile` builds.

    Raises
    ------
    PipelineError
        If an argument is unknown or has a value that it cannot take.
    TargetError
        If no device is known for the target.
    """
    options = _options(target, kwargs)

    @tvm.transform.module_pass(opt_level=0, name="relax_fusion")
    def run(mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        with options.target:
            for file, phase, doing in PHASES:
                if options.progress is not None:
                    options.progress(doing)
                mod = tvm.transform.Sequential(phase(options))(mod)
                if options.debug_dump is not None:
                    dump(mod, options.debug_dump / file)
        return mod

    return run


def _options(target: Target | str | None, kwargs: dict[str, Any]) -> PipelineOptions:
    """Check the names of the arguments and bring their values into the types of the fields."""
    known = [f.name for f in fields(PipelineOptions)]
    unknown = sorted(set(kwargs) - set(known))
    if unknown:
        raise PipelineError(
            f"the pipeline has no argument {unknown[0]!r}; it takes {', '.join(known)}"
        )
    given = {k: v for k, v in kwargs.items() if v is not None}
    if target is None:
        target = Target.current(allow_none=True)
        if target is None:
            raise PipelineError("no target: pass target=... or call within `with target:`")
    if "debug_dump" in given:
        given["debug_dump"] = Path(given["debug_dump"])
    if "disable" in given:
        disable: str | Iterable[str] = given["disable"]
        given["disable"] = (disable,) if isinstance(disable, str) else tuple(disable)
    if "allreduce_strategy" in given:
        given["allreduce_strategy"] = int(given["allreduce_strategy"])
    return PipelineOptions(make_target(target), **given)


def dump(mod: ir.IRModule, path: Path) -> None:
    """Write a module as TVMScript, constants left out, making the directory if needed.

    Raises
    ------
    PipelineError
        If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(mod.script(show_meta=False) + "\n", encoding="utf-8")
    except OSError as err:
        raise PipelineError(f"debug_dump: {path} cannot be written ({err.strerror})") from err
