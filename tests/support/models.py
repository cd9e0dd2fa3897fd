"""Small random checkpoints, their float64 references, and the pipeline under test."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import transformers
import tvm
from tvm import relax

from relax_fusion import host_target
from relax_fusion.models import ExportedModel

from .accuracy import assert_accurate, nudged
from .quick import loaded, quick_host, quickly

PROMPT_LENGTHS = (1, 7, 33, 130)
SHORT_LENGTHS = (1, 6)
NEW_TOKENS = 10
MAX_SEQ_LEN = 160
SHORT_SEQ_LEN = 16
"""A model of so few positions has kernels for two ranges of rows, where a longer one has five."""
VOCAB = 160

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def compile_as_users_do(mod: tvm.IRModule) -> tvm.relax.VMExecutable:
    """Compile a model with the pipeline that these tests are about."""
    target = host_target()
    pipeline = relax.get_pipeline("relax_fusion", target=target)
    return tvm.compile(mod, target=target, relax_pipeline=pipeline)


def compile_for_test(exported: ExportedModel, **bounds: int) -> tvm.runtime.Module:
    """Do the same for the lengths that fit, without optimisations of TVM and LLVM."""
    if exported.seq_len is None:
        bounds["seq_len"] = exported.max_seq_len
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), variable_bounds=bounds)
    return loaded(quickly(exported.mod, pipeline))


def llama(**changes) -> transformers.PreTrainedModel:
    """A LLaMA of two layers with grouped-query attention and heads wider than hidden / heads."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": False,
    }
    config = transformers.LlamaConfig(**(fields | changes))
    return randomize(transformers.LlamaForCausalLM(config))


