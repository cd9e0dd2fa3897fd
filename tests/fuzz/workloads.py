"""Random workloads: every field of the four of them, at sizes that nothing divides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from relax_fusion.workload import (
    ACTIVATIONS,
    Attention,
    DynamicDim,
    GatedFFN,
    Heads,
    Lengths,
    Norm,
    NormMatmul,
    Projection,
    Rope,
)

from ..support import attention_cases, chain_cases, contraction_cases
from ..support.matmul_chains import TwoMatmuls

Case = attention_cases.Case | chain_cases.ChainCase | contraction_cases.Case

ROWS = (1, 1, 2, 3, 4, 5, 7, 12, 17, 33)
WIDTHS = (1, 3, 4, 8, 12, 17, 24, 33, 40, 64)
HALF = ("float16", "bfloat16")


class Chooser:
    """Draws the fields of workloads.

    Parameters
    ----------
    rng : random.Random
        Makes all choices.
    dtypes : sequence of str
        The element types of operands.
    """

    def __init__(self, rng: Random, dtypes: Sequence[str] = ("float32", "float32", *HALF)):
        self.rng = rng
        self.dtype: str = rng.choice(dtypes)
        self.out_dtype: str = self.dtype if self.chance(80) else rng.choice(dtypes)

    def chance(self, percent: int) -> bool:
        """Draw true in about `percent` of the cases."""
        return self.rng.randrange(100) < percent

    def pick(self, *options: Any) -> Any:
        """Draw one of the options."""
        return self.rng.choice(options)

    def case(self, name: str) -> Case:
        """Return a workload of a class, and sizes to run it at."""
        made: Case = getattr(self, f"_{name}")()
        return made

    def _rows(self) -> tuple[Any, int]:
        rows = self.pick(*ROWS)
        return (DynamicDim("rows", self.pick(None, 40)) if self.chance(30) else rows), rows

    def _norm(self, rows: int) -> Norm | None:
        if self.chance(35):
            return None
        kind, residual = self.pick("rms", "layer"), self.chance(35)
        shifted = kind == "layer" and self.chance(70)
        eps = self.pick(1e-6, 1e-5, 1e-3)
        norm = Norm(kind, eps, shifted, residual, residual and self.chance(60), self.chance(20))
        if self.chance(80):
            return norm
        return replace(norm, each=self.pick(*(n for n in range(1, rows + 1) if rows % n == 0)))

    def _steps(self, *names: str, most: int = 3) -> tuple[str | float, ...]:
        found = [self.pick(*names) for _ in range(self.pick(*range(most + 1)))]
        acts = [n for n, step in enumerate(found) if step in ACTIVATIONS]
        return tuple(s for n, s in enumerate(found) if n not in acts[1:])  # as matchers have it

    def _layout(self) -> Any:
        return self.pick("nk", "kn")

    def _projection(self, rows: Any) -> Projection:
        n = self.pick(*WIDTHS)
        if self.chance(20):
            head = self.pick(2, 4, 6, 8, 16)
            heads, turned = self.pick(1, 2, 3, 4), self.pick(1, 2, 3, 4)
            features = head * min(heads, turned)
            positions = self.pick(None, rows if isinstance(rows, int) else None, 3, 1)
            if positions is not None and isinstance(rows, int) and positions > rows:
                positions = None
            rope = Rope(head, features, self.pick("float32", self.dtype), positions)
            return Projection(head * heads, self._layout(), self.pick((), ("bias",)), rope)
        steps = self._steps("bias", "bias", "residual", "residual:3", "scale", 0.5, *ACTIVATIONS)
        return Projection(n, self._layout(), steps)  # type: ignore[arg-type]

    def _contraction(self) -> Case:
        rows, size = self._rows()
        count = self.pick(1, 1, 1, 2, 3)
        outputs = tuple(self._projection(rows) for _ in range(count))
        k = self.pick(*WIDTHS)
        work = NormMatmul(rows, k, outputs, self._norm(size), self.dtype, self.out_dtype)
        return contraction_cases.Case(repr(work), work, size)

    def _gated(self) -> Case:
        rows, size = self._rows()
        merged = self.chance(50)
        norm = self._norm(size)
        work = GatedFFN(
            *(rows, self.pick(*WIDTHS), self.pick(*WIDTHS), self._layout(), merged),
            *(not merged or self.chance(50), self.pick(*ACTIVATIONS), norm),
            *(self.dtype, self.out_dtype, self.chance(30)),
        )
        return contraction_cases.Case(repr(work), work, size)

    def _chain(self) -> Case:
        rows, size = self._rows()
        steps = ("bias", "scale", 0.5, 2.0, *ACTIVATIONS)
        batch = self.pick(None, None, None, 1, 2, 3, DynamicDim("batch"))
        if batch is not None:
            steps = (0.5, *ACTIVATIONS)
        outer = steps if batch is not None else (*steps, "residual")
        work = TwoMatmuls(
            *(rows, self.pick(*WIDTHS), self.pick(1, 3, 4, 8, 16, 20), self.pick(*WIDTHS)),
            *((self._layout(), self._layout()), self._steps(*steps, most=2)),
            *(self._steps(*outer, most=2), self.dtype, self.out_dtype, batch),
        ).chain
        return chain_cases.ChainCase(work, size, 2)

    def _attention(self) -> Case:
        heads = self.pick(1, 2, 3, 4, 6)
        kv_heads = self.pick(*[n for n in (1, 2, 3, 4, 6) if heads % n == 0])
        q_len, kv_len = self.pick(1, 1, 2, 5, 17, 33), self.pick(1, 3, 8, 17, 40, 65)
        sizes = {"batch": self.pick(1, 2, 3), "q_len": q_len, "kv_len": max(q_len, kv_len)}
        dims = {n: DynamicDim(n) if self.chance(25) else size for n, size in sizes.items()}
        prefix = self.chance(25)
        sizes["kv_capacity"] = sizes["kv_len"] + self.pick(0, 1, 7)
        causal = self.pick("none", "none", "top_left", "bottom_right")
        bias = self._dims() if self.chance(30) else None
        dim = self.pick(4, 8, 12, 16, 20, 32)
        q_layout, kv_layout = self._order(), self._order()
        work = Attention(
            **dims,
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            v_dim=self.pick(dim, dim, 4, 24),
            scale=self.pick(1.0, dim**-0.5, 0.3),
            causal=causal,
            bias_dims=bias,
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            q_layout=q_layout,
            kv_layout=kv_layout,
            out_layout=self._order(),
            kv_prefix=prefix,
            bias_dtype=self.pick("float32", self.dtype),
            bias_op=self.pick("add", "add", "min"),
            mask_dims=self._dims() if self.chance(20) else None,
            window=self.pick(None, None, 1, 3, 16) if causal != "none" else None,
            softcap=self.pick(None, None, None, 5.0),
            alibi=self.pick(None, None, None, "float32"),
            sinks=self.pick(None, None, None, "float32", self.dtype),
            q_in=self._among(heads, q_layout),
            k_in=self._among(kv_heads, kv_layout),
            v_in=self._among(kv_heads, kv_layout),
        )
        if self.chance(15):  # on CPUs: others have no plan for it
            work = replace(work, shared=self.pick(1, dim // 4, dim // 2, dim - 1))
        if self.chance(15):
            lengths = Lengths(self.pick("int32", "int64"), self.chance(50), self.pick(0, 1, -2))
            work = replace(work, lengths=lengths)
        return attention_cases.Case(repr(work), work, sizes)

    def _among(self, heads: int, layout: str) -> Heads | None:
        if layout != "bsnh" or self.chance(60):
            return None
        start, step = self.pick(0, 0, 1, 2, heads), self.pick(1, 1, 2, 3)
        return Heads(start + step * (heads - 1) + 1 + self.pick(0, 1, 5), start, step)

    def _order(self) -> Any:
        return self.pick("bsnh", "bnsh")

    def _dims(self) -> tuple[bool, bool, bool, bool]:
        return self.chance(50), self.chance(50), self.chance(70), True


KINDS = ("contraction", "contraction", "gated", "chain", "attention", "attention")
"""Which class of workload is drawn how often."""
