"""One launch of a contraction, and what its launches share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from triton.runtime.jit import JITFunction
from tvm import ir, tirx

from ..estimator.tile_plan import TilePlan
from ..hardware import DeviceSpec
from ..launch.arguments import Out, Workspace
from ..launch.cuda_source import CUDASource
from ..workload import DynamicDim, GatedFFN, NormMatmul
from .kernel import KernelOptions
from .kernels.products import Constants, Form, Tensors
from .kernels.split_reduce import split_reduce
from .operands import Product

FEW_ROWS = 512
"""Up to this many rows a launch begins while the one before it is in full swing. With more, its
waiting programs take the room of those that still have work (measured on an H200: 8 us slower at
4096)."""

REDUCE_TILE = (1, 1024)
"""A program that adds the parts of a split matmul has this many rows and columns."""

GROUP_M = 8
"""This many row tiles are walked together, so that their weights are still in the L2 cache."""


@dataclass(frozen=True)
class Step:
    """One launch: a kernel, its grid, and by name its arguments and constants."""

    function: JITFunction
    grid: Sequence[Any]
    args: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    options: KernelOptions


@dataclass(frozen=True)
class SourceStep:
    """One launch of a kernel in CUDA C++: its source, its grid (of clusters), its arguments."""

    source: CUDASource
    grid: Sequence[Any]
    args: Sequence[Any]


AnyStep: TypeAlias = Step | SourceStep


@dataclass(frozen=True)
class FixedWeights:
    """Inputs that no kernel of their function writes."""

    inputs: Sequence[ir.Expr] = ()
    """Which they are."""
    leads: bool = True
    """Whether the contraction may be what its function launches first, so that the kernel in front
    is the caller's and may have written them."""
    settled: Sequence[ir.Expr] = ()
    """Inputs that are written before the kernel in front begins."""


NOTHING_FIXED = FixedWeights()


@dataclass(frozen=True)
class Contraction:
    """A contraction under a plan.

    The plan serves up to `most_rows` rows of x.  Launches of other ranges use the same
    `workspaces`.  `fixed` may be read before the kernel in front has ended.
    """

    work: NormMatmul | GatedFFN
    plan: TilePlan
    rows: Any
    most_rows: int | None
    dev: DeviceSpec
    workspaces: dict[str, Workspace]
    fixed: FixedWeights

    @property
    def m(self) -> Any:
        """The rows as a kernel's argument."""
        return self.rows if isinstance(self.rows, int) else tirx.Cast("int32", self.rows)

    @property
    def dependent(self) -> bool:
        """Whether launches overlap the end of the one before them.

        Each waits for it before it reads what another kernel may have written, and before it
        writes anything, so one that has ended knows that all before it have.
        """
        few = self.few_rows or self.plan.family == "cuda"  # one thread block a multiprocessor
        return self.dev.capabilities.dependent_launch and few

    @property
    def few_rows(self) -> bool:
        """Whether the launch behind the norm may begin when that one does, not at its end."""
        return self.most_rows is not None and self.most_rows <= FEW_ROWS

    def early(self, products: Sequence[Product], x: Any) -> bool:
        """Whether the weights of `products` may be read while the kernel in front still runs.

        That is one of ours, or whatever the function or its caller launched before.  Where ours let
        the next one begin before they have waited, the one in front of them is of this function,
        too, and has waited for the caller's.
        """
        if not self.dependent or (self.fixed.leads and not isinstance(x, Workspace | Out)):
            return False
        weights = [w for p in products for w in p.weights]
        return all(any(w is v for v in self.fixed.inputs) for w in weights)

    def workspace(self, role: Any, shape: tuple[Any, ...], dtype: str) -> Workspace:
        """Return the workspace of that role and size."""
        key = (role, shape[0] if isinstance(shape[0], int) else None, shape[1:], dtype)
        return self.workspaces.setdefault(str(key), Workspace(shape, dtype))

    def parts(self, product: Product) -> Workspace:
        """Return the workspace for the parts of a matmul whose k is split."""
        wide = 2 * product.n if product.up is not None else product.n
        dim, most = self.work.rows, self.most_rows
        # What a range ends at is checked where it is chosen; the module's own bound is a promise
        promised = isinstance(dim, DynamicDim) and most == dim.upper
        rows = fewer(self.rows, None if promised else most)
        # One more for the sums of squares of a norm inside
        return self.workspace(product.out, (self.plan.split_k * (wide + 1), rows), "float32")

    def options(self, **others: Any) -> KernelOptions:
        """Return the options of a launch; the number of warps is the plan's by default."""
        given = {"num_warps": self.plan.num_warps, "num_stages": self.plan.num_stages}
        return KernelOptions(**{**given, "dependent_launch": self.dependent, **others})

    def constants(self, **others: Any) -> Constants:
        """Return what a kernel is compiled for; tiles are the plan's by default."""
        plan = self.plan
        tiles = {"block_m": plan.block_m, "block_n": plan.block_n, "block_k": plan.block_k}
        given = {"k": self.work.k, "pdl": self.dependent, "split_k": plan.split_k, **tiles}
        return Constants(**{**given, "group_m": GROUP_M, "stages": plan.num_stages, **others})

    def split_reduce(
        self, products: Sequence[Product], norm: str = "none", eps: float = 0.0
    ) -> Step:
        """Return the launch that adds the parts of matmuls."""
        block_m, block_n = REDUCE_TILE
        tensors = (p.tensors(self.parts(p))._replace(w=None, up=None) for p in products)
        args = {"M": self.m, "eps": eps, **tensors_of(tensors)}
        constants = self.constants(norm=norm, block_m=block_m, block_n=block_n)
        forms, tiles = forms_of(products, block_n)
        grid = (ceil_div(self.rows, block_m), tiles)
        return Step(split_reduce, grid, args, {**forms, "C": constants}, self.options(num_warps=4))


def tensors_of(products: Iterable[Tensors]) -> dict[str, Tensors]:
    """Return the arguments of a kernel that are its products' tensors."""
    return {f"p{i}": p for i, p in enumerate(products)}


def forms_of(products: Sequence[Product], step: int) -> tuple[dict[str, Form], int]:
    """Return the constants of a kernel for its products, and their tiles of `step` columns."""
    forms = {f"F{i}": p.form(step) for i, p in enumerate(products)}
    return forms, sum(form.tiles for form in forms.values())


def fewer(size: Any, most: int | None) -> Any:
    """Return a size where it is at most so large: memory for more is never used.

    Other launches of the same function may be called with more.
    """
    if isinstance(size, int) or most is None:
        return size
    return tirx.min(size, tirx.IntImm("int64", most))


def ceil_div(a: Any, b: int) -> Any:
    """Return ``ceil(a / b)`` of an integer or an expression."""
    return (a + (b - 1)) // b
