"""An attention under a plan, and what its kernels are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triton.runtime.jit import JITFunction
from tvm import ir, tirx

from ..estimator.families.triton_attention.tiles import AttentionPlan
from ..hardware import DeviceSpec
from ..launch.arguments import OUT, InOut, Part, Workspace, row_major_strides
from ..workload import Attention, HeadLayout, MaskDims
from .kernel import KernelOptions
from .kernels.attention_core import LOG2_E, Constants, HeadTensor
from .kernels.attention_pointer import KeyCount
from .launches import FEW_ROWS, AnyStep, Step
from .operands import given_or

Case = tuple[Any, Sequence[AnyStep]]
"""A condition, and the launches, in order, where it is the first of several that holds."""


APPENDS_ATTR = "relax_fusion.appends"
"""PrimFunc attribute: as `APPEND_ATTR` has it, of the two parameters in front of the result."""


@dataclass(frozen=True)
class Appended:
    """Tensors ``[batch, 1, heads * features]`` of a new key and value, and their first heads."""

    k: ir.Expr
    v: ir.Expr
    first_k: int
    first_v: int

    @classmethod
    def of(cls, func: tirx.PrimFunc, tensors: Sequence[ir.Expr]) -> Appended | None:
        """Return what a function appends, of its inputs; None if it does not."""
        heads = (func.attrs or {}).get(APPENDS_ATTR)
        if heads is None:
            return None
        return cls(tensors[-2], tensors[-1], int(heads["keys"]), int(heads["values"]))


@dataclass(frozen=True)
class AttentionCall:
    """An attention under a plan.

    `operands` have ``kv_len`` where a number tells it.  The plan serves up to `most_queries` query
    positions.  `appended` are the last key and value, to be written into k and v.
    """

    work: Attention
    plan: AttentionPlan
    operands: Mapping[str, Any]
    most_queries: int | None
    dev: DeviceSpec
    workspaces: dict[str, Workspace]
    appended: Appended | None = None

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

    def heads(self, name: str) -> HeadTensor:
        """Return q, k or v as an argument of a kernel; of a merged tensor, the heads it reads."""
        tensor, part = self.operands[name], self.work.heads_in(name)
        found = dict(zip(self.layout(name), row_major_strides(sizes(tensor)), strict=True))
        if part.start:
            tensor = Part(tensor, part.start * found["n"])
        return HeadTensor(tensor, found["b"], found["s"], found["n"] * part.step)

    def pointer_arguments(self) -> dict[str, Any]:
        """Return the arguments of a kernel that gets q, k and v as pointers."""
        pointers = {name: self.heads(name) for name in ("q", "k", "v")}
        if (new := self.appended) is not None:
            for index, name in enumerate("kv", start=1):
                pointers[name] = pointers[name]._replace(ptr=InOut(self.operands[name], index))
            pointers["new_k"] = self._one_row(new.k, new.first_k, self.work.head_dim)
            pointers["new_v"] = self._one_row(new.v, new.first_v, self.work.v_dim)
        return {**pointers, **self.other_arguments(), "KV_LEN": self._key_count()}

    def _one_row(self, tensor: ir.Expr, first: int, width: int) -> HeadTensor:
        """Return the heads from `first` on of a tensor with one row of heads a batch entry."""
        row = 1
        for size in sizes(tensor)[1:]:
            row *= size
        return HeadTensor(Part(tensor, first * width), row, 0, width)

    def _key_count(self) -> Any:
        """Return the number of keys as an argument of a kernel."""
        most, lengths = int32(self.kv_len), self.work.lengths
        if lengths is None:
            return most
        return KeyCount(self.operands["lengths"], int(lengths.by_batch), lengths.more, most)

    def _out(self) -> HeadTensor:
        """Return the result as an argument of a kernel."""
        lengths = {"b": self.batch, "s": self.q_len, "n": self.work.q_heads, "h": self.work.v_dim}
        layout = self.layout("out")
        strides = row_major_strides([lengths[letter] for letter in layout])
        found = dict(zip(layout, strides, strict=True))
        return HeadTensor(OUT, *(found[letter] for letter in "bsn"))

    def other_arguments(self) -> dict[str, Any]:
        """Return the arguments that every family has; any pointer for what is not there."""
        work, unused = self.work, self.operands["q"]
        names = ("bias", "mask", "slopes", "sinks")
        pointers = {name: given_or(self.operands.get(name), unused) for name in names}
        return {
            "bias": HeadTensor(pointers["bias"], *self._score_strides("bias", work.bias_dims)),
            "mask": HeadTensor(pointers["mask"], *self._score_strides("mask", work.mask_dims)),
            "slopes_ptr": pointers["slopes"],
            "sinks_ptr": pointers["sinks"],
            "out": self._out(),
            "Q_LEN": int32(self.q_len),
            "KV_LEN": int32(self.kv_len),
        }

    def _score_strides(self, name: str, dims: MaskDims | None) -> list[Any]:
        """Return the strides b, s and n of a bias or mask ``[b, n, s, k]``, 0 to broadcast it."""
        if dims is None:
            return [0, 0, 0]
        strides = row_major_strides(sizes(self.operands[name]))
        return [strides[i] if dims[i] else 0 for i in (0, 2, 1)]

    def constants(self, **others: Any) -> Constants:
        """Return the constants that every family has, and others or other values."""
        work = self.work
        given: dict[str, Any] = {
            "heads": work.q_heads,
            "group": work.q_heads // work.kv_heads,
            "head_dim": work.head_dim,
            "v_dim": work.v_dim,
            "scale": float(work.scale),
            "causal": work.causal,
            "window": work.window or 0,
            "softcap": float(work.softcap or 0.0),
            "bias": work.bias_op if work.bias_dims else "none",
            "bias_keys": work.bias_dims is not None and work.bias_dims[3],
            "has_mask": work.mask_dims is not None,
            "mask_keys": work.mask_dims is not None and work.mask_dims[3],
            "alibi": work.alibi is not None,
            "sinks": work.sinks is not None,
            "counted": work.lengths is not None,
            "appends": self.appended is not None,
            "block_m": self.plan.block_m,
            "block_n": self.plan.block_n,
            "pdl": self.dependent,
            "scored": float(work.scale) * LOG2_E.value,
        }
        return Constants(**{**given, **others})

    def step(
        self,
        function: JITFunction,
        grid: Sequence[Any],
        args: Mapping[str, Any],
        constants: Constants,
        **options: Any,
    ) -> Step:
        """Return a launch."""
        given = {"num_warps": self.plan.num_warps, "num_stages": self.plan.num_stages}
        made = KernelOptions(**{**given, "dependent_launch": self.dependent, **options})
        return Step(function, grid, args, {"C": constants}, made)


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
