"""Chains of matmuls as modules of PyTorch: tables of papers, blocks of models, random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import nn
from tvm import ir

from benchmarks.exporting import as_relax

ATTENTION = ("FuseAttentionChain",)
"""Passes that do a softmax between matmuls without the chain engine."""


class Products(nn.Module):
    """``x @ B @ D``, of matrices or of batches of them."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        drawn = (torch.randn(shape) * shape[-2] ** -0.5 for shape in shapes)
        self.weights = nn.ParameterList(drawn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


class Softmax(nn.Module):
    """Attention of some heads as its parts, without a mask."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return torch.softmax(scores, -1) @ v


class Adapter(nn.Module):
    """``2 B A x + y``, what LoRA adds (Hu et al., 2021)."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(features, rank, bias=False)
        self.up = nn.Linear(rank, features, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x)) * 2.0 + y


class Mixer(nn.Module):
    """What MLP-Mixer does across tokens (Tolstikhin et al., 2021)."""

    def __init__(self, tokens: int, hidden: int, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.mlp = nn.Sequential(nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x).transpose(1, 2)).transpose(1, 2)


class Residual(nn.Module):
    """``x + body(norm(x))``."""

    def __init__(self, norm: nn.Module, *body: nn.Module) -> None:
        super().__init__()
        self.norm, self.body = norm, nn.Sequential(*body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self.norm(x))


