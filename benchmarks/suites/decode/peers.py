"""A LLaMA's decode step in PyTorch, on the weights and caches of an exported model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from relax_fusion.models import LlamaConfig
from relax_fusion.models.rope import inverse_frequencies


class Decoder(torch.nn.Module):
    """One step at a fixed position; the caches are updated in place.

    Parameters
    ----------
    config : LlamaConfig
        Without biases.
    weights : mapping of str to Tensor
        By the names of `relax_fusion.models.export`.
    caches : sequence of Tensor
        Keys and values of every layer, ``[batch, max_seq_len, kv_heads, head_dim]``.
    total : int
        Tokens in the caches after the step.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Mapping[str, torch.Tensor],
        caches: Sequence[torch.Tensor],
        total: int,
    ) -> None:
        super().__init__()
        self.config, self.total = config, total
        # As buffers, whose addresses torch.compile's CUDA graphs take for fixed
        for name, value in weights.items():
            self.register_buffer(name.replace(".", "_"), value)
        for i, cache in enumerate(caches):
            self.register_buffer(f"cache_{i}", cache)
        freq = inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
        angle = torch.from_numpy((total - 1) * freq).repeat(2)
        like = weights["model.embed_tokens.weight"]
        kept = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.cos = angle.cos().to(like.device, kept)
        self.sin = angle.sin().to(like.device, kept)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 1]`` token ids to logits ``[batch, 1, vocab]``."""
        w, c = self._weight, self.config
        x = w("model.embed_tokens.weight")[ids.long()]
        for i in range(c.num_layers):
            layer = f"model.layers.{i}."
            h = self._norm(x, layer + "input_layernorm.weight")
            x = x + self._attention(h, i, layer + "self_attn.")
            h = self._norm(x, layer + "post_attention_layernorm.weight")
            gate, up = linear(h, w(layer + "mlp.gate_up_proj.weight")).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, w(layer + "mlp.down_proj.weight"))
        x = self._norm(x, "model.norm.weight")
        head = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
        return linear(x, w(head))

    def _weight(self, name: str) -> torch.Tensor:
        return self.get_buffer(name.replace(".", "_"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self._weight(name), self.config.norm_eps)

    def _attention(self, h: torch.Tensor, i: int, prefix: str) -> torch.Tensor:
        c, batch = self.config, h.shape[0]
        qkv = linear(h, self._weight(prefix + "qkv_proj.weight")).view(batch, 1, -1, c.head_dim)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=2)
        keys, values = self.get_buffer(f"cache_{2 * i}"), self.get_buffer(f"cache_{2 * i + 1}")
        keys[:, self.total - 1] = self._turned(k)[:, 0]
        values[:, self.total - 1] = v[:, 0]
        out = scaled_dot_product_attention(
            self._turned(q).transpose(1, 2),
            keys[:, : self.total].transpose(1, 2),
            values[:, : self.total].transpose(1, 2),
            enable_gqa=c.num_heads != c.num_kv_heads,
        )
        return linear(
            out.transpose(1, 2).reshape(batch, 1, -1), self._weight(prefix + "o_proj.weight")
        )

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate heads: lane d pairs with lane d + dim / 2."""
        first, second = x.to(self.cos.dtype).chunk(2, dim=-1)
        other = torch.cat([-second, first], dim=-1)
        return (x.to(self.cos.dtype) * self.cos + other * self.sin).to(x.dtype)
