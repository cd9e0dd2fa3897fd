"""Models of transformers with random weights, small enough for a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf

_TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
_FFN = {"intermediate_size": 128, "max_position_embeddings": 64}
_IMAGE = {"image_size": 32, "patch_size": 8}
_VISION = {k: v for k, v in _TEXT.items() if k != "vocab_size"} | {"intermediate_size": 128}
_DECODER = {**_TEXT, **_FFN, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
_DECODER |= {"eos_token_id": 2, "head_dim": 16}
_PAIR = {"vocab_size": 96, "d_model": 64, "decoder_start_token_id": 0, "pad_token_id": 0}


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 96, shape)


def _image() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


@dataclass(frozen=True)
class Encoder:
    """A model that is called once: what makes it, and its inputs."""

    make: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]


def _text(cls: type, config: type, **more: object) -> Encoder:
    return Encoder(
        lambda: cls(config(**_TEXT, **_FFN, **more)),
        lambda: {"input_ids": _ids(2, 24), "attention_mask": torch.ones(2, 24, dtype=torch.int64)},
    )


def _distilbert() -> torch.nn.Module:
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 96}
    return hf.DistilBertModel(hf.DistilBertConfig(**sizes))


def _clip() -> torch.nn.Module:
    text = {**_TEXT, **_FFN, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config={**_VISION, **_IMAGE}))


def _siglip() -> torch.nn.Module:
    text = {**_TEXT, **_FFN, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    return hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config={**_VISION, **_IMAGE}))


def _both() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(2, 16), "pixel_values": _image()}


ENCODERS = {
    "bert": _text(hf.BertModel, hf.BertConfig),
    "distilbert": Encoder(_distilbert, lambda: {"input_ids": _ids(2, 24)}),
    "modernbert": _text(
        hf.ModernBertModel, hf.ModernBertConfig, pad_token_id=0, eos_token_id=2, bos_token_id=1
    ),
    "vit": Encoder(
        lambda: hf.ViTModel(hf.ViTConfig(**_VISION, **_IMAGE)), lambda: {"pixel_values": _image()}
    ),
    "dinov2": Encoder(
        lambda: hf.Dinov2Model(
            hf.Dinov2Config(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, **_IMAGE
            )
        ),
        lambda: {"pixel_values": _image()},
    ),
    "clip": Encoder(_clip, _both),
    "siglip": Encoder(_siglip, _both),
}

DECODERS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=64,
            n_layer=2,
            n_head=4,
            vocab_size=96,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**{k: v for k, v in _DECODER.items() if k != "head_dim"})
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_DECODER, sliding_window=16, query_pre_attn_scalar=16)
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(**{k: v for k, v in _DECODER.items() if k != "head_dim"})
    ),
}


def t5() -> torch.nn.Module:
    """Make a small T5."""
    sizes = {"d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "eos_token_id": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**_PAIR, **sizes))


def whisper() -> torch.nn.Module:
    """Make a small Whisper, of 32 frames."""
    layers = {
        f"{half}_{name}": n
        for half in ("encoder", "decoder")
        for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    }
    ends = {"bos_token_id": 1, "eos_token_id": 2, "max_source_positions": 16}
    more = {"max_target_positions": 64, "num_mel_bins": 8, "suppress_tokens": None}
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**_PAIR, **layers, **ends, **more, begin_suppress_tokens=None)
    )
