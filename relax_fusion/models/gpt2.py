"""GPT-2 on ``tvm.relax.frontend.nn``, with learned positions and a plain KV cache."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor

from . import kv_cache
from .config import GPT2Config
from .kv_cache import Cache
from .layers import Embedding, Recipe, activation, last_position, project_to_vocabulary
from .places import Place, step


class GPT2Attention(nn.Module):
    """Multi-head attention with one merged query, key, value projection."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        self.heads = kv_cache.Heads(config.num_heads, config.num_heads, config.head_dim)
        self.scale = config.head_dim**-0.5 if config.scale_attention else 1.0
        if config.scale_by_layer:
            self.scale /= layer + 1
        self.c_attn = nn.Linear(config.hidden_size, self.heads.merged)
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, cache: Cache, place: Place) -> tuple[Tensor, Cache]:
        """Map ``[batch, seq_len, hidden]`` to itself; return the updated cache too."""
        q, keys, values = kv_cache.append(self.c_attn(x), cache, place.end, self.heads)
        return self.c_proj(place.attend(q, (keys, values), self.scale)), (keys, values)


class GPT2MLP(nn.Module):
    """Two projections with an activation between."""

    def __init__(self, config: GPT2Config) -> None:
        self.hidden_act = config.hidden_act
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq_len, hidden]`` to itself through the wide activation."""
        return self.c_proj(activation(self.hidden_act, self.c_fc(x)))


class GPT2Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual add."""

    def __init__(self, config: GPT2Config, layer: int) -> None:
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = GPT2MLP(config)

    def forward(self, x: Tensor, cache: Cache, place: Place) -> tuple[Tensor, Cache]:
        """Map ``[batch, seq_len, hidden]`` to itself; return the updated cache too."""
        attended, cache = self.attn(self.ln_1(x), cache, place)
        x = x + attended
        return x + self.mlp(self.ln_2(x)), cache


class GPT2Model(nn.Module):
    """Token and position embeddings, layers and final norm."""

    def __init__(self, config: GPT2Config) -> None:
        self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_position, config.hidden_size)
        self.h = nn.ModuleList([GPT2Layer(config, i) for i in range(config.num_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size, config.norm_eps)


class GPT2LMHeadModel(nn.Module):
    """A GPT-2 decoder with its output head."""

    def __init__(self, config: GPT2Config, max_seq_len: int, dtype: str) -> None:
        self.transformer = GPT2Model(config)
        self.tied = config.tie_word_embeddings
        if not self.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(dtype)

    def prefill(self, input_ids: Tensor, total_len: tirx.Var, caches: list[Tensor]) -> Any:
        """Run ``[batch, seq_len]`` tokens; logits of the last one, and the caches."""
        return self._run(input_ids, Place(input_ids.shape[1], total_len), caches)

    def decode(
        self, input_ids: Tensor, length: Tensor, total_len: tirx.Var, caches: list[Tensor]
    ) -> Any:
        """Run one token of each sequence, and put those that follow in its place; see `step`."""
        return step(self._run, input_ids, Place(1, total_len, length), caches)

    def _run(self, ids: Tensor, place: Place, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x = self.transformer.wte(ids) + place.rows(self.transformer.wpe.weight)
        updated: list[Tensor] = []
        for i, layer in enumerate(self.transformer.h):
            x, pair = layer(x, (caches[2 * i], caches[2 * i + 1]), place)
            updated.extend(pair)
        x = self.transformer.ln_f(last_position(x))
        head = self.transformer.wte.weight if self.tied else self.lm_head.weight
        return project_to_vocabulary(x, head), updated


def recipes(config: GPT2Config, max_seq_len: int) -> dict[str, Recipe]:
    """Which parameters of `GPT2LMHeadModel` a checkpoint stores the other way round."""
    transposed = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = [
        f"transformer.h.{i}.{part}.weight" for i in range(config.num_layers) for part in transposed
    ]
    return {name: Recipe((name,), transpose=True) for name in names}