_EAGER = {"experts_implementation": "eager"}  # the others multiply no float64
_LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    **_EAGER,
}
DECODERS = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Mistral": {"head_dim": 32, "sliding_window": 5},
    "Phi3": {"sliding_window": 5},
    "Mixtral": {"head_dim": 32, "num_local_experts": 6, **_EAGER},
    "Qwen3Moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "mlp_only_layers": [1],
        **_EAGER,
    },
    "Qwen2Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
        **_EAGER,
    },
    "GptOss": {
        "head_dim": 32,
        "sliding_window": 5,
        "num_hidden_layers": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "swiglu_limit": 1.0,
        **_EAGER,
    },
    "DeepseekV3": {**_LATENT, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    "DeepseekV2": {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "Gemma2": {"head_dim": 32, "sliding_window": 5, "query_pre_attn_scalar": 24},
    "Gemma3Text": {
        "head_dim": 32,
        "sliding_window": 5,
        "query_pre_attn_scalar": 24,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Decoders like LLaMA, and what differs from `decoder`'s fields."""


def decoder(name: str, **changes) -> transformers.PreTrainedModel:
    """A decoder of `DECODERS`, of one layer where all layers are alike."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = getattr(transformers, f"{name}Config")(**(fields | DECODERS[name] | changes))
    cls = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    return randomize(cls(config))


def gpt2(**changes) -> transformers.PreTrainedModel:
    """A GPT-2 of two layers."""
    fields = {
        "vocab_size": VOCAB,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 192,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.GPT2Config(**(fields | changes))
    return randomize(transformers.GPT2LMHeadModel(config))


def bert(cls=transformers.BertForMaskedLM, **changes) -> transformers.PreTrainedModel:
    """A BERT of two layers."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 192,
    }
    return randomize(cls(transformers.BertConfig(**(fields | changes))))


def randomize(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Give every parameter a value that matters.

    Fresh models have scores near 0, norms of exactly 1 and biases of exactly 0, which hide a
    swapped head, a missing scale or a forgotten bias.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim == 1:
                value.copy_(0.1 * noise + (1.0 if is_norm(name) else 0.0))
            else:
                value.copy_(noise / math.sqrt(64))
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    return model.eval()


def is_norm(name: str) -> bool:
    """Whether a parameter is the weight of a norm."""
    parts = ("norm.weight", "layernorm.weight", "LayerNorm.weight", "ln_1.weight", "ln_2.weight")
    return name.endswith((*parts, "ln_f.weight"))


def save(model: transformers.PreTrainedModel, path: Path, **options) -> Path:
    """Write the model as a Hugging Face directory."""
    model.save_pretrained(path, **options)
    return path


class Float64Rope(torch.nn.Module):
    """Rotary angles in float64, written from the definition.

    transformers computes angles in float32 whatever the type of the model, so that its float64
    run would still hold float32 rounding. Written apart from the library under test.
    """

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__()
        rope = config.rope_parameters
        index = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
        freq = 1.0 / rope["rope_theta"] ** (index / config.head_dim)
        if rope["rope_type"] == "linear":
            freq = freq / rope["factor"]
        if rope["rope_type"] == "llama3":
            freq = torch.stack([self._llama3(f, rope) for f in freq])
        self.freq = freq

    @staticmethod
    def _llama3(freq: torch.Tensor, rope: dict) -> torch.Tensor:
        length = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wavelength = 2 * math.pi / freq
        if wavelength < length / high:
            return freq
        if wavelength > length / low:
            return freq / rope["factor"]
        blend = (length / wavelength - low) / (high - low)
        return (1 - blend) * freq / rope["factor"] + blend * freq

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor):
        angle = position_ids[..., None].double() * self.freq
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


class Float64RMSNorm(torch.nn.Module):
    """RMS norm in float64; transformers rounds its input to float32 first."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.added = norm.weight, float("Gemma" in type(norm).__name__)
        self.eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight + self.added) * normed


def to_float64(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same weights (as they are now) in float64 arithmetic throughout."""
    exact = type(model)(model.config)
    exact.load_state_dict(model.state_dict())
    exact = exact.double().eval()
    for module in list(exact.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, Float64RMSNorm(child))
    if isinstance(model.config, transformers.LlamaConfig):
        inner = getattr(exact, "model", exact)
        inner.rotary_emb = Float64Rope(model.config)
    return exact


def nudge(model: transformers.PreTrainedModel, dtype: str) -> transformers.PreTrainedModel:
    """Return the model of `to_float64` with every weight off by about half a rounding step."""
    moved = to_float64(model)
    with torch.no_grad():
        for number, value in enumerate(moved.parameters()):
            value.copy_(torch.from_numpy(nudged(value.numpy(), dtype, number)))
    return moved


def longest_sum(config: transformers.PreTrainedConfig) -> int:
    """Return the number of products in the longest sum of a model."""
    widest = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(widest, PROMPT_LENGTHS[-1] + NEW_TOKENS)


@torch.no_grad()
def torch_logits(model: transformers.PreTrainedModel, tokens: np.ndarray, first: int) -> np.ndarray:
    """Logits of positions ``first - 1 ..`` of one sequence, ``[positions, vocab]``."""
    logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits
    return logits[0, first - 1 :].double().numpy()


def prompt(length: int) -> np.ndarray:
    """A prompt followed by the tokens that are fed one at a time."""
    return np.random.default_rng(length).integers(0, VOCAB, length + NEW_TOKENS)


def check_decoder(generator, model: transformers.PreTrainedModel, dtype: str = "float32") -> None:
    """Prefill and ten decoded tokens at every prompt length that fits, against float64."""
    exact_model, moved_model = to_float64(model), nudge(model, dtype)
    terms = longest_sum(model.config) if dtype == "float32" else 0
    short = generator.exported.max_seq_len < MAX_SEQ_LEN
    for length in SHORT_LENGTHS if short else PROMPT_LENGTHS:
        tokens = prompt(length)
        got = run_tokens(generator, tokens, length)
        exact, moved = (torch_logits(m, tokens, length) for m in (exact_model, moved_model))
        assert_accurate(got, exact, moved, dtype, terms)


def check_half_decoder(
    make_generator, model: transformers.PreTrainedModel, path: Path, dtype: str, length: int
) -> None:
    """Do the same with weights of 16 bits, in a model of `length` positions."""
    model = model.to(getattr(torch, dtype))
    check_decoder(make_generator(save(model, path), dtype, length), model, dtype)


def run_tokens(generator, tokens: np.ndarray, length: int) -> np.ndarray:
    """Prefill ``length`` tokens and decode the rest; logits ``[1 + rest, vocab]``."""
    generator.reset()
    rows = [generator.prefill(tokens[:length])]
    rows += [generator.decode(token) for token in tokens[length:]]
    return np.concatenate(rows)
