"""An attention under a plan, and what its kernels are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import JITFunction
from tvm import tirx

from ..errors import LoweringError
from ..estimator.tile_plan import TilePlan
from ..hardware import DeviceSpec
from ..launch.arguments import OUT, Workspace, row_major_strides
from ..workload import Attention, HeadLayout, MaskDims
from .kernel import KernelOptions
from .steps import FEW_ROWS, Step, given_or

Case = tuple[Any, list[Step]]
"""A condition, and the launches, in order, where it is the first of several that holds."""


@dataclass(frozen=True)
class AttentionCall:
    """An attention under a plan.

    Parameters
    ----------
    work : Attention
        What to compute.
    plan : TilePlan
        Family and tiles.
    operands : mapping of str to Expr
        Tensors, and ``kv_len`` where a number tells it.
    most_queries : int, optional
        Query positions up to which the plan serves.
    dev : DeviceSpec
        Where it will run.
    workspaces : dict
        Workspaces so far.
    """

    work: Attention
    plan: TilePlan
    operands: Mapping[str, Any]
    most_queries: int | None
    dev: DeviceSpec
    workspaces: dict[str, Workspace]

    @property
    def batch(self) -> Any:
        """Batch entries: a number or an expression."""
        return self.dim("q", "b")

    @property
    def q_len(self) -> Any:
        """Query positions."""
        return self.dim("q", "s")

    @property
    def kv_len(self) -> Any:
        """Keys that are read."""
        if isinstance(self.work.kv_len, int):
            return self.work.kv_len
        return self.operands.get("kv_len", self.dim("k", "s"))

    @property
    def dependent(self) -> bool:
        """Whether the launch overlaps the end of the one before it, as `Contraction.dependent`."""
        if not self.dev.capabilities.dependent_launch or self.most_queries is None:
            return False
        batch = self.work.batch if isinstance(self.work.batch, int) else 1
        return batch * self.most_queries <= FEW_ROWS

    def dim(self, name: str, letter: str) -> Any:
        """Return the size of batch (b), sequence (s), heads (n) or features (h) of q, k or v."""
        return sizes(self.operands[name])[self.layout(name).index(letter)]

    def layout(self, name: str) -> HeadLayout:
        """Return the order of the dimensions of q, k, v or out."""
        layouts = {"q": self.work.q_layout, "out": self.work.out_layout}
        return layouts.get(name, self.work.kv_layout)

    def strides(self, name: str) -> dict[str, Any]:
        """Return the strides of batch, sequence and heads of q, k, v or out, by letter."""
        if name == "out":
            lengths = {"b": self.batch, "s": self.q_len, "n": self.work.q_heads}
            shape = [{**lengths, "h": self.work.v_dim}[x] for x in self.layout(name)]
        else:
            shape = sizes(self.operands[name])
        found = dict(zip(self.layout(name), row_major_strides(shape), strict=True))
        return {letter: found[letter] for letter in "bsn"}

    def stride_arguments(self, *names: str) -> dict[str, Any]:
        """Return the strides of tensors as arguments of a kernel."""
        return {f"{n}_stride_{x}": stride for n in names for x, stride in self.strides(n).items()}

    def pointer_arguments(self) -> dict[str, Any]:
        """Return the arguments of a kernel that gets q, k and v as pointers."""
        return {
            **{f"{name}_ptr": self.operands[name] for name in ("q", "k", "v")},
            **self.score_arguments(),
            "out_ptr": OUT,
            **self.lengths(),
            **self.stride_arguments("q", "k", "v", "out"),
        }

    def score_arguments(self) -> dict[str, Any]:
        """Return pointers and strides of what is done to scores; any pointer for what is not."""
        unused = self.operands["q"]
        names = ("bias", "mask", "slopes", "sinks")
        found = {f"{n}_ptr": given_or(self.operands.get(n), unused) for n in names}
        for name, dims in (("bias", self.work.bias_dims), ("mask", self.work.mask_dims)):
            strides = self._score_strides(name, dims)
            found |= {f"{name}_stride_{x}": s for x, s in zip("bnq", strides, strict=True)}
        return found

    def _score_strides(self, name: str, dims: MaskDims | None) -> list[Any]:
        """Return the strides of a bias or mask ``[b, n, q, k]``: 0 where it broadcasts."""
        if dims is None:
            return [0, 0, 0]
        strides = row_major_strides(sizes(self.operands[name]))
        return [s if full else 0 for s, full in zip(strides[:3], dims[:3], strict=True)]

    def lengths(self) -> dict[str, Any]:
        """Return the lengths as arguments of a kernel."""
        return {"Q_LEN": int32(self.q_len), "KV_LEN": int32(self.kv_len)}

    def constants(self) -> dict[str, Any]:
        """Return the constexprs that every family has."""
        work = self.work
        return {
            "HEADS": work.q_heads,
            "GROUP": work.q_heads // work.kv_heads,
            "HEAD_DIM": work.head_dim,
            "V_DIM": work.v_dim,
            "SCALE": float(work.scale),
            "CAUSAL": work.causal,
            "WINDOW": work.window or 0,
            "SOFTCAP": float(work.softcap or 0.0),
            "BIAS": work.bias_op if work.bias_dims else "none",
            "BIAS_KEYS": work.bias_dims is not None and work.bias_dims[3],
            "HAS_MASK": work.mask_dims is not None,
            "MASK_KEYS": work.mask_dims is not None and work.mask_dims[3],
            "ALIBI": work.alibi is not None,
            "SINKS": work.sinks is not None,
            "BLOCK_M": self.plan.block_m,
            "BLOCK_N": self.plan.block_n,
            "PDL": self.dependent,
        }

    def step(
        self,
        function: JITFunction,
        grid: Sequence[Any],
        args: Mapping[str, Any],
        constants: Mapping[str, Any],
        **options: Any,
    ) -> Step:
        """Return a launch that is given what its kernel has parameters for.

        Some kernels have strides for constants that others get at run time.
        """
        given = {"num_warps": self.plan.num_warps, "num_stages": self.plan.num_stages}
        made = KernelOptions(**{**given, "dependent_launch": self.dependent, **options})
        fixed = {p.name: p.is_constexpr for p in function.params}
        everything = {**args, **constants}
        needed = [p.name for p in function.params if not p.has_default]
        missing = [name for name in needed if name not in everything]
        if missing:
            raise LoweringError(f"{function.__name__}: no value for {', '.join(missing)}")
        return Step(
            function,
            grid,
            {n: v for n, v in everything.items() if fixed.get(n) is False},
            {n: v for n, v in everything.items() if fixed.get(n)},
            made,
        )


def sizes(tensor: Any) -> list[Any]:
    """Return the shape of a tensor, constants as integers."""
    dims = tensor.ty.shape.values
    return [int(d) if isinstance(d, tirx.IntImm) else d for d in dims]


def int32(value: Any) -> Any:
    """Return a length as an argument of a kernel."""
    return value if isinstance(value, int) else tirx.Cast("int32", value)


def at_most(value: Any, limit: Any) -> Any:
    """Return the smaller of two numbers or expressions."""
    both = isinstance(value, int) and isinstance(limit, int)
    return min(value, limit) if both else tirx.min(int64(value), int64(limit))


def at_least(value: Any, limit: Any) -> Any:
    """Return the larger of two numbers or expressions."""
    both = isinstance(value, int) and isinstance(limit, int)
    return max(value, limit) if both else tirx.max(int64(value), int64(limit))


def int64(value: Any) -> Any:
    """Return a number as an expression of 64 bits."""
    return tirx.IntImm("int64", value) if isinstance(value, int) else value