class Memory(nn.Module):
    """External attention (Guo et al., 2021): a softmax over learned keys."""

    def __init__(self, features: int, slots: int) -> None:
        super().__init__()
        self.keys = nn.Linear(features, slots, bias=False)
        self.values = nn.Linear(slots, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values(torch.softmax(self.keys(x), -1)) + x


def mlp(
    *widths: int,
    between: Callable[[int], nn.Module] | None = None,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Return linear layers with activations between them, and perhaps norms."""
    layers: list[nn.Module] = []
    for k, n in pairwise(widths):
        layers += [nn.Linear(k, n), *([between(n)] if between else []), activation()]
    return nn.Sequential(*layers[: -2 if between else -1])


@dataclass(frozen=True)
class Case:
    """A chain.

    Parameters
    ----------
    make : callable
        Makes the module.
    shapes : tuple of tuple of int
        Of its inputs.
    dtype : torch.dtype
        Of all.
    peer : callable, optional
        What torch has for the same, of the inputs.
    others : tuple of str
        Passes that take the chain before the chain engine may.
    """

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float16
    peer: Callable[..., torch.Tensor] | None = field(default=None, compare=False)
    others: tuple[str, ...] = ()


GEMM_CHAINS = (  # batch, m, n, k, h of MCFuser's table: n is between the matmuls
    *((1, 512, 256, 64, h) for h in (64, 128, 256)),
    *((1, 512, 512, k, 256) for k in (256, 512, 1024)),
    *((1, m, 512, 128, 128) for m in (512, 1024, 2048)),
    *((b, 1024, 1024, 128, 128) for b in (1, 4, 8)),
)
ATTENTIONS = (  # heads, m, n, k, h of its table of self-attention
    *((heads, 512, 512, 64, 64) for heads in (8, 12, 16)),
    *((12, 256, 256, 64, 64), (16, 256, 256, 64, 64), (16, 256, 256, 80, 80)),
    *((1, m, n, 64, 64) for m, n in ((512, 256), (768, 384), (1024, 512))),
)


def _gemms(b: int, m: int, n: int, k: int, h: int) -> Case:
    lead = () if b == 1 else (b,)
    return Case(lambda: Products((*lead, k, n), (*lead, n, h)), ((*lead, m, k),))


def _attention(heads: int, m: int, n: int, k: int, h: int) -> Case:
    shapes = ((1, heads, m, k), (1, heads, n, k), (1, heads, n, h))
    peer = nn.functional.scaled_dot_product_attention
    return Case(Softmax, shapes, peer=peer, others=ATTENTION)


def _adapter(rank: int, rows: int) -> Case:
    return Case(lambda: Adapter(4096, rank), ((rows, 4096), (rows, 4096)))


def _ffn(width: int, hidden: int, norm: Callable[[int], nn.Module], *shape: int) -> Case:
    def make() -> nn.Module:
        layers = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        return Residual(norm(width), *layers)

    return Case(make, ((*shape, width),))


NAMED: dict[str, Case] = {
    **{f"G{i}": _gemms(*sizes) for i, sizes in enumerate(GEMM_CHAINS, 1)},
    **{f"S{i}": _attention(*sizes) for i, sizes in enumerate(ATTENTIONS, 1)},
    **{
        f"LoRA of rank {rank}, {rows} rows": _adapter(rank, rows)
        for rank in (16, 64)
        for rows in (16, 512, 4096)
    },
    "bottleneck of 64 in 768, 1024 rows": Case(
        lambda: Residual(nn.Identity(), *mlp(768, 64, 768, activation=nn.GELU)),
        ((1024, 768),),
        torch.bfloat16,
    ),
    "tokens of Mixer-S/16, 8 images": Case(lambda: Mixer(196, 256, 512), ((8, 196, 512),)),
    "tokens of Mixer-B/32, 16 images": Case(lambda: Mixer(49, 384, 768), ((16, 49, 768),)),
    "MLP of ViT-Ti/16, 8 images": _ffn(192, 768, nn.LayerNorm, 8, 197),
    "MLP of BERT-mini, 32 x 128 tokens": _ffn(256, 1024, nn.Identity, 32, 128),
    "MLP of BERT-small, 4 x 512 tokens": _ffn(512, 2048, nn.Identity, 4, 512),
    "three layers of 64, 65536 rows": Case(lambda: mlp(64, 64, 64, 64), ((65536, 64),)),
    "three layers of 128, 8192 rows": Case(lambda: mlp(128, 128, 128, 128), ((8192, 128),)),
    "norms between 256, 4096 rows": Case(
        lambda: mlp(256, 256, 256, between=nn.LayerNorm), ((4096, 256),)
    ),
    "adapter of 64 in 768, 2048 rows": _ffn(768, 64, nn.LayerNorm, 2048),
    "memory of 64 in 512, 4096 rows": Case(lambda: Memory(512, 64), ((4096, 512),)),
}
"""What has a name."""

WIDTHS = (32, 64, 96, 128, 192, 256, 320, 384, 512)
ROWS = (77, 256, 500, 1024, 1500, 2048, 4096, 6000, 8192)
ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh)


def _drawn(draw: random.Random) -> Case:
    """Return a random chain."""
    kind = draw.choice(("products", "batched", "layers", "norms", "residual", "mixer", "memory"))
    widths, rows = [draw.choice(WIDTHS) for _ in range(4)], draw.choice(ROWS)
    k, n, h, _ = widths
    activation, layers = draw.choice(ACTIVATIONS), draw.choice((3, 3, 4))
    if kind == "products":
        return _gemms(1, rows, n, k, h)
    if kind == "batched":
        return _gemms(draw.choice((2, 6, 16)), min(rows, 1024), n, min(k, 256), min(h, 256))
    if kind == "layers":
        return Case(lambda: mlp(*widths[:layers], activation=activation), ((rows, k),))
    if kind == "norms":
        sizes = [min(w, 256) for w in widths[:3]]
        made = draw.choice((nn.LayerNorm, nn.RMSNorm))
        return Case(lambda: mlp(*sizes, between=made, activation=activation), ((rows, sizes[0]),))
    if kind == "residual":
        norm = draw.choice((nn.Identity, nn.LayerNorm, nn.RMSNorm))
        body = (k, n, k)
        return Case(lambda: Residual(norm(k), *mlp(*body, activation=activation)), ((rows, k),))
    if kind == "mixer":
        tokens, features = draw.choice((49, 64, 100, 196)), draw.choice((192, 384, 512))
        images = draw.choice((2, 8, 32))
        return Case(lambda: Mixer(tokens, n, features), ((images, tokens, features),))
    return Case(lambda: Memory(k, n), ((rows, k),))


def sampled(count: int, seed: int) -> list[str]:
    """Return the names of random chains."""
    return [f"random {seed}.{i}" for i in range(count)]


def case_of(name: str) -> Case:
    """Return the case of a name; a random chain is drawn by it."""
    return NAMED[name] if name in NAMED else _drawn(random.Random(name))


Exported: TypeAlias = tuple[nn.Module, ir.IRModule, list[torch.Tensor], list[torch.Tensor]]
"""A module, its import, its inputs, and its weights, which are operands behind these."""


@cache
def exported(name: str) -> Exported:
    """Export the case of a name."""
    return export(case_of(name))


def export(case: Case) -> Exported:
    """Make and export a case, always with the same weights."""
    torch.manual_seed(0)
    module = case.make().to(case.dtype).eval()
    inputs = [torch.randn(shape).to(case.dtype) for shape in case.shapes]
    mod, weights = as_relax(module, tuple(inputs))
    return module, mod, inputs, weights
