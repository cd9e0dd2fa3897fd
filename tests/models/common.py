"""Small random checkpoints, their float64 references, and the pipeline under test."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
import transformers
import tvm
from tvm import relax
from tvm.target import Target

from relax_fusion import host_target

from ..quick import quick, quick_host

PROMPT_LENGTHS = (1, 7, 33, 130)
NEW_TOKENS = 10
MAX_SEQ_LEN = 160
VOCAB = 160

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def compile_as_users_do(mod: tvm.IRModule, target: Target | None = None) -> tvm.relax.VMExecutable:
    """Compile a model with the pipeline that these tests are about."""
    target = target or host_target()
    return tvm.compile(
        mod, target=target, relax_pipeline=relax.get_pipeline("relax_fusion", target=target)
    )


def compile_for_test(mod: tvm.IRModule) -> tvm.relax.VMExecutable:
    """Do the same without LLVM's optimisations."""
    return compile_as_users_do(mod, quick_host())


def compile_unfused(mod: tvm.IRModule) -> tvm.relax.VMExecutable:
    """Compile a model with TVM's own pipeline, the yardstick of rounding error."""
    return tvm.compile(mod, target=quick(Target("llvm")))


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
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def to_float64(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same weights (as they are now) in float64 arithmetic throughout."""
    exact = type(model)(model.config)
    exact.load_state_dict(model.state_dict())
    exact = exact.double().eval()
    if isinstance(model.config, transformers.LlamaConfig):
        exact.model.rotary_emb = Float64Rope(model.config)
        exact.model.norm = Float64RMSNorm(exact.model.norm)
        for layer in exact.model.layers:
            layer.input_layernorm = Float64RMSNorm(layer.input_layernorm)
            layer.post_attention_layernorm = Float64RMSNorm(layer.post_attention_layernorm)
    return exact


def rms(values: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def assert_as_accurate(
    got: np.ndarray, peer: np.ndarray, exact: np.ndarray, dtype: str, peer_gain: float = 1.0
) -> None:
    """The library's rule: error <= 2 x the peer's error + one rounding step of the result.

    Both errors are against the float64 run. They are root mean squares over all logits, because
    the largest of a few thousand rounding errors is a matter of luck. ``peer_gain`` is how much
    more the arithmetic of the library rounds than the peer's, where the two are known to differ.
    """
    assert got.shape == exact.shape and np.isfinite(got).all()
    ours, theirs = rms(got - exact), rms(peer - exact)
    step = float(ml_dtypes.finfo(dtype).eps) * rms(exact)
    limit = 2 * peer_gain * theirs + step
    assert ours <= limit, f"error {ours:.3g}, peer {theirs:.3g}, rounding step {step:.3g}"


def half_gain(config: transformers.PreTrainedConfig) -> float:
    """How much more TVM's float16 matmul on a CPU rounds than torch's.

    torch accumulates in float32 and rounds once; TVM rounds each of the K partial sums to
    float16, and K independent errors add up to sqrt(K) of one. K is the longest sum of the model.
    """
    hidden = config.hidden_size
    longest = getattr(config, "intermediate_size", None) or 4 * hidden
    return math.sqrt(max(longest, PROMPT_LENGTHS[-1] + NEW_TOKENS))


@torch.no_grad()
def torch_logits(model: transformers.PreTrainedModel, tokens: np.ndarray, first: int) -> np.ndarray:
    """Logits of positions ``first - 1 ..`` of one sequence, ``[positions, vocab]``."""
    logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits
    return logits[0, first - 1 :].double().numpy()


def prompt(length: int) -> np.ndarray:
    """A prompt followed by the tokens that are fed one at a time."""
    return np.random.default_rng(length).integers(0, VOCAB, length + NEW_TOKENS)


def check_decoder(generator, model: transformers.PreTrainedModel) -> None:
    """Prefill and ten decoded tokens at every prompt length, against torch in float32."""
    exact_model = to_float64(model)
    for length in PROMPT_LENGTHS:
        tokens = prompt(length)
        got = run_tokens(generator, tokens, length)
        peer = torch_logits(model, tokens, length)
        exact = torch_logits(exact_model, tokens, length)
        assert_as_accurate(got, peer, exact, "float32")


def check_half_decoder(
    make_generator, model: transformers.PreTrainedModel, path: Path, dtype: str
) -> None:
    """Weights of 16 bits, against TVM's own pipeline and, more loosely, against torch.

    TVM 0.27's own pipeline has no LayerNorm in bfloat16.
    """
    model = model.to(getattr(torch, dtype))
    save(model, path)
    tested = make_generator(path, dtype=dtype)
    others = [] if dtype == "bfloat16" else [compile_unfused]
    unfused = [make_generator(path, dtype=dtype, compiler=c) for c in others]
    exact_model = to_float64(model)
    gain = half_gain(model.config)
    for length in PROMPT_LENGTHS:
        tokens = prompt(length)
        got = run_tokens(tested, tokens, length)
        exact = torch_logits(exact_model, tokens, length)
        for other in unfused:
            assert_as_accurate(got, run_tokens(other, tokens, length), exact, dtype)
        peer = torch_logits(model, tokens, length)
        assert_as_accurate(got, peer, exact, dtype, peer_gain=gain)


def run_tokens(generator, tokens: np.ndarray, length: int) -> np.ndarray:
    """Prefill ``length`` tokens and decode the rest; logits ``[1 + rest, vocab]``."""
    generator.reset()
    rows = [generator.prefill(tokens[:length])]
    rows += [generator.decode(token) for token in tokens[length:]]
    return np.concatenate(rows)
