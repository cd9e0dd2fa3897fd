"""Which launches compute a contraction (norm -> matmuls -> epilogues, gated pair) under a plan.

A plan of back end "triton" names a family of :mod:`.kernels` and its tiles.  The norm is part of
the matmul's kernel where the family can do that and nothing else wants its results; else it is a
launch of its own in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import JITFunction
from tvm import ir, tirx

from ..device import DeviceSpec
from ..errors import LoweringError
from ..estimator.triton import norm_inside
from ..tile_plan import TilePlan
from ..workload import DynamicDim, GatedFFN, Norm, NormMatmul
from .arguments import TensorMap, Workspace
from .kernel import KernelOptions
from .kernels.gemv import gemv
from .kernels.matmul_pointer import matmul_pointer
from .kernels.matmul_tma import matmul_tma
from .kernels.row_norm import row_norm
from .kernels.split_reduce import split_reduce
from .operands import Operands, Product, read_operands

DEPENDENT_ARCH = "sm_90"
"""First architecture with programmatic dependent launch."""

SWAP_COLUMNS = 64
"""Columns of a pointer tile up to which the weight is the left operand of the tensor cores, whose
least height is 64: then rows of x that are few are not padded."""

REDUCE_TILE = (1, 1024)
"""Rows and columns of a program that adds the parts of a split matmul."""

GROUP_M = 8
"""Row tiles that are walked together, so that their weights are still in the L2 cache."""

DEPENDENT_ROWS = 512
"""Rows up to which a launch begins while the one before it ends.  With more, its waiting programs
take the room of those that still have work (measured on an H200: 8 us slower at 4096)."""

NORM_WARPS = ((1024, 8), (None, 4))
"""Warps of `row_norm` by rows: few rows are a matter of latency, many of bandwidth (measured at
4096 columns)."""


@dataclass(frozen=True)
class Step:
    """One launch: a kernel, its grid, and by name its arguments and constants."""

    function: JITFunction
    grid: Sequence[Any]
    args: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    options: KernelOptions


def contraction_steps(
    work: NormMatmul | GatedFFN,
    plan: TilePlan,
    inputs: Sequence[ir.Expr],
    most_rows: int | None,
    dev: DeviceSpec,
    rooms: dict[str, Workspace],
) -> list[Step]:
    """Return the launches that compute `work`, in order.

    Parameters
    ----------
    work : NormMatmul or GatedFFN
        What to compute; one that `relax_fusion.estimator.triton.unsupported` has nothing against.
    plan : TilePlan
        Family and tiles.
    inputs : sequence of relax.Expr
        In the order of `relax_fusion.compute.contraction.contraction_prim_func`.
    most_rows : int, optional
        Rows up to which the plan serves.
    dev : DeviceSpec
        Where it will run.
    rooms : dict
        Gets the workspaces, for the plans of other ranges to use the same.
    """
    return _Steps(work, plan, inputs, most_rows, dev, rooms).all()


@dataclass
class _Steps:
    """The operands of a contraction, and its steps."""

    work: NormMatmul | GatedFFN
    plan: TilePlan
    inputs: Sequence[ir.Expr]
    most_rows: int | None
    dev: DeviceSpec
    rooms: dict[str, Workspace]

    def all(self) -> list[Step]:
        """Return the launches, in order."""
        found = read_operands(self.work, self.inputs)
        self.x = found.x
        rows = self.x.ty.shape.values[0]
        self.rows: Any = rows if isinstance(self.work.rows, DynamicDim) else int(rows)
        norm = self.work.norm
        self.norm_args: dict[str, Any] = {}
        if norm is None or norm_inside(self.work, self.plan):
            eps = float(norm.eps) if norm else 0.0
            self.norm_args = {"gamma_ptr": found.gamma, "beta_ptr": found.beta, "eps": eps}
            kind = norm.kind if norm else "none"
            return [s for p in found.products for s in self._matmul(p, self.x, kind)]
        y: Any = found.normed or self._room("norm", (self.rows, self.work.k), self.work.dtype)
        rest = (s for p in found.products for s in self._matmul(p, y, "none"))
        return [self._row_norm(norm, found, y), *rest]

    def _room(self, role: Any, shape: tuple[Any, ...], dtype: str) -> Workspace:
        """Return the workspace of that role and size: launches of other ranges share it."""
        key = (role, shape[0] if isinstance(shape[0], int) else None, shape[1:], dtype)
        return self.rooms.setdefault(str(key), Workspace(shape, dtype))

    @property
    def _m(self) -> Any:
        return self.rows if isinstance(self.rows, int) else tirx.Cast("int32", self.rows)

    @property
    def _dependent(self) -> bool:
        """Whether launches overlap the end of the one before them."""
        few = self.most_rows is not None and self.most_rows <= DEPENDENT_ROWS
        return few and self.dev.arch >= DEPENDENT_ARCH

    def _row_norm(self, norm: Norm, found: Operands, y: Any) -> Step:
        """Normalise every row."""
        width = self.work.k
        few = self.most_rows
        warps = next(w for most, w in NORM_WARPS if most is None or (few or most) < most)
        return Step(
            row_norm,
            (self.rows,),
            {
                "x_ptr": self.x,
                "residual_ptr": _or(found.residual, self.x),
                "gamma_ptr": found.gamma,
                "beta_ptr": _or(found.beta, found.gamma),
                "y_ptr": y,
                "sum_ptr": _or(found.total, y),
                "M": self._m,
                "eps": float(norm.eps),
            },
            {
                "WIDTH": width,
                "BLOCK": 1 << (width - 1).bit_length(),
                "ROWS": 1,
                "NORM": norm.kind,
                "HAS_RESIDUAL": found.residual is not None,
                "HAS_BETA": found.beta is not None,
                "STORE_SUM": found.total is not None,
                "PDL": self._dependent,
                "EARLY": self._dependent,
            },
            KernelOptions(num_warps=warps),
        )

    def _matmul(self, product: Product, x: Any, norm: str) -> Iterator[Step]:
        """Yield the launches of one product."""
        family = {
            "gemv": self._gemv,
            "pointer": self._pointer,
            "tma": self._tma,
        }.get(self.plan.family)
        if family is None:
            raise LoweringError(f"plan {self.plan.key}: no kernel family {self.plan.family!r}")
        yield from family(product, x, norm)

    def _options(self, follows: bool) -> KernelOptions:
        """Return the options of a matmul; `follows` says whether a launch of ours comes before."""
        return KernelOptions(
            num_warps=self.plan.num_warps,
            num_stages=self.plan.num_stages,
            dependent_launch=follows and self._dependent,
        )

    def _gemv(self, p: Product, x: Any, norm: str) -> Iterator[Step]:
        beta = self.norm_args.get("beta_ptr")
        args = {
            "x_ptr": x,
            "gamma_ptr": _or(self.norm_args.get("gamma_ptr"), x),
            "beta_ptr": _or(beta, x),
            "w_ptr": p.weight,
            "up_ptr": _or(p.up, p.weight),
            **p.pointers(x),
            "M": self._m,
            "eps": self.norm_args.get("eps", 0.0),
        }
        constants = {
            **p.constants,
            "K": self.work.k,
            "NORM": norm,
            "HAS_BETA": norm != "none" and beta is not None,
            "BLOCK_N": self.plan.block_n,
            "BLOCK_K": self.plan.block_k,
            "PDL": x is not self.x and self._dependent,
        }
        grid = (_ceil_div(p.n, self.plan.block_n), self.rows)
        yield Step(gemv, grid, args, constants, self._options(x is not self.x))

    def _tiles(self, waits: bool) -> dict[str, Any]:
        plan = self.plan
        return {
            "K": self.work.k,
            "BLOCK_M": plan.block_m,
            "BLOCK_N": plan.block_n,
            "BLOCK_K": plan.block_k,
            "NUM_STAGES": plan.num_stages,
            "PDL": waits and self._dependent,
        }

    def _pointer(self, p: Product, x: Any, norm: str) -> Iterator[Step]:
        plan = self.plan
        parts = 2 if p.up is not None else 1
        room: Any = x
        if plan.split_k > 1:
            sums = plan.split_k * (parts * p.n + 1)
            room = self._room(p.out, (sums, self.rows), "float32")
        eps = self.norm_args.get("eps", 0.0)
        args = {
            "x_ptr": x,
            "gamma_ptr": _or(self.norm_args.get("gamma_ptr"), x),
            "w_ptr": p.weight,
            "up_ptr": _or(p.up, p.weight),
            **p.pointers(x),
            "workspace_ptr": room,
            "M": self._m,
            "eps": eps,
        }
        constants = {
            **p.constants,
            **self._tiles(x is not self.x or plan.split_k > 1),
            "NORM": norm,
            "SPLIT_K": plan.split_k,
            "GROUP_M": GROUP_M,
            "SWAP": plan.block_n <= SWAP_COLUMNS,
        }
        tiles = _ceil_div(self.rows, plan.block_m) * _ceil_div(p.n, plan.block_n)
        options = self._options(x is not self.x)
        yield Step(matmul_pointer, (tiles, plan.split_k), args, constants, options)
        if plan.split_k > 1:
            yield self._split_reduce(p, room, norm, eps)

    def _split_reduce(self, p: Product, room: Workspace, norm: str, eps: float) -> Step:
        block_m, block_n = REDUCE_TILE
        args = {"workspace_ptr": room, **p.pointers(room), "M": self._m, "eps": eps}
        constants = {
            **p.constants,
            "K": self.work.k,
            "NORM": norm,
            "SPLIT_K": self.plan.split_k,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "PDL": self._dependent,
        }
        del constants["LAYOUT"]
        grid = (_ceil_div(p.n, block_n), _ceil_div(self.rows, block_m))
        options = KernelOptions(num_warps=4, dependent_launch=self._dependent)
        return Step(split_reduce, grid, args, constants, options)

    def _maps(self, p: Product, x: Any) -> dict[str, Any]:
        """Return the operands as tensor maps that the host encodes."""
        plan = self.plan
        block = (plan.block_n, plan.block_k)
        block = block if p.layout == "nk" else (plan.block_k, plan.block_n)
        return {
            "x": TensorMap(x, (plan.block_m, plan.block_k)),
            "w": TensorMap(p.weight, block),
            "up": TensorMap(_or(p.up, p.weight), block),
        }

    def _tma(self, p: Product, x: Any, norm: str) -> Iterator[Step]:
        del norm  # done in front
        plan = self.plan
        args = {**self._maps(p, x), **p.pointers(p.out), "M": self._m}
        constants = {
            **p.constants,
            **self._tiles(x is not self.x),
            "GROUP_M": GROUP_M,
            "FLATTEN": p.up is None,
        }
        tiles = _ceil_div(self.rows, plan.block_m) * _ceil_div(p.n, plan.block_n)
        grid = (_least(tiles, self.dev.sm_count),)
        yield Step(matmul_tma, grid, args, constants, self._options(x is not self.x))


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _ceil_div(a: Any, b: int) -> Any:
    return (a + (b - 1)) // b


def _least(a: Any, b: int) -> Any:
    return min(a, b) if isinstance(a, int) else tirx.min(a, tirx.IntImm("int64", b))
