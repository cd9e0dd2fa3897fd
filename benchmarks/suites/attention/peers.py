"""The cases of `cases` in PyTorch: tensors, float64 reference, the peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.suites.attention.cases import SOFTCAP, WINDOW, Case
from relax_fusion.studio.bench.torch_peers import TUNED, under_compile

SAMPLED_ROWS = 512
"""Queries of a sequence whose results are compared with float64."""

SCORES_AT_ONCE = 1 << 27
"""Elements of the reference's scores, which are in float64."""

_SLOPE_DTYPE = torch.float32


class Problem:
    """Operands of a case, and what is to come of them.

    Parameters
    ----------
    case : Case
        Their sizes.
    dtype : {"float16", "bfloat16", "float32"}
        Of every tensor but slopes, which are float32, and a boolean mask.
    layout : {"bsnh", "bnsh"}
        Order of batch, sequence, heads and features in memory.
    device : str
        Where they are.
    """

    def __init__(self, case: Case, dtype: str, layout: str, device: str) -> None:
        self.case, self.dtype, self.layout = case, getattr(torch, dtype), layout
        torch.manual_seed(0)
        sizes = dict(zip("nsh", (case.heads[0], case.lengths[0], case.head_dim), strict=True))
        stored = dict(zip("nsh", (case.heads[1], case.lengths[1], case.head_dim), strict=True))

        def drawn(**extents: int) -> torch.Tensor:
            shape = [{**extents, "b": case.batch}[letter] for letter in layout]
            return torch.randn(shape, device=device, dtype=self.dtype)

        self.operands = {"q": drawn(**sizes), "k": drawn(**stored), "v": drawn(**stored)}
        scores = (1, case.heads[0], *case.lengths)
        if case.mask == "bias":
            self.operands["bias"] = torch.randn(scores, device=device, dtype=self.dtype)
        elif case.mask == "where":
            self.operands["mask"] = torch.rand(scores, device=device) < 0.8
        elif case.mask == "alibi":
            steps = torch.arange(1, case.heads[0] + 1, device=device, dtype=_SLOPE_DTYPE)
            self.operands["slopes"] = 2 ** (-8 / case.heads[0] * steps)

    def heads_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a tensor of this problem's layout as torch takes it."""
        return tensor if self.layout == "bnsh" else tensor.transpose(1, 2)

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value as torch takes them; they are not copied."""
        q, k, v = (self.heads_first(self.operands[name]) for name in "qkv")
        return q, k, v

    # --- what is right ---------------------------------------------------------------------

    def rows(self) -> torch.Tensor:
        """Return the queries to be compared: all, or random ones with the first and the last."""
        queries = self.case.lengths[0]
        device = self.operands["q"].device
        if queries <= SAMPLED_ROWS:
            return torch.arange(queries, device=device)
        generator = torch.Generator().manual_seed(1)
        drawn = 1 + torch.randperm(queries - 2, generator=generator)[: SAMPLED_ROWS - 2]
        ends = torch.tensor([0, queries - 1])
        return torch.cat([ends, drawn]).sort().values.to(device)

    def computed(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the sampled queries' results, ``[b, n, s, h]``, every step in `dtype`."""
        (q, k, v), rows = self.qkv, self.rows()
        at_once = max(1, SCORES_AT_ONCE // (q.shape[1] * k.shape[2]))
        parts = []
        for i in range(q.shape[0]):
            k_i, v_i = k[i].to(dtype), v[i].to(dtype)
            chunks = (
                self._attend(q[i][:, part].to(dtype), k_i, v_i, part)
                for part in rows.split(at_once)
            )
            parts.append(torch.cat(list(chunks), dim=1))
        return torch.stack(parts)

    def reference(self) -> torch.Tensor:
        """Return the sampled queries' results in float64, no intermediate rounded."""
        return self.computed(torch.float64)

    def rounded(self) -> torch.Tensor:
        """Return the sampled queries' results of steps in float32, rounded to the dtype."""
        return self.computed(torch.float32).to(self.dtype)

    def sampled(self, out: torch.Tensor) -> torch.Tensor:
        """Return what a result ``[b, n, s, h]`` has for the sampled queries."""
        return out[:, :, self.rows()]

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Attend from some queries of a sequence: operands are ``[heads, positions, features]``."""
        group, keys = (self.case.heads[0] // self.case.heads[1], self.case.lengths[1])

        def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            """Multiply what all queries' heads have by what groups of them share."""
            shared = a.unflatten(0, (-1, group)).flatten(1, 2) @ b
            return shared.unflatten(1, (group, -1)).flatten(0, 1)

        scores = times(q, k.mT) * self.case.scale
        scores = self._modified(scores, rows, torch.arange(keys, device=rows.device))
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        return times(weights / torch.where(total == 0, torch.ones_like(total), total), v)

    def _modified(
        self, scores: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Apply what the case does to scores ``[heads, rows, keys]``."""
        case, hidden = self.case, torch.full((), -torch.inf, dtype=scores.dtype).to(scores)
        distance = keys - (rows + (case.lengths[1] - case.lengths[0]))[:, None]
        if case.mask == "softcap":
            scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
        elif case.mask == "bias":
            scores = scores + self.operands["bias"][0][:, rows].to(scores.dtype)
        elif case.mask == "alibi":
            slopes = self.operands["slopes"].to(scores.dtype)
            scores = scores + slopes[:, None, None] * distance.to(scores.dtype)
        elif case.mask == "where":
            scores = torch.where(self.operands["mask"][0][:, rows], scores, hidden)
        elif case.mask == "window":
            scores = torch.where(distance > -WINDOW, scores, hidden)
        return torch.where(distance <= 0, scores, hidden) if case.causal else scores

    # --- peers -----------------------------------------------------------------------------

    def sdpa(self, backend: str) -> Callable[[], torch.Tensor]:
        """Return the call of an SDPA back end; heads of k and v are shared, not expanded."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        names = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

        def call() -> torch.Tensor:
            with sdpa_kernel(names[backend]):
                return self._sdpa()

        return call

    def _sdpa(self) -> torch.Tensor:
        q, k, v = self.qkv
        case = self.case
        return scaled_dot_product_attention(
            *(q, k, v, self.operands.get("bias")),
            is_causal=case.causal,
            enable_gqa=case.heads[0] != case.heads[1],
        )

    def compiled(self) -> Callable[[], torch.Tensor]:
        """Return SDPA under torch.compile."""
        function = under_compile(self._sdpa, TUNED, dynamic=False)
        function()
        return function

    def flex(self) -> Callable[[], torch.Tensor]:
        """Return FlexAttention, compiled and tuned for these sizes; its block mask is made here."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = self.qkv
        case = self.case
        mods: dict[str, Any] = {"score_mod": self._score_mod()}
        if case.causal:
            visible = _in_window if case.mask == "window" else _at_or_before
            mods["block_mask"] = create_block_mask(
                visible, None, None, *case.lengths, device=str(q.device)
            )
        grouped = case.heads[0] != case.heads[1]
        function = under_compile(
            lambda q, k, v: flex_attention(q, k, v, enable_gqa=grouped, **mods),
            TUNED,
            dynamic=False,
        )
        function(q, k, v)
        return lambda: function(q, k, v)

    def _score_mod(self) -> Callable[..., torch.Tensor] | None:
        """Return what FlexAttention is to do to a score."""
        bias, slopes = self.operands.get("bias"), self.operands.get("slopes")
        mods: dict[str, Callable[..., torch.Tensor]] = {
            "bias": lambda s, b, h, i, j: s + bias[0, h, i, j],
            "alibi": lambda s, b, h, i, j: s + slopes[h] * (j - i),
            "softcap": lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP),
        }
        return mods.get(self.case.mask)


def _at_or_before(_b: Any, _h: Any, query: Any, key: Any) -> Any:
    return query >= key


def _in_window(_b: Any, _h: Any, query: Any, key: Any) -> Any:
    return (query >= key) & (query - key < WINDOW)
