"""GPT-2 on ``tvm.relax.frontend.nn``, with learned positions and a plain KV cache."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor

from . import kv_cache
from .config import GPT2Config
from .kv_cache import Cache
from .layers import Embedding, Recipe, activation, last_position, project_to_vocabulary
from .places import Decoder, Place
from .shards import WHOLE, Places, Shards


class GPT2Attention(nn.Module):
    """Multi-head attention with one merged query, key, value projection."""

    def __init__(self, config: GPT2Config, layer: int, shards: Shards) -> None:
        self.heads = shards.heads(config)
        self.scale = config.head_dim**-0.5 if config.scale_attention else 1.0
        if config.scale_by_layer:
            self.scale /= layer + 1
        self.c_attn = nn.Linear(config.hidden_size, self.heads.merged)
        self.c_proj = nn.Linear(self.heads.query * self.heads.dim, config.hidden_size)

    def forward(self, x: Tensor, cache: Cache, place: Place) -> tuple[Tensor, Cache]:
        """Map ``[batch, seq_len, hidden]`` to this worker's part; return the updated cache too."""
        q, keys, values = kv_cache.append(self.c_attn(x), cache, place.end, self.heads)
        return self.c_proj(place.attend(q, (keys, values), self.scale)), (keys, values)


class GPT2MLP(nn.Module):
    """Two projections with an activation between."""

    def __init__(self, config: GPT2Config, shards: Shards) -> None:
        self.hidden_act = config.hidden_act
        wide = shards.rows(config.intermediate_size)
        self.c_fc = nn.Linear(config.hidden_size, wide)
        self.c_proj = nn.Linear(wide, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq_len, hidden]`` through the wide activation to this worker's part."""
        return self.c_proj(activation(self.hidden_act, self.c_fc(x)))


class GPT2Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual add."""

    def __init__(self, config: GPT2Config, layer: int, shards: Shards) -> None:
        self.shards = shards
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = GPT2Attention(config, layer, shards)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = GPT2MLP(config, shards)

    def forward(self, x: Tensor, cache: Cache, place: Place) -> tuple[Tensor, Cache]:
        """Map ``[batch, seq_len, hidden]`` to itself; return the updated cache too."""
        attended, cache = self.attn(self.ln_1(x), cache, place)
        x = self.shards.added(x, attended)
        return self.shards.added(x, self.mlp(self.ln_2(x))), cache


class GPT2Model(nn.Module):
    """Token and position embeddings, layers and final norm."""

    def __init__(self, config: GPT2Config, shards: Shards) -> None:
        self.wte = shards.embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_position, config.hidden_size)
        self.h = nn.ModuleList([GPT2Layer(config, i, shards) for i in range(config.num_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size, config.norm_eps)


class GPT2LMHeadModel(Decoder):
    """A GPT-2 decoder with its output head."""

    def __init__(
        self, config: GPT2Config, max_seq_len: int, dtype: str, shards: Shards = WHOLE
    ) -> None:
        self.transformer = GPT2Model(config, shards)
        self.tied, self.vocab, self.shards = config.tie_word_embeddings, config.vocab_size, shards
        if not self.tied:
            self.lm_head = nn.Linear(config.hidden_size, shards.rows(self.vocab), bias=False)
        self.to(dtype)

    def _run(self, ids: Tensor, place: Place, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x = self.transformer.wte(ids) + place.rows(self.transformer.wpe.weight)
        updated: list[Tensor] = []
        for i, layer in enumerate(self.transformer.h):
            x, pair = layer(x, (caches[2 * i], caches[2 * i + 1]), place)
            updated.extend(pair)
        x = self.transformer.ln_f(last_position(x))
        head = self.transformer.wte.weight if self.tied else self.lm_head.weight
        return self.shards.joined(project_to_vocabulary(x, head), self.vocab), updated


def recipes(config: GPT2Config, max_seq_len: int, shards: Shards = WHOLE) -> dict[str, Recipe]:
    """Which parameters of `GPT2LMHeadModel` a checkpoint stores the other way round."""
    transposed = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = [
        f"transformer.h.{i}.{part}.weight" for i in range(config.num_layers) for part in transposed
    ]
    found = {name: Recipe((name,), transpose=True) for name in names}
    found |= shards.table_recipes("transformer.wte", "transformer.wte", config.vocab_size)
    places: Places = {"lm_head.weight": (0, (shards.segment(config.vocab_size),))}
    heads, wide = map(shards.segment, (config.hidden_size, config.intermediate_size))
    for i in range(config.num_layers):
        layer = f"transformer.h.{i}"
        for kind in ("weight", "bias"):
            places[f"{layer}.attn.c_attn.{kind}"] = (0, (heads, heads, heads))
            places[f"{layer}.mlp.c_fc.{kind}"] = (0, (wide,))
        for part, segment in (("attn", heads), ("mlp", wide)):
            places[f"{layer}.{part}.c_proj.weight"] = (1, (segment,))
            places[f"{layer}.{part}.c_proj.bias"] = (0, ())
    return shards.cut(found, places)
