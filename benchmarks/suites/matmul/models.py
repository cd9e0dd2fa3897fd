"""Widths of models from their configurations, and what tells their chains from LLaMA's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from relax_fusion.workload import WeightLayout


@dataclass(frozen=True)
class Size:
    """Features of a model: of its residual stream, of the FFN, of q, k and v, of a head.

    Parameters
    ----------
    biases : bool
        Whether every matmul has a bias, norms are LayerNorm, and no gate is in the FFN.
    attended : int
        Features of what attention gives; 0: those of the residual stream.
    qkv_bias : bool
        Whether q, k and v have a bias, whatever the others have.
    activation : str
        Of the FFN: "silu", "gelu", or "gelu_tanh".
    unit_offset : bool
        Whether norms multiply by ``1 + gamma``.
    layout : {"nk", "kn"}
        How weights lie.
    """

    hidden: int
    wide: int
    qkv: int
    head: int = 128
    biases: bool = False
    attended: int = 0
    qkv_bias: bool = False
    activation: str = "silu"
    unit_offset: bool = False
    layout: WeightLayout = "nk"

    @property
    def queries(self) -> int:
        """Features of q, and of what attention gives."""
        return self.attended or self.hidden


def decoder(hidden: int, wide: int, heads: int, kv_heads: int, head: int, **more: Any) -> Size:
    """Return the widths of a decoder with a gated FFN."""
    qkv = (heads + 2 * kv_heads) * head
    return Size(hidden, wide, qkv, head, attended=heads * head, **more)


def with_biases(hidden: int, wide: int, activation: str = "gelu") -> Size:
    """Return the widths of a model with LayerNorm and biases, whose heads have 64 features."""
    return Size(hidden, wide, 3 * hidden, 64, biases=True, activation=activation)


SIZES = {
    "8b": Size(4096, 14336, 6144),
    "1b": Size(2048, 8192, 3072, 64),
    "70b": Size(8192, 28672, 10240),
}
"""LLaMA, by the names that results have."""

GPT2 = with_biases(768, 3072, "gelu_tanh")
_GEMMA = {"activation": "gelu_tanh", "unit_offset": True}

MODELS = {
    "qwen2.5-0.5b": decoder(896, 4864, 14, 2, 64, qkv_bias=True),
    "qwen2.5-3b": decoder(2048, 11008, 16, 2, 128, qkv_bias=True),
    "qwen2.5-7b": decoder(3584, 18944, 28, 4, 128, qkv_bias=True),
    "llama3.2-1b": decoder(2048, 8192, 32, 8, 64),
    "llama3.2-3b": decoder(3072, 8192, 24, 8, 128),
    "llama3.1-8b": decoder(4096, 14336, 32, 8, 128),
    "llama3.1-70b": decoder(8192, 28672, 64, 8, 128),
    "gemma2-2b": decoder(2304, 9216, 8, 4, 256, **_GEMMA),
    "gemma2-9b": decoder(3584, 14336, 16, 8, 256, **_GEMMA),
    "phi3-mini": decoder(3072, 8192, 32, 32, 96),
    "mistral-nemo": decoder(5120, 14336, 32, 8, 128),
    "smollm-135m": decoder(576, 1536, 9, 3, 64),
    "gpt2-124m": replace(GPT2, layout="kn"),  # as its Conv1D has them
    "bert-base": with_biases(768, 3072),
    "bert-large": with_biases(1024, 4096),
    "vit-l": with_biases(1024, 4096),
    "whisper-large": with_biases(1280, 5120),
}
"""The models of `benchmarks.suites.widths`."""
