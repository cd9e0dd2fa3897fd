"""Configurations of well-known models, for compiling and timing without a download.

Only sizes are bundled. `config_from_dict` reads them like any ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import ConfigError
from .config import Config, config_from_dict

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
_LLAMA3 = _LLAMA | {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
        "llama-3.1-8b": _LLAMA3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
            "tie_word_embeddings": False,
        },
        # https://huggingface.co/meta-llama/Llama-3.1-70B/blob/main/config.json
        "llama-3.1-70b": _LLAMA3
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
            "tie_word_embeddings": False,
        },
        # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
        "llama-3.2-1b": _LLAMA3
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "head_dim": 64,
            "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
        # https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json
        "llama-2-7b": _LLAMA
        | {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
        "qwen3-30b-a3b": {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
        },
        # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json
        "mixtral-8x7b": {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
        # https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json
        "gpt-oss-20b": {
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "tie_word_embeddings": False,
        },
        # https://huggingface.co/openai-community/gpt2/blob/main/config.json
        "gpt2": _GPT2
        | {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
        # https://huggingface.co/google-bert/bert-base-uncased/blob/main/config.json
        "bert-base": {
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "vocab_size": 30522,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 512,
            "layer_norm_eps": 1e-12,
            "hidden_act": "gelu",
        },
        # The widths of LLaMA-3.2-1B with two layers and a small vocabulary: compiles in seconds,
        # and its kernels are those of the real model.
        "demo-llama": _LLAMA
        | {
            "vocab_size": 1024,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        # GPT-2 small with two layers and a small vocabulary.
        "demo-gpt2": _GPT2
        | {"vocab_size": 8192, "n_embd": 768, "n_layer": 2, "n_head": 12, "n_positions": 1024},
    }
)


def zoo_config(name: str) -> Config:
    """Return the configuration record of a bundled model.

    Raises
    ------
    ConfigError
        If no bundled configuration has that name.
    """
    if name not in CONFIGS:
        raise ConfigError(f"no bundled config is called {name!r}; there are {', '.join(CONFIGS)}")
    return config_from_dict(CONFIGS[name])
