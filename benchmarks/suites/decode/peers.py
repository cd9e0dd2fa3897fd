"""Steps of LLaMAs and GPT-2s in PyTorch, on the weights and caches of an exported model.

A token's experts are gathered, which is PyTorch's faster way for few tokens: `suites.experts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import (
    gelu,
    layer_norm,
    linear,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from benchmarks.suites.experts import BMM_PAIRS, Model, by_pair
from relax_fusion.models import Config, GPT2Config, LlamaConfig
from relax_fusion.models.expert_config import Experts
from relax_fusion.models.rope import inverse_frequencies

CUDNN_FIRST = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


class Peer(torch.nn.Module):
    """The last tokens of sequences at fixed places; the caches are updated in place.

    Parameters
    ----------
    config : LlamaConfig or GPT2Config
        One of which `refusal` finds nothing.
    weights : mapping of str to Tensor
        By the names of `relax_fusion.models.export`.
    caches : sequence of Tensor
        Keys and values of every layer, ``[batch, max_seq_len, kv_heads, head_dim]``.  Everything is
        computed in their type.
    total : int
        Tokens in the caches after the step.
    tokens : int
        Of each sequence in the step: one, or all of them.
    by_cudnn : bool
        Whether attention is cuDNN's where that takes it; else PyTorch chooses.
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, torch.Tensor],
        caches: Sequence[torch.Tensor],
        total: int,
        tokens: int = 1,
        by_cudnn: bool = False,
    ) -> None:
        super().__init__()
        # Read when traced: by it torch.compile tells this peer's graph from another's
        self.by_cudnn = by_cudnn
        self.config, self.total, self.tokens = config, total, tokens
        self.dtype = caches[0].dtype
        # As buffers, whose addresses torch.compile's CUDA graphs take for fixed
        for name, value in weights.items():
            self.register_buffer(name.replace(".", "_"), value)
        for i, cache in enumerate(caches):
            self.register_buffer(f"cache_{i}", cache)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, tokens]`` ids to logits ``[batch, 1, vocab]`` of the last ones."""
        x = self.embedded(ids.long())
        for i in range(self.config.num_layers):
            x = self.layer(x, i)
        return self.logits(x[:, -1:])

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def layer(self, x: torch.Tensor, i: int) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def weight(self, name: str) -> torch.Tensor:
        return self.get_buffer(name.replace(".", "_")).to(self.dtype)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Multiply by a weight, and add its bias if it has one."""
        has_bias = hasattr(self, f"{name}.bias".replace(".", "_"))
        return linear(
            x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias") if has_bias else None
        )

    def heads(self, h: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values of a merged projection."""
        c, qkv = self.config, self.linear(h, name)
        parts = qkv.view(*qkv.shape[:2], -1, c.head_dim)
        return parts.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=2)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, i: int) -> torch.Tensor:
        """Append to the caches of a layer, and attend without a mask, ``[batch, tokens, wide]``."""
        caches = self.get_buffer(f"cache_{2 * i}"), self.get_buffer(f"cache_{2 * i + 1}")
        first, total = self.total - self.tokens, self.total
        for cache, new in zip(caches, (k, v), strict=True):
            cache[:, first:total] = new
        k, v = (k, v) if first == 0 else (cache[:, :total] for cache in caches)
        order = sdpa_kernel(CUDNN_FIRST, set_priority=True) if self.by_cudnn else nullcontext()
        with order:
            out = scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                is_causal=self.tokens > 1,
                enable_gqa=self.config.num_heads != self.config.num_kv_heads,
            )
        return out.transpose(1, 2).flatten(2)


class Llama(Peer):
    """Of a `LlamaConfig`."""

    config: LlamaConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        c, places = self.config, torch.arange(self.total - self.tokens, self.total)
        freq = inverse_frequencies(c.rope_theta, c.head_dim, c.rope_scaling)
        angles = torch.outer(places.double(), torch.from_numpy(freq)).repeat(1, 2)[:, None]
        kept = torch.float64 if self.dtype == torch.float64 else torch.float32
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, table.to(self.get_buffer("cache_0").device, kept))

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight("model.embed_tokens.weight")[ids]

    def layer(self, x: torch.Tensor, i: int) -> torch.Tensor:
        name = f"model.layers.{i}."
        h = self.norm(x, name + "input_layernorm.weight")
        q, k, v = self.projected(h, name + "self_attn.")
        out = self.attention(self.turned(q), self.turned(k), v, i)
        x = x + self.linear(out, name + "self_attn.o_proj")
        h = self.norm(x, name + "post_attention_layernorm.weight")
        if experts := self.config.experts and self.config.experts.at(i):
            return x + self.chosen(h, experts, name + "mlp.")
        gate, up = self.linear(h, name + "mlp.gate_up_proj").chunk(2, dim=-1)
        return x + self.linear(silu(gate) * up, name + "mlp.down_proj")

    def projected(self, h: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values; heads that have norms are projected one by one."""
        if not self.config.qk_norm:
            return self.heads(h, name + "qkv_proj")
        q, k, v = (
            self.linear(h, f"{name}{which}_proj").unflatten(-1, (-1, self.config.head_dim))
            for which in "qkv"
        )
        return self.norm(q, name + "q_norm.weight"), self.norm(k, name + "k_norm.weight"), v

    def chosen(self, h: torch.Tensor, experts: Experts, name: str) -> torch.Tensor:
        """Return what the experts of each token make of it."""
        model = Model(experts.count, experts.chosen, h.shape[-1], experts.features)
        shapes = model.shapes()
        names = {"router": "gate", "up": "gate_up_proj", "down": "down_proj"}
        weights = {
            part: self.weight(f"{name}{own}.weight").view(shapes[part])
            for part, own in names.items()
        }
        return by_pair(model, h.flatten(0, 1), weights).view(h.shape)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self.linear(self.norm(x, "model.norm.weight"), head)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self.weight(name), self.config.norm_eps)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate heads: lane d pairs with lane d + dim / 2."""
        first, second = x.to(self.cos.dtype).chunk(2, dim=-1)
        other = torch.cat([-second, first], dim=-1)
        return (x.to(self.cos.dtype) * self.cos + other * self.sin).to(x.dtype)


class GPT2(Peer):
    """Of a `GPT2Config`."""

    config: GPT2Config

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        places = self.weight("transformer.wpe.weight")[self.total - self.tokens : self.total]
        return self.weight("transformer.wte.weight")[ids] + places

    def layer(self, x: torch.Tensor, i: int) -> torch.Tensor:
        name = f"transformer.h.{i}."
        h = self.norm(x, name + "ln_1")
        out = self.attention(*self.heads(h, name + "attn.c_attn"), i)
        x = x + self.linear(out, name + "attn.c_proj")
        h = self.linear(self.norm(x, name + "ln_2"), name + "mlp.c_fc")
        return x + self.linear(gelu(h, approximate="tanh"), name + "mlp.c_proj")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        head = "transformer.wte" if self.config.tie_word_embeddings else "lm_head"
        return self.linear(self.norm(x, "transformer.ln_f"), head)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return layer_norm(x, x.shape[-1:], weight, bias, self.config.norm_eps)


PEERS: dict[type[Config], type[Peer]] = {LlamaConfig: Llama, GPT2Config: GPT2}

COMPUTED = (
    *("norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "attention_bias"),
    *("mlp_bias", "output_bias", "end_tokens", "merged_checkpoint", "qk_norm", "experts"),
)
"""Fields of configurations that may have any value; the others have their default, or are sizes."""


def refusal(config: Config, tokens: int = 1) -> str:
    """Return why there is no peer of a configuration for so many; nothing if there is one."""
    if type(config) not in PEERS:
        return "it is no decoder"
    if isinstance(config, LlamaConfig) and (experts := config.experts):
        if tokens * experts.chosen > BMM_PAIRS:
            return f"PyTorch's side has experts for {BMM_PAIRS // experts.chosen} tokens at most"
        if not experts.renormalised:
            return "PyTorch's side divides shares of experts by their sum"
    optional = [f for f in fields(config) if f.default is not MISSING and f.name not in COMPUTED]
    others = [f.name for f in optional if getattr(config, f.name) != f.default]
    return f"PyTorch's side computes no {', '.join(others)}" if others else ""


def peer(config: Config, *args: Any) -> Peer:
    """Return the peer of a configuration; arguments as of `Peer`."""
    return PEERS[type(config)](config, *args)
