"""Families of models of today beyond those that tests keep, small and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from scripts import import_models as kept
from scripts.import_models import BATCH, HEADS, IMAGE, INNER, LAYERS, WIDTH, Made

_EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
_EXPERTS |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
_LATENT = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64}
_ENCODER = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {"n_layer": LAYERS, "n_head": HEADS}),
    "cohere": ("Cohere", {}),
    "deepseek3": (
        "DeepseekV3",
        {**_EXPERTS, **_LATENT, "v_head_dim": 64, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": LAYERS, "num_key_value_heads": HEADS},
    ),
    "exaone4": ("Exaone4", {"sliding_window": 8}),
    "gemma": ("Gemma", {"head_dim": 64}),
    "gemma3": ("Gemma3Text", {"head_dim": 64, "sliding_window": 8}),
    "glm4": ("Glm4", {"head_dim": 64}),
    "glm4moe": ("Glm4Moe", {**_EXPERTS, "head_dim": 64, "n_group": 1, "topk_group": 1}),
    "gptj": ("GPTJ", {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "rotary_dim": 32}),
    "gptoss": ("GptOss", {**_EXPERTS, "head_dim": 64, "sliding_window": 8}),
    "granite": ("Granite", {}),
    "mixtral": ("Mixtral", _EXPERTS),
    "mpt": ("Mpt", {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS}),
    "nemotron": ("Nemotron", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 8}),
    "phi": ("Phi", {}),
    "qwen3moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 64}),
    "smollm3": ("SmolLM3", {}),
    "stablelm": ("StableLm", {}),
}
"""Of each family, its name in transformers, and what differs from a common configuration."""

_IMAGES = {"image_size": IMAGE, "patch_size": 8, **_ENCODER}
_SWIN = {"embed_dim": 64, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov2": ("Dinov2", _IMAGES),
    "dinov3": ("DINOv3ViT", _IMAGES),
    "siglip": ("SiglipVision", _IMAGES),
    "swin": ("Swin", {"image_size": IMAGE, "patch_size": 2, **_SWIN}),
}
"""The same for models of images."""


def _of_images(name: str, options: dict[str, Any], attention: str) -> Made:
    config = getattr(transformers, f"{name}Config")(**options, attn_implementation=attention)
    model = getattr(transformers, f"{name}Model")(config)
    called = kept._Called(model, ("pixel_values",), "last_hidden_state")
    return called, (torch.randn(BATCH, 3, IMAGE, IMAGE),), ({0: kept._dims()[0]},)


def _clip_text(attention: str) -> Made:
    config = transformers.CLIPTextConfig(
        **_ENCODER, vocab_size=kept.WORDS, max_position_embeddings=128, eos_token_id=0
    )
    config._attn_implementation = attention
    return kept._reading_ids(transformers.CLIPTextModel(config), "last_hidden_state")


FAMILIES: dict[str, Callable[[str], Made]] = {
    **kept.FAMILIES,
    "clip_text": _clip_text,
    **{family: kept._decoder(name, **options) for family, (name, options) in DECODERS.items()},
    **{family: partial(_of_images, *made) for family, made in IMAGES.items()},
}
"""Makers of a model, its inputs and their dynamic dimensions, by family."""
