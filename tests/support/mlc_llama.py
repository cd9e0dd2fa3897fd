"""A small LLaMA of MLC-LLM: its weights, what it computes in float64, and its engine's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 32, 2
HIDDEN, INNER, VOCABULARY = HEADS * HEAD_DIM, 192, 320
THETA, EPSILON, SEQUENCES = 10000.0, 1e-5, 4
CONTEXT, CHUNK, PAGE = 128, 32, 16
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": EPSILON,
    "vocab_size": VOCABULARY,
    "position_embedding_base": THETA,
    "context_window_size": CONTEXT,
    "prefill_chunk_size": CHUNK,
    "tie_word_embeddings": False,
}
Weights = dict[str, np.ndarray]


def weights() -> Weights:
    """Return weights whose logits differ by more than what float16 and 4 bits round."""
    rng = np.random.default_rng(2)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}.mlp.gate_up_proj.weight": (2 * INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
        }
    made = {}
    for name, shape in shapes.items():
        numbers = rng.standard_normal(shape)
        made[name] = numbers * 1.5 / shape[-1] ** 0.5 if len(shape) == 2 else 1 + numbers / 10
    return made


def unpacked(words: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """Return what q4f16_1 and its like mean: eight numbers of 4 bits, less 7, in each word."""
    numbers = (words[..., None] >> (np.arange(8, dtype="uint32") * 4)) & 15
    numbers = numbers.reshape(len(words), -1)[:, :columns].astype("float64") - 7
    group = 32
    return numbers * np.repeat(scales.astype("float64"), group, axis=1)[:, :columns]


def logits(given: Weights, tokens: Sequence[int]) -> np.ndarray:
    """Return the logits behind every token, in float64."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * given[name]

    length, half = len(tokens), HEAD_DIM // 2
    angles = np.arange(length)[:, None, None] * THETA ** (-np.arange(half) / half)

    def turned(x: np.ndarray) -> np.ndarray:
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    hidden = np.tril(np.ones((length, length))) == 0
    x = given["model.embed_tokens.weight"][list(tokens)]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm.weight") @ given[f"{at}.self_attn.qkv_proj.weight"].T
        heads = h.reshape(length, -1, HEAD_DIM)
        q, k = turned(heads[:, :HEADS]), turned(heads[:, HEADS:-KV_HEADS])
        k, v = (np.repeat(t, HEADS // KV_HEADS, 1) for t in (k, heads[:, -KV_HEADS:]))
        scores = np.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5
        scores = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", scores, v).reshape(length, HIDDEN)
        x = x + mixed @ given[f"{at}.self_attn.o_proj.weight"].T
        h = (
            norm(x, f"{at}.post_attention_layernorm.weight")
            @ given[f"{at}.mlp.gate_up_proj.weight"].T
        )
        gate, up = h[:, :INNER], h[:, INNER:]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ given[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ given["lm_head.weight"].T


class Engine:
    """Calls what MLC-LLM's engine calls, with TVM's paged cache."""

    def __init__(
        self, executable: relax.VMExecutable, params: list[Any], device: tvm.runtime.Device
    ) -> None:
        self.vm, self.device = relax.VirtualMachine(executable, device), device
        self.params = [param.copyto(device) for param in params]
        sizes = (SEQUENCES, CONTEXT, CHUNK, PAGE, 0)
        self.cache = self.vm["create_tir_paged_kv_cache"](*(tvm_ffi.Shape([n]) for n in sizes))

    def add(self, sequence: int) -> None:
        tvm.get_global_func("vm.builtin.kv_state_add_sequence")(self.cache, sequence)

    def drop(self, sequence: int, tokens: int) -> None:
        """Forget the last tokens of a sequence."""
        tvm.get_global_func("vm.builtin.kv_state_popn")(self.cache, sequence, tokens)

    def call(self, function: str, tokens: dict[int, Sequence[int]], *more: Any) -> np.ndarray:
        """Append tokens to sequences by a function of the model; return its logits, row by row."""
        flat = np.array([t for new in tokens.values() for t in new], "int32")
        embedded = self.vm["embed"](tvm.runtime.tensor(flat, self.device), self.params)
        is_decode = function == "batch_decode"
        shape = (len(flat), 1, HIDDEN) if is_decode else (1, len(flat), HIDDEN)
        lengths = tvm_ffi.Shape([len(new) for new in tokens.values()])
        begin = tvm.get_global_func("vm.builtin.kv_state_begin_forward")
        begin(self.cache, tvm_ffi.Shape(list(tokens)), lengths)
        given = (embedded._create_view(shape), *more, self.cache, self.params)
        found = self.vm[function](*given)[0].numpy()
        tvm.get_global_func("vm.builtin.kv_state_end_forward")(self.cache)
        return found.reshape(-1, VOCABULARY)

    def prefill(self, prompts: dict[int, Sequence[int]]) -> np.ndarray:
        """Return the logits behind each prompt."""
        for sequence in prompts:
            self.add(sequence)
        last = np.cumsum([len(prompt) for prompt in prompts.values()]) - 1
        behind = tvm.runtime.tensor(last.astype("int32"), self.device)
        return self.call("batch_prefill", prompts, behind)
