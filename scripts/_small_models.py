"""Small models of transformers by their names there, with random weights; inputs of others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers.models.auto import modeling_auto

from relax_fusion.frontends import read_model

KINDS = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForMaskedLM": "MASKED_LM"}
KINDS |= {"AutoModelForImageClassification": "IMAGE_CLASSIFICATION"}
VARIANTS = ("sdpa/static/float32/pt2", "eager/static/float32/onnx", "eager/static/float32/pt2")
VARIANTS += ("sdpa/dynamic/float32/pt2", "sdpa/static/float16/pt2", "sdpa/dynamic/float32/onnx")
WORDS, IMAGE = 96, 32
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_dim"), 64),
    **dict.fromkeys(("embedding_size", "embed_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers"), 1),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "attention_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "d_kv", "rotary_dim"), 16),
    "qk_rope_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "sliding_window": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": WORDS,
    "image_size": IMAGE,
    "patch_size": 8,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
}
"""What a configuration is given of what it has."""


class Logits(torch.nn.Module):
    """A model of one input."""

    def __init__(self, model: torch.nn.Module, name: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.name, self.fixed = model, name, fixed

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.model(**{self.name: given}, **self.fixed).logits


def models() -> list[str]:
    """Return all models in an order by chance, each in two of the variants."""
    found = []
    for auto, kind in KINDS.items():
        for i, name in enumerate(getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")):
            found += [f"{name}/{auto}/{VARIANTS[(i + j) % len(VARIANTS)]}" for j in (0, 2)]
    random.Random(0).shuffle(found)
    return found


def exported(tag: str, folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Return the file of a model, what it is called with, and what PyTorch makes of that."""
    name, auto, attention, shape, dtype, suffix = tag.split("/")
    config = transformers.CONFIG_MAPPING[name]
    known = config().to_dict()
    fields = {k: v for k, v in SMALL.items() if type(known.get(k)) is int}
    layers = known.get("num_hidden_layers")  # lists have an item for each
    fields |= {k: v[:1] for k, v in known.items() if isinstance(v, list) and len(v) == layers}
    small = config(**fields)
    torch.manual_seed(0)
    make = getattr(transformers, auto).from_config
    try:
        model = make(small, attn_implementation=attention)
    except ValueError:  # of models that have one way to attend
        model = make(small)
    for weight in model.parameters():
        scale = weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.1
        with torch.no_grad():
            weight.copy_(weight * (weight.ndim < 2) + scale * torch.randn(weight.shape))
    kind = getattr(torch, dtype)
    b, s = torch.export.Dim("b", min=1, max=64), torch.export.Dim("s", min=2, max=32)
    given: torch.Tensor = torch.arange(24).reshape(2, 12) * 7 % (WORDS - 1) + 1
    dims, taken, fixed = {0: b, 1: s}, "input_ids", {}
    if "Image" in auto:
        given, dims, taken = torch.randn(2, 3, IMAGE, IMAGE).to(kind), {0: b}, "pixel_values"
    elif "Causal" in auto:
        fixed = {"use_cache": False}
    called = Logits(model, taken, **fixed).eval().to(kind)
    dynamic = {"dynamic_shapes": (dims,)} if shape == "dynamic" else {}
    path = folder / f"model.{suffix}"
    with torch.no_grad():
        wanted = called(given)
        if suffix == "onnx":
            torch.onnx.export(called, (given,), path, dynamo=True, external_data=False, **dynamic)
        else:
            program = torch.export.export(called, (given,), strict=False, **dynamic)
            wanted = program.module()(given)  # tracing may have taken other branches
            torch.export.save(program, path)
    return path, given.numpy(), wanted.float().numpy()


def inputs_of(path: Path) -> list[np.ndarray]:
    """Return inputs for an ONNX file: unknown sizes are 2, whole numbers 0 or 1."""
    read, rng = read_model(path), np.random.default_rng(0)
    shapes = [[d if isinstance(d, int) else 2 for d in i.shape] for i in read.signature.inputs]
    types = [i.dtype for i in read.signature.inputs]
    return [
        (rng.random(s) if "float" in t else rng.integers(0, 2, s)).astype(t)
        for s, t in zip(shapes, types, strict=True)
    ]


def examples_of(path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the example inputs of a ``.pt2`` file, and what PyTorch makes of them."""
    program = torch.export.load(path)
    assert program.example_inputs is not None, path
    given, named = program.example_inputs
    with torch.no_grad():
        wanted = tree_leaves(program.module()(*given, **named))
    return [a.numpy() for a in tree_leaves((given, named))], [a.numpy() for a in wanted]
