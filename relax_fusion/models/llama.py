"""LLaMA and decoders like it on ``tvm.relax.frontend.nn``: merged projections, a plain KV cache."""

from __future__ import annotations

from functools import partial

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from . import kv_cache
from .config import LlamaConfig
from .deepseek import Latent
from .experts import LlamaExperts, expert_recipes
from .kv_cache import Cache
from .layers import (
    OffsetRMSNorm,
    Recipe,
    activation,
    last_position,
    project_to_vocabulary,
    soft_capped,
)
from .places import Decoder, Hidden, Place
from .rope import Angles, RopeScaling, inverse_frequencies, rope_table
from .shards import WHOLE, Places, Shards

_LATENT_EPS = 1e-6
"""Of the norms of DeepSeek's latent features, whatever its others have."""


def _norm(config: LlamaConfig, width: int) -> nn.Module:
    if config.norm_offset:
        return OffsetRMSNorm(width, config.norm_eps)
    return nn.RMSNorm(width, -1, config.norm_eps, bias=False)


class LlamaAttention(nn.Module):
    """Grouped-query attention, whose queries, keys and values subclasses make."""

    def __init__(self, config: LlamaConfig, layer: int, shards: Shards) -> None:
        self.heads = shards.heads(config)
        self.scale = config.query_scale or config.head_dim**-0.5
        self.cap, self.window = config.attention_softcap, config.window(layer)
        self.sinks = nn.Parameter((self.heads.query,)) if config.sinks else None
        bias = config.attention_bias if config.output_bias is None else config.output_bias
        wide = self.heads.dim if config.latent is None else config.latent.value
        self.o_proj = nn.Linear(self.heads.query * wide, config.hidden_size, bias=bias)

    def forward(
        self, x: Tensor, cache: Cache, place: Place, angles: Angles
    ) -> tuple[Tensor, Cache]:
        """Map ``[batch, seq_len, hidden]`` to this worker's part; return the updated cache too."""
        q, keys, values = self.appended(x, cache, place, angles)
        hidden = Hidden(self.window, self.cap, self.sinks)
        out = place.attend(q, (keys, values), self.scale, hidden)
        return self.o_proj(out), (keys, values)


