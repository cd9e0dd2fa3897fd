"""BERT on ``tvm.relax.frontend.nn``: a bidirectional encoder and its masked-LM head."""

from __future__ import annotations

import ml_dtypes
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from .config import BertConfig
from .layers import Embedding, Recipe, activation, attention, slice_rows


class BertAttention(nn.Module):
    """Self-attention with one merged projection, then residual add and norm."""

    def __init__(self, config: BertConfig) -> None:
        hidden = config.hidden_size
        self.heads, self.dim = config.num_heads, config.head_dim
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, config.norm_eps)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Attend within ``[batch, seq_len, hidden]``, the mask as an additive ``bias``."""
        batch, seq_len, _ = x.shape
        q, k, v = (
            op.reshape(part, (batch, seq_len, self.heads, self.dim))
            for part in op.split(self.qkv(x), 3, axis=-1)
        )
        return self.norm(x + self.dense(attention(q, k, v, self.dim**-0.5, bias)))


class BertLayer(nn.Module):
    """Attention block and feed-forward block, each normalised after its residual add."""

    def __init__(self, config: BertConfig) -> None:
        self.hidden_act = config.hidden_act
        self.attention = BertAttention(config)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Map ``[batch, seq_len, hidden]`` to itself: attention, then the MLP, each post-normed."""
        x = self.attention(x, bias)
        return self.norm(x + self.output(activation(self.hidden_act, self.intermediate(x))))


class BertEmbeddings(nn.Module):
    """Sum of word, segment and position embeddings, normalised."""

    def __init__(self, config: BertConfig) -> None:
        hidden = config.hidden_size
        self.word_embeddings = Embedding(config.vocab_size, hidden)
        self.token_type_embeddings = Embedding(config.type_vocab_size, hidden)
        self.position_embeddings = Embedding(config.max_position, hidden)
        self.norm = nn.LayerNorm(hidden, config.norm_eps)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Sum the embeddings of ``[batch, seq_len]`` tokens, their types and their positions."""
        positions = slice_rows(self.position_embeddings.weight, 0, 0, input_ids.shape[1])
        words = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.norm(words + positions)


class BertHead(nn.Module):
    """Transform, then the decoder that shares the word embedding's weight."""

    def __init__(self, config: BertConfig) -> None:
        self.hidden_act = config.hidden_act
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.bias = nn.Parameter((config.vocab_size,))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """Map ``[batch, seq_len, hidden]`` to float32 logits over the vocabulary."""
        x = self.norm(activation(self.hidden_act, self.dense(x)))
        logits = op.matmul(x, op.permute_dims(words), out_dtype="float32")
        return logits + op.astype(self.bias, "float32")


class BertForMaskedLM(nn.Module):
    """A BERT encoder; with ``config.masked_lm`` false it returns hidden states."""

    def __init__(self, config: BertConfig, max_seq_len: int, dtype: str) -> None:
        self.embeddings = BertEmbeddings(config)
        self.layers = nn.ModuleList([BertLayer(config) for _ in range(config.num_layers)])
        self.head = BertHead(config) if config.masked_lm else None
        self.lowest = float(ml_dtypes.finfo(dtype).min)
        self.dtype = dtype
        self.to(dtype)

    def encode(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (or hidden states) of every position, float32.

        All three inputs are int32 ``[batch, seq_len]``; a mask of 1 keeps a position, 0 hides it.
        """
        batch, seq_len = input_ids.shape
        keep = op.reshape(op.astype(attention_mask, self.dtype), (batch, 1, 1, seq_len))
        # 1 becomes 0, and 0 the most negative number: still finite, so that a row with no
        # position left averages instead of dividing zero by zero.
        bias = (keep - 1.0) * (-self.lowest)
        x = self.embeddings(input_ids, token_type_ids)
        for layer in self.layers:
            x = layer(x, bias)
        if self.head is None:
            return x if self.dtype == "float32" else op.astype(x, "float32")
        return self.head(x, self.embeddings.word_embeddings.weight)


_LAYER_NAMES = {
    "attention.dense": "attention.output.dense",
    "attention.norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "norm": "output.LayerNorm",
}


def recipes(config: BertConfig, max_seq_len: int) -> dict[str, Recipe]:
    """Where each parameter of `BertForMaskedLM` comes from in a Hugging Face checkpoint."""
    names = {"embeddings.norm": "bert.embeddings.LayerNorm"}
    for i in range(config.num_layers):
        for ours, theirs in _LAYER_NAMES.items():
            names[f"layers.{i}.{ours}"] = f"bert.encoder.layer.{i}.{theirs}"
    if config.masked_lm:
        names["head.dense"] = "cls.predictions.transform.dense"
        names["head.norm"] = "cls.predictions.transform.LayerNorm"
    kinds = ("weight", "bias")
    found = {f"{a}.{kind}": Recipe((f"{b}.{kind}",)) for a, b in names.items() for kind in kinds}
    for i in range(config.num_layers):
        attn = f"bert.encoder.layer.{i}.attention.self"
        for kind in kinds:
            sources = tuple(f"{attn}.{part}.{kind}" for part in ("query", "key", "value"))
            found[f"layers.{i}.attention.qkv.{kind}"] = Recipe(
                sources, rows=(config.hidden_size,) * 3
            )
    for table in ("word", "token_type", "position"):
        name = f"embeddings.{table}_embeddings.weight"
        found[name] = Recipe((f"bert.{name}",))
    if config.masked_lm:
        found["head.bias"] = Recipe(("cls.predictions.bias",))
    return found
