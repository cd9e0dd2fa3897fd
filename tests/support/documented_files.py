"""The files that the documents speak of, small: a LLaMA's directory, an encoder, its inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .files import WIDTH, write_onnx

LLAMA = {
    "vocab_size": 16384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
SMALL = {"llama": LLAMA, "gpt2": GPT2, "bert": {}}


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bundled configuration with fewer and smaller layers."""
    changes = SMALL.get(config.get("model_type", ""), {})
    return {**config, **changes, **({"rope_scaling": None} if changes is LLAMA else {})}


def write_files(directory: Path) -> None:
    """Write all of them into a directory."""
    llama = directory / "path" / "to" / "llama"
    llama.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA}
    (llama / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(_tensors(np.random.default_rng(0))), llama / "model.safetensors")
    inputs = {"ids": ("int64", ["batch", "seq"]), "mask": ("float32", ["batch", "seq", WIDTH])}
    write_onnx(directory / "encoder.onnx", inputs)
    np.save(directory / "ids.npy", np.arange(6).reshape(2, 3))
    np.save(directory / "mask.npy", np.ones((2, 3, WIDTH), "float32"))


def _tensors(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights by Hugging Face's names."""
    k, wide = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    keys = LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    table = (LLAMA["vocab_size"], k)
    shapes = {"model.embed_tokens": table, "model.norm": (k,), "lm_head": table}
    for i in range(LLAMA["num_hidden_layers"]):
        layer, attention, mlp = (f"model.layers.{i}{part}" for part in ("", ".self_attn", ".mlp"))
        shapes |= {f"{layer}.{n}_layernorm": (k,) for n in ("input", "post_attention")}
        shapes |= {f"{attention}.{n}_proj": (k, k) for n in "qo"}
        shapes |= {f"{attention}.{n}_proj": (keys, k) for n in "kv"}
        shapes |= {f"{mlp}.{n}_proj": (wide, k) for n in ("gate", "up")}
        shapes[f"{mlp}.down_proj"] = (k, wide)
    for name, shape in shapes.items():
        yield f"{name}.weight", (rng.standard_normal(shape) * 0.1).astype("float32")
