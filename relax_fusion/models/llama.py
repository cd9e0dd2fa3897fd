"""LLaMA 2 and 3 on ``tvm.relax.frontend.nn``, with merged projections and a plain KV cache."""

from __future__ import annotations

from functools import partial

import numpy as np
from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from . import kv_cache
from .config import LlamaConfig
from .layers import (
    Embedding,
    activation,
    attention,
    last_position,
    project_to_vocabulary,
    slice_rows,
)
from .recipes import Recipe
from .rope import Angles, inverse_frequencies, rope_table


class LlamaAttention(nn.Module):
    """Grouped-query attention with one merged query, key, value projection."""

    def __init__(self, config: LlamaConfig) -> None:
        self.heads = kv_cache.Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.scale = config.head_dim**-0.5
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(config.hidden_size, self.heads.merged, bias=bias)
        self.o_proj = nn.Linear(self.heads.query * self.heads.dim, config.hidden_size, bias=bias)

    def forward(
        self, x: Tensor, cache: tuple[Tensor, Tensor], total_len: tirx.Var, angles: Angles
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map ``[batch, seq_len, hidden]`` to itself; return the updated cache too."""
        qkv = angles.turn_first(self.qkv_proj(x), self.heads.query + self.heads.kv)
        q, keys, values = kv_cache.append(qkv, cache, total_len, self.heads)
        k = slice_rows(keys, 1, 0, total_len)
        v = slice_rows(values, 1, 0, total_len)
        return self.o_proj(attention(q, k, v, self.scale)), (keys, values)


class LlamaMLP(nn.Module):
    """Gated feed-forward network; gate and up share one projection."""

    def __init__(self, config: LlamaConfig) -> None:
        self.hidden_act = config.hidden_act
        wide, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * wide, bias=bias)
        self.down_proj = nn.Linear(wide, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq_len, hidden]`` to itself through the gated activation."""
        gate, up = op.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(activation(self.hidden_act, gate) * up)


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual add."""

    def __init__(self, config: LlamaConfig) -> None:
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, -1, eps, bias=False)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, -1, eps, bias=False)
        self.mlp = LlamaMLP(config)

    def forward(
        self, x: Tensor, cache: tuple[Tensor, Tensor], total_len: tirx.Var, angles: Angles
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map ``[batch, seq_len, hidden]`` to itself; return the updated cache too."""
        attended, cache = self.self_attn(self.input_layernorm(x), cache, total_len, angles)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class LlamaModel(nn.Module):
    """Embedding, layers and final norm; holds the rotary tables."""

    def __init__(self, config: LlamaConfig, max_seq_len: int) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rope_cos = nn.Parameter((max_seq_len, config.head_dim), dtype="float32")
        self.rope_sin = nn.Parameter((max_seq_len, config.head_dim), dtype="float32")
        self.layers = nn.ModuleList([LlamaLayer(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.norm_eps, bias=False)


class LlamaForCausalLM(nn.Module):
    """A LLaMA decoder with its output head."""

    def __init__(self, config: LlamaConfig, max_seq_len: int, dtype: str) -> None:
        self.model = LlamaModel(config, max_seq_len)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tied = config.tie_word_embeddings
        self.to(dtype)
        for table in (self.model.rope_cos, self.model.rope_sin):
            table.to("float32")

    def prefill(self, input_ids: Tensor, total_len: tirx.Var, caches: list[Tensor]):
        """Run ``[batch, seq_len]`` tokens; logits of the last one, and the caches."""
        x = self.model.embed_tokens(input_ids)
        tables = self.model.rope_cos, self.model.rope_sin
        angles = Angles.of(*tables, input_ids.shape[1], total_len)
        updated: list[Tensor] = []
        for i, layer in enumerate(self.model.layers):
            pair = (caches[2 * i], caches[2 * i + 1])
            x, pair = layer(x, pair, total_len, angles)
            updated.extend(pair)
        x = self.model.norm(last_position(x))
        head = self.model.embed_tokens.weight if self.tied else self.lm_head.weight
        return project_to_vocabulary(x, head), updated

    decode = prefill
    """Prefill of one token per sequence."""


def recipes(config: LlamaConfig, max_seq_len: int) -> dict[str, Recipe]:
    """Where each parameter of `LlamaForCausalLM` comes from in a Hugging Face checkpoint."""
    freq = inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
    found = {
        f"model.rope_{name}": Recipe(compute=partial(rope_table, freq, max_seq_len, function))
        for name, function in (("cos", np.cos), ("sin", np.sin))
    }
    query, kv, wide = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
    )
    for i in range(config.num_layers):
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        for kind in ("weight", "bias"):
            found[f"{attn}.qkv_proj.{kind}"] = Recipe(
                tuple(f"{attn}.{part}_proj.{kind}" for part in "qkv"), rows=(query, kv, kv)
            )
            found[f"{mlp}.gate_up_proj.{kind}"] = Recipe(
                tuple(f"{mlp}.{part}_proj.{kind}" for part in ("gate", "up")), rows=(wide, wide)
            )
    return found
