"""What the pipeline can be told, and the checks of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.target import Target

from .errors import PipelineError
from .lowering import FuseOptions, Plans
from .passes import PATTERNS
from .report import Report
from .target import has_triton, make_target, require_tf32

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
        Directory for ``debug-phase0.py`` to ``debug-phase4.py`` and ``debug-final.py``.
    backend : {"auto", "tir", "triton"}
        Who emits fused kernels: by default Triton on NVIDIA GPUs from sm_80 on, where it has a
        kernel, and TIR elsewhere.
    plans : mapping of str to TilePlan or PlanTable
        Plans that replace the estimator's, by workload key or pass name.
    allow_tf32 : bool
        Let tensor cores multiply float32 as tf32, with 10 bits of mantissa, as PyTorch does with
        ``torch.backends.cuda.matmul.allow_tf32``; refused where the target has none.
    always_fuse : bool
        Fuse also where the estimator predicts a loss: to look at kernels, or to measure them.
    disable : iterable of str
        Names of passes that are left out.
    report : Report, optional
        Receives every decision, and which rule scheduled which function.
    progress : callable, optional
        Called with a sentence at the start of each phase.
    """

    target: Target
    flashinfer: bool = False
    cublas_gemm: bool = False
    faster_transformer: bool = False
    allreduce_strategy: int = 0
    variable_bounds: Mapping[str, int] = field(default_factory=dict)
    use_cuda_graph: bool = True
    cuda_graph_symbolic_capture_hints: Mapping[str, Sequence[str]] = field(default_factory=dict)
    additional_tirs: Mapping[str, tirx.PrimFunc] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ext_mods: Sequence[Any] = ()
    debug_dump: Path | None = None
    backend: str = "auto"
    plans: Plans = field(default_factory=dict)
    disable: tuple[str, ...] = ()
    always_fuse: bool = False
    allow_tf32: bool = False
    report: Report | None = None
    progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        """Refuse values that no phase could honour."""
        if not isinstance(self.use_cuda_graph, bool):
            raise PipelineError(f"use_cuda_graph is {self.use_cuda_graph!r}; must be True or False")
        if self.backend not in BACKENDS:
            raise PipelineError(f"backend is {self.backend!r}; it must be one of {BACKENDS}")
        if self.backend == "triton" and not has_triton(self.target):
            raise PipelineError(
                f"backend 'triton' needs a CUDA target, sm_80 or newer: {self.target}"
            )
        if not isinstance(self.allow_tf32, bool):
            raise PipelineError(f"allow_tf32 is {self.allow_tf32!r}; must be True or False")
        if self.allow_tf32:
            require_tf32(self.target)
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
            self.target,
            self.plans,
            self.variable_bounds,
            decisions,
            self.always_fuse,
            "triton" if self.uses_triton else "tir",
            self.allow_tf32,
        )

    @property
    def uses_triton(self) -> bool:
        """Whether fused kernels are Triton's, where it has one."""
        return self.backend != "tir" and has_triton(self.target)


def make_options(target: Target | str | None, kwargs: dict[str, Any]) -> PipelineOptions:
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
