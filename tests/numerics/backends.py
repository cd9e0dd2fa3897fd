"""What the sentences of docs/numerics.md are tested on: the reference, and every kind of kernel.

Each back end takes a workload with arrays and gives its results.  A `Run` is one workload on one of
them.  Those that need no GPU are the numpy reference, TIR on this processor, Triton's interpreter,
and kernels in CUDA C++ that are compiled for this processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.runtime import tensor

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.errors import TilingError
from relax_fusion.estimator import Problem, candidates
from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul
from relax_fusion.estimator.families.cuda_matmul.tiles import CudaPlan, block_k
from relax_fusion.estimator.families.triton_attention.family import TritonAttention
from relax_fusion.estimator.families.triton_attention.tiles import padded
from relax_fusion.estimator.families.triton_matmul.family import TritonMatmul
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.hardware.target import device_of, host_target
from relax_fusion.workload import INTEGER_DTYPES, Attention, Chain, GatedFFN, NormMatmul, Workload
from relax_fusion.workload.reference import evaluate, numpy_dtype, sizes_of

from ..support import generated, launches
from ..support.emulated import emulated, has_compiler
from ..support.gpu import build_on_gpu, gpu_target, needs_gpu
from ..support.interpreted import Interpreter
from ..support.quick import loaded, quickly
from ..support.triton_modules import build_triton, run_triton
from ..support.workloads import shape_of

Arrays = dict[str, Any]

H200 = device("h200")


def draw(work: Workload, seed: int = 1, **sizes: int) -> Arrays:
    """Return operands at random: of order one, but weights by which sums are of order one too."""
    rng = np.random.default_rng(seed)
    found: Arrays = {}
    for operand in work.graph.inputs:
        if operand.shape is None:
            found[operand.name] = sizes[operand.name]
            continue
        values = rng.standard_normal(shape_of(operand, sizes))
        if operand.dtype == "bool":
            values = values < 0.5
        elif "int" in operand.dtype:
            limits = np.iinfo(operand.dtype)
            values = rng.integers(limits.min, limits.max, values.shape, endpoint=True)
        elif operand.name.startswith("w"):
            values *= max(values.shape[-2:]) ** -0.5
        found[operand.name] = values.astype(numpy_dtype(operand.dtype))
    return found


def zeros(work: Workload, **sizes: int) -> Arrays:
    """Return operands that are 0, to be filled in by a test."""
    drawn = draw(work, **sizes)
    return {n: a if isinstance(a, int) else np.zeros_like(a) for n, a in drawn.items()}


def _empty_results(work: Workload, inputs: Arrays) -> list[np.ndarray]:
    """Return arrays for the results, full of what is seen where nothing is written."""
    sizes = sizes_of(work.graph, inputs)
    return [np.full(shape_of(o, sizes), 77, numpy_dtype(o.dtype)) for o in work.graph.outputs]


def _by_name(work: Workload, results: Sequence[np.ndarray]) -> Arrays:
    names = [o.name for o in work.graph.outputs]
    return {n: r.astype("float64") for n, r in zip(names, results, strict=True)}


@dataclass(frozen=True)
class Reference:
    """The graph of the workload, by numpy, its results stored in their dtypes."""

    name: str = "reference"

    def takes(self, work: Workload) -> bool:
        return True

    def __call__(self, work: Workload, inputs: Arrays) -> Arrays:
        exact = evaluate(work.graph, inputs)
        with np.errstate(over="ignore", invalid="ignore"):
            stored = [exact[o.name].astype(numpy_dtype(o.dtype)) for o in work.graph.outputs]
        return _by_name(work, stored)


@dataclass
class Llvm:
    """TIR on this processor; what the tests compute is compiled as one library."""

    name: str
    panels: bool
    works: dict[Workload, str] = field(default_factory=dict)

    def takes(self, work: Workload) -> bool:
        integers = work.dtype in INTEGER_DTYPES
        if work.is_adapted or (integers and not any(candidates(work, device_of(host_target())))):
            return False
        if self.panels and (isinstance(work, Attention) or work.dtype != "float16"):
            return False  # one dtype for less to compile
        self.works.setdefault(work, f"kernel{len(self.works)}")
        return True

    def __call__(self, work: Workload, inputs: Arrays) -> Arrays:
        results = [tensor(a) for a in _empty_results(work, inputs)]
        given = [a if isinstance(a, int) else tensor(a) for a in inputs.values()]
        self._library[self.works[work]](*given, *results)
        return _by_name(work, [r.numpy() for r in results])

    @property
    def _library(self) -> tvm.runtime.Module:
        return _compiled(tuple(self.works.items()), self.panels)


@cache
def _compiled(works: tuple[tuple[Workload, str], ...], panels: bool) -> tvm.runtime.Module:
    functions = {name: _scheduled(work, name, panels) for work, name in works}
    return loaded(quickly(tvm.IRModule(functions)))


def _scheduled(work: Workload, name: str, panels: bool) -> tirx.PrimFunc:
    found = list(candidates(work, device_of(host_target())))
    fitting = [p for p in found if (p.family == "panels") == panels] or found
    plan = min(fitting, key=lambda p: (p.block_m * p.block_n * p.block_k, p.key))
    func = build_prim_func(work, PlanTable.single(plan))
    func = func.with_attr("global_symbol", name)
    return FusedRule().apply(func, host_target(), False).mod["main"]


def _unsupported(work: Workload) -> bool:
    if isinstance(work, Chain) or work.is_adapted:
        return True
    family = TritonAttention() if isinstance(work, Attention) else TritonMatmul()
    return family.refuses(Problem(work, H200)) is not None


def _changes_scores(work: Attention) -> bool:
    """Tell whether scores have a bias or the like, which does not depend on the parts."""
    return any((work.bias_dims, work.mask_dims, work.softcap, work.alibi, work.window))


@dataclass(frozen=True)
class Interpreted:
    """Triton's interpreter; it multiplies float16 only."""

    name: str
    family: str
    split: int = 1

    def takes(self, work: Workload) -> bool:
        whole = isinstance(work, Attention) and self.family != "pointer"
        scored = self.split > 1 and isinstance(work, Attention) and _changes_scores(work)
        return not (whole or scored or _unsupported(work)) and work.dtype == "float16"

    def __call__(self, work: Workload, inputs: Arrays) -> Arrays:
        family = "attention" if isinstance(work, Attention) else self.family
        plan = TilePlan(
            *self._tile(work), split_k=self.split, num_stages=2, num_warps=4, family=family
        )
        return launches.interpreted(Interpreter(), work, plan, inputs)

    def _tile(self, work: Workload) -> tuple[int, int, int]:
        if isinstance(work, Attention):
            return 16, 16, padded(work.head_dim)
        return (1, 16, 64) if self.family == "gemv" else (16, 16, 32)