class MergedAttention(LlamaAttention):
    """One projection gives queries, keys and values, which are rotated in it."""

    def __init__(self, config: LlamaConfig, layer: int, shards: Shards) -> None:
        super().__init__(config, layer, shards)
        merged = self.heads.merged
        self.qkv_proj = nn.Linear(config.hidden_size, merged, bias=config.attention_bias)

    def appended(
        self, x: Tensor, cache: Cache, place: Place, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, and the caches with what was appended."""
        qkv = angles.turn_first(self.qkv_proj(x), self.heads.query + self.heads.kv)
        return kv_cache.append(qkv, cache, place.end, self.heads)


class NormedAttention(LlamaAttention):
    """Heads of queries and keys are normalised before they are rotated.

    Projections are separate, which costs no launch: a merged one would be cut for the norms.
    """

    def __init__(self, config: LlamaConfig, layer: int, shards: Shards) -> None:
        super().__init__(config, layer, shards)
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads.query * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.heads.kv * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.heads.kv * dim, bias=bias)
        self.q_norm, self.k_norm = _norm(config, dim), _norm(config, dim)
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def appended(
        self, x: Tensor, cache: Cache, place: Place, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, and the caches with what was appended."""
        batch, seq_len, _ = x.shape
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        counts = (self.heads.query, self.heads.kv, self.heads.kv)
        q, k, v = (
            op.reshape(part, (batch, seq_len, heads, self.heads.dim))
            for part, heads in zip(projected, counts, strict=True)
        )
        q = angles.turn(self._normed(q, self.q_norm.weight))
        k = angles.turn(self._normed(k, self.k_norm.weight))
        return q, *kv_cache.write(k, v, cache, place.end)

    def _normed(self, heads: Tensor, weight: Tensor) -> Tensor:
        gamma = weight + 1.0 if self.offset else weight
        return op.rms_norm(heads, gamma, axes=[-1], epsilon=self.eps)


class LatentAttention(LlamaAttention):
    """Keys and values are made of a few features, and so are queries where these have a rank."""

    def __init__(self, config: LlamaConfig, latent: Latent, layer: int, shards: Shards) -> None:
        super().__init__(config, layer, shards)
        hidden, heads, form = config.hidden_size, self.heads.query, latent
        self.form = form
        wide = heads * self.heads.dim
        if form.query_rank is None:
            self.q_proj = nn.Linear(hidden, wide, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, form.query_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(form.query_rank, -1, _LATENT_EPS, bias=False)
            self.q_b_proj = nn.Linear(form.query_rank, wide, bias=False)
        self.kv_a_proj = nn.Linear(hidden, form.rank, bias=False)
        self.turned_proj = nn.Linear(hidden, form.rotated, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(form.rank, -1, _LATENT_EPS, bias=False)
        self.k_b_proj = nn.Linear(form.rank, heads * form.plain, bias=False)
        self.v_b_proj = nn.Linear(form.rank, heads * form.value, bias=False)

    def appended(
        self, x: Tensor, cache: Cache, place: Place, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, and the caches with what was appended."""
        (batch, seq_len, _), heads, form = x.shape, self.heads.query, self.form
        if form.query_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = op.reshape(q, (batch, seq_len, heads, self.heads.dim))
        q, turned = op.split(q, [form.plain], axis=-1)
        q = op.concat([q, angles.turn(turned)], dim=-1)
        latent = self.kv_a_layernorm(self.kv_a_proj(x))
        k = op.reshape(self.k_b_proj(latent), (batch, seq_len, heads, form.plain))
        v = op.reshape(self.v_b_proj(latent), (batch, seq_len, heads, form.value))
        turned = op.reshape(self.turned_proj(x), (batch, seq_len, 1, form.rotated))
        turned = angles.turn(turned)
        turned = op.broadcast_to(turned, (batch, seq_len, heads, form.rotated))
        return q, *kv_cache.write(op.concat([k, turned], dim=-1), v, cache, place.end)


class LlamaMLP(nn.Module):
    """Gated feed-forward network; gate and up share one projection."""

    def __init__(self, config: LlamaConfig, shards: Shards) -> None:
        self.hidden_act = config.hidden_act
        wide, bias = shards.rows(config.intermediate_size), config.mlp_bias
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * wide, bias=bias)
        self.down_proj = nn.Linear(wide, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq_len, hidden]`` through the gated activation to this worker's part."""
        gate, up = op.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(activation(self.hidden_act, gate) * up)


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each behind a norm, perhaps before another, and a residual add.

    Names of norms are those of checkpoints, where the second is what its name says only with norms
    behind: otherwise it is the one in front of the feed-forward network.
    """

    def __init__(self, config: LlamaConfig, layer: int, shards: Shards) -> None:
        hidden = config.hidden_size
        self.post_norms, self.shards = config.post_norms, shards
        self.input_layernorm = _norm(config, hidden)
        if config.latent is not None:
            self.self_attn: LlamaAttention = LatentAttention(config, config.latent, layer, shards)
        else:
            attention = NormedAttention if config.qk_norm else MergedAttention
            self.self_attn = attention(config, layer, shards)
        self.post_attention_layernorm = _norm(config, hidden)
        if config.post_norms:
            self.pre_feedforward_layernorm = _norm(config, hidden)
            self.post_feedforward_layernorm = _norm(config, hidden)
        experts = config.experts.at(layer) if config.experts else None
        self.mlp = LlamaExperts(config, experts) if experts else LlamaMLP(config, shards)

    def forward(
        self, x: Tensor, cache: Cache, place: Place, angles: Angles
    ) -> tuple[Tensor, Cache]:
        """Map ``[batch, seq_len, hidden]`` to itself; return the updated cache too."""
        attended, cache = self.self_attn(self.input_layernorm(x), cache, place, angles)
        if not self.post_norms:
            x = self.shards.added(x, attended)
            return self.shards.added(x, self.mlp(self.post_attention_layernorm(x))), cache
        x = x + self.post_attention_layernorm(self.shards.summed(attended))
        wide = self.shards.summed(self.mlp(self.pre_feedforward_layernorm(x)))
        return x + self.post_feedforward_layernorm(wide), cache


class RopeTables(nn.Module):
    """Cosines and sines of all positions, float32 ``[max_seq_len, head_dim]`` each."""

    def __init__(self, max_seq_len: int, head_dim: int) -> None:
        self.cos = nn.Parameter((max_seq_len, head_dim), dtype="float32")
        self.sin = nn.Parameter((max_seq_len, head_dim), dtype="float32")

    def to(self, dtype: str | None = None) -> None:
        """Keep float32: angles are exact to as many digits as they have."""


class LlamaModel(nn.Module):
    """Embedding, layers and final norm; holds the rotary tables."""

    def __init__(self, config: LlamaConfig, max_seq_len: int, shards: Shards) -> None:
        self.embed_tokens = shards.embedding(config.vocab_size, config.hidden_size)
        size = max_seq_len, config.rotated
        self.rope_cos = nn.Parameter(size, dtype="float32")
        self.rope_sin = nn.Parameter(size, dtype="float32")
        if config.local_rope_theta is not None:
            self.local_rope = RopeTables(max_seq_len, config.head_dim)
        layers = [LlamaLayer(config, i, shards) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = _norm(config, config.hidden_size)


class LlamaForCausalLM(Decoder):
    """A LLaMA decoder with its output head."""

    def __init__(
        self, config: LlamaConfig, max_seq_len: int, dtype: str, shards: Shards = WHOLE
    ) -> None:
        self.model = LlamaModel(config, max_seq_len, shards)
        if not config.tie_word_embeddings:
            rows = shards.rows(config.vocab_size)
            self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.config, self.tied, self.shards = config, config.tie_word_embeddings, shards
        self.to(dtype)
        for table in (self.model.rope_cos, self.model.rope_sin):
            table.to("float32")

    def _run(self, ids: Tensor, place: Place, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x = self.model.embed_tokens(ids)
        if self.config.embedding_scale is not None:
            x = x * self.config.embedding_scale
        angles, local = self._angles(place, x.dtype)
        updated: list[Tensor] = []
        for i, layer in enumerate(self.model.layers):
            pair = (caches[2 * i], caches[2 * i + 1])
            x, pair = layer(x, pair, place, angles if self.config.window(i) is None else local)
            updated.extend(pair)
        x = self.model.norm(last_position(x))
        head = self.model.embed_tokens.weight if self.tied else self.lm_head.weight
        logits = self.shards.joined(project_to_vocabulary(x, head), self.config.vocab_size)
        cap = self.config.logit_softcap
        return logits if cap is None else soft_capped(logits, cap), updated

    def _angles(self, place: Place, dtype: str) -> tuple[Angles, Angles]:
        """Return the angles of layers without a window, and of those with one."""
        dtype = dtype if self.config.qk_norm else "float32"
        wide = Angles.of(self.model.rope_cos, self.model.rope_sin, place, dtype)
        if self.config.local_rope_theta is None:
            return wide, wide
        local = self.model.local_rope
        return wide, Angles.of(local.cos, local.sin, place, dtype)


def recipes(config: LlamaConfig, max_seq_len: int, shards: Shards = WHOLE) -> dict[str, Recipe]:
    """Where each parameter of `LlamaForCausalLM` comes from in a Hugging Face checkpoint."""
    freq = inverse_frequencies(config.rope_theta, config.rotated, config.rope_scaling)
    tables = {"model.rope_": (freq, config.rope_scaling.magnitude)}
    if config.local_rope_theta is not None:
        plain = RopeScaling()
        local = inverse_frequencies(config.local_rope_theta, config.head_dim, plain)
        tables["model.local_rope."] = (local, 1.0)
    found = {
        f"{prefix}{name}": Recipe(compute=partial(rope_table, table, max_seq_len, function, scale))
        for prefix, (table, scale) in tables.items()
        for name, function in (("cos", np.cos), ("sin", np.sin))
    }
    for i in range(0 if config.merged_checkpoint else config.num_layers):
        found |= _merged(config, f"model.layers.{i}")
    table = "model.embed_tokens"
    found |= shards.table_recipes(table, table, config.vocab_size)
    places: Places = {"lm_head.weight": (0, (shards.segment(config.vocab_size),))}
    for i in range(config.num_layers):
        places |= _places(config, f"model.layers.{i}", shards)
    return shards.cut(found, places)


def _places(config: LlamaConfig, layer: str, shards: Shards) -> Places:
    """Return how the weights of a layer are cut."""
    dim, heads = config.head_dim, config.num_kv_heads
    query = shards.segment(config.num_heads * dim)
    kv, wide = shards.segment(heads * dim, heads), shards.segment(config.intermediate_size)
    attn, mlp, found = f"{layer}.self_attn", f"{layer}.mlp", Places()
    for kind in ("weight", "bias"):
        if config.qk_norm:
            for part, segment in zip("qkv", (query, kv, kv), strict=True):
                found[f"{attn}.{part}_proj.{kind}"] = (0, (segment,))
        else:
            found[f"{attn}.qkv_proj.{kind}"] = (0, (query, kv, kv))
        found[f"{mlp}.gate_up_proj.{kind}"] = (0, (wide, wide))
    rows = {f"{attn}.o_proj": query, f"{mlp}.down_proj": wide}
    found |= {f"{name}.weight": (1, (segment,)) for name, segment in rows.items()}
    return found | {f"{name}.bias": (0, ()) for name in rows}


def _merged(config: LlamaConfig, layer: str) -> dict[str, Recipe]:
    """Return how the merged projections of a layer are made of those that a checkpoint holds."""
    attn, mlp, found = f"{layer}.self_attn", f"{layer}.mlp", dict[str, Recipe]()
    experts = config.experts.at(int(layer.rpartition(".")[2])) if config.experts else None
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    wide = config.intermediate_size
    latent = config.latent
    if latent is not None:
        found |= latent.recipes(attn, config.num_heads, config.hidden_size)
    for kind in ("weight", "bias"):
        if not config.qk_norm and latent is None:
            found[f"{attn}.qkv_proj.{kind}"] = Recipe(
                tuple(f"{attn}.{part}_proj.{kind}" for part in "qkv"), rows=(query, kv, kv)
            )
        if experts is None:
            found[f"{mlp}.gate_up_proj.{kind}"] = Recipe(
                tuple(f"{mlp}.{part}_proj.{kind}" for part in ("gate", "up")), rows=(wide, wide)
            )
    return found | (expert_recipes(config, experts, layer) if experts else {})
