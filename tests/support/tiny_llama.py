"""LLaMAs so small that exporting them takes no time."""

from __future__ import annotations

from dataclasses import replace

from relax_fusion.models import LlamaConfig

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
)
TWO_LAYERS = replace(TINY, num_layers=2)