@dataclass(frozen=True)
class Emulated:
    """The matmul kernel in CUDA C++ for Hopper, compiled for this processor."""

    name: str = "cuda"

    def takes(self, work: Workload) -> bool:
        if not has_compiler() or not isinstance(work, NormMatmul | GatedFFN):
            return False
        interpreted = work.norm is not None and work.dtype != "float16"
        return not interpreted and CudaMatmul().refuses(Problem(work, H200)) is None

    def __call__(self, work: Workload, inputs: Arrays) -> Arrays:
        tile = 16, 64, block_k(work.dtype)
        plan = CudaPlan(*tile, num_stages=2, num_warps=8, family="cuda")
        made = emulated(work, plan, inputs, interpreter=Interpreter())
        return {name: values.astype("float64") for name, values in made.items()}


@dataclass(frozen=True)
class Generated:
    """Kernels of the chain engine, generated from the graph of any workload, in the interpreter."""

    name: str = "generated"

    def takes(self, work: Workload) -> bool:
        sizes = dict.fromkeys(work.graph.dims, 40)
        try:
            generated.small_schedule(work.graph, sizes)
        except TilingError:
            return False
        return work.dtype == "float16"

    def __call__(self, work: Workload, inputs: Arrays) -> Arrays:
        sizes = sizes_of(work.graph, inputs)
        some = {name: max(1, size) for name, size in sizes.items()}  # of nothing there is no tile
        schedule = generated.small_schedule(work.graph, some)
        return dict(Interpreter(generated.launch)(work.graph, schedule, inputs, "cpu", sizes))


