"""MLC-LLM's models in several parts: their parameters, and what workers generate with these."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from relax_fusion.parallel import Worker

from .mlc_llama import CHUNK, CONFIG, CONTEXT, HEADS, HIDDEN, INNER, LAYERS, VOCABULARY, Engine

QWEN2 = {name: CONFIG[name] for name in CONFIG if name != "position_embedding_base"}
QWEN2 |= {"rope_theta": 10000, "hidden_act": "silu"}
GPT2 = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_inner": INNER}
GPT2 |= {"n_positions": CONTEXT, "layer_norm_epsilon": 1e-5, "vocab_size": VOCABULARY}
GPT2 |= {"context_window_size": CONTEXT, "prefill_chunk_size": CHUNK}
MODELS = {"llama": CONFIG, "qwen2": QWEN2, "gpt2": GPT2}
PROMPTS = {0: [5, 17, 300, 42, 7, 99, 100, 3], 1: [1, 2, 3], 2: [250]}


def described(model: str, quantization: str, shards: int) -> tuple[Any, Any]:
    """Return MLC-LLM's model for a number of workers, and how its parameters are quantised."""
    from mlc_llm.model import MODELS as known
    from mlc_llm.quantization import QUANTIZATION

    kind = QUANTIZATION[quantization]
    config = known[model].config.from_dict({**MODELS[model], "tensor_parallel_shards": shards})
    made: tuple[Any, Any] = known[model].quantize[kind.kind](config, kind)
    return made


def parameters(model: str, quantization: str, shards: int) -> list[list[np.ndarray]]:
    """Return the parameters of each worker: parts of those that one would have."""
    whole, mapping = described(model, quantization, 1)
    cut, _ = described(model, quantization, shards)
    unpacked, _ = described(model, "q0" + quantization[2:5], 1)
    found = {}
    for name, param in unpacked.named_parameters():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        shape = tuple(
            int(n) if isinstance(n, int | tirx.IntImm) else VOCABULARY for n in param.shape
        )
        value = rng.standard_normal(shape)
        value = value * 1.5 / shape[-1] ** 0.5 if len(shape) == 2 else value / 10
        value = (value + name.endswith("norm.weight")).astype(param.dtype)
        if name in mapping.param_map:
            packed = mapping.map_func[name](tvm.runtime.tensor(value))
            found |= {n: p.numpy() for n, p in zip(mapping.param_map[name], packed, strict=True)}
        else:
            found[name] = value
    assert found.keys() == dict(whole.named_parameters()).keys()
    return [
        [part(found[name], param, rank, shards) for name, param in cut.named_parameters()]
        for rank in range(shards)
    ]


def part(value: np.ndarray, param: Any, rank: int, shards: int) -> np.ndarray:
    """Return a worker's part of a parameter, as MLC-LLM's strategy for it says."""
    how = param.attrs.get("shard_strategy") if shards > 1 else None
    if how is None:
        return value
    sizes = np.array(how.segs or [int(param.shape[how.dim])])
    begins = np.cumsum([0, *sizes[:-1]]) * shards + rank * sizes
    places = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, sizes, strict=True)])
    return np.ascontiguousarray(value.take(places, how.dim))


def generated(
    worker: Worker, library: str, params: Sequence[Sequence[np.ndarray]], steps: int
) -> np.ndarray:
    """Return the logits behind some prompts, and behind tokens that follow them greedily."""
    given = [tvm.runtime.tensor(value) for value in params[worker.rank]]
    engine = Engine(tvm.runtime.load_module(library), given, worker.tvm_device)
    found = [engine.prefill(PROMPTS)]
    for _ in range(steps):
        new = {sequence: [int(found[-1][sequence].argmax())] for sequence in PROMPTS}
        found.append(engine.call("batch_decode", new))
    return np.stack(found)