@dataclass(frozen=True)
class Gpu:
    """A family of kernels on an NVIDIA GPU."""

    name: str
    backend: str
    family: str

    def takes(self, work: Workload) -> bool:
        if self.backend == "tir" and work.is_adapted:
            return False
        if self.backend == "tir":
            return not isinstance(work, Attention | Chain) or self.family == "fma_attention"
        in_attention = self.family in ("attention", "flash", "groups")
        fits = in_attention == isinstance(work, Attention)
        if work.is_adapted:
            return self.family == "cuda"
        return fits and not _unsupported(work)

    def __call__(self, work: Workload, inputs: Arrays) -> Arrays:
        found = candidates(work, device_of(gpu_target()), self.backend)
        plan = next((p for p in found if p.family == self.family), None)
        if plan is None:
            pytest.skip(f"no plan of the family {self.family} for {work.dtype}")
        results = _empty_results(work, inputs)
        if self.backend == "triton":
            made = run_triton(_triton_on_gpu(work, plan), list(inputs.values()))
        else:
            dev = tvm.cuda(0)
            given = [a if isinstance(a, int) else tensor(a, dev) for a in inputs.values()]
            outs = [tensor(r, dev) for r in results]
            _tir_on_gpu(work, plan)["main"](*given, *outs)
            made = [o.numpy() for o in outs]
        return _by_name(work, made)


@cache
def _triton_on_gpu(work: Workload, plan: TilePlan) -> tvm.runtime.Executable:
    outputs = len(work.graph.outputs)
    return build_triton(work, PlanTable.single(plan), outputs=outputs, target=gpu_target())


@cache
def _tir_on_gpu(work: Workload, plan: TilePlan) -> tvm.runtime.Executable:
    return build_on_gpu(work, PlanTable.single(plan), gpu_target())


ON_CPU = (
    Reference(),
    Llvm("llvm", panels=False),
    Llvm("llvm_panels", panels=True),
    Interpreted("triton_gemv", "gemv"),
    Interpreted("triton_pointer", "pointer"),
    Interpreted("triton_split", "pointer", split=2),
    Generated(),
    Emulated(),
)
ON_GPU = tuple(
    Gpu(f"gpu_{backend}_{family}", backend, family)
    for backend, families in {
        "tir": ("dot_products", "fma_tiles", "fma_attention", "mma", "wgmma", "few_rows"),
        "triton": ("gemv", "pointer", "cuda", "attention", "flash", "groups"),
    }.items()
    for family in families
)


@dataclass(frozen=True)
class Run:
    """A workload on a back end."""

    backend: Any
    work: Any

    @property
    def is_reference(self) -> bool:
        return isinstance(self.backend, Reference)

    def __call__(self, inputs: Arrays) -> Arrays:
        """Return results by name, in float64."""
        return self.backend(self.work, inputs)

    def exact(self, inputs: Arrays, **how: Any) -> Arrays:
        """Return what the graph comes to in float64."""
        return evaluate(self.work.graph, inputs, **how)


def _marks(backend: Any) -> list[pytest.MarkDecorator]:
    if backend in ON_GPU:
        return [pytest.mark.gpu, needs_gpu]
    return [] if backend in ON_CPU[:2] else [pytest.mark.slow]


def on_every_backend(**works: Workload) -> Callable[[Any], Any]:
    """Give a test, as `run`, each of `works` on each back end that takes it.

    Those beyond the reference and one kernel for this processor are slow.
    """
    found = [
        pytest.param(Run(b, work), id=f"{b.name}-{name}", marks=_marks(b))
        for name, work in works.items()
        for b in (*ON_CPU, *ON_GPU)
        if b.takes(work)
    ]
    return pytest.mark.parametrize("run", found)
