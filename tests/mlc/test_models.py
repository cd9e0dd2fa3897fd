"""Models of MLC-LLM, compiled with our phases, generate in batches what transformers computes.

It needs the sources of MLC-LLM at commit 79d603f: RELAX_FUSION_MLC=PATH of a checkout.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from safetensors.numpy import load_file

from relax_fusion import Report

from ..support import mlc_llama as llama
from .test_generation import CHECKOUT, PROMPTS, build, report  # noqa: F401

pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason="set RELAX_FUSION_MLC to a checkout of MLC-LLM at 79d603f"
)
SIZES = {
    "hidden_size": llama.HIDDEN,
    "head_dim": llama.HEAD_DIM,
    "intermediate_size": llama.INNER,
    "num_attention_heads": llama.HEADS,
    "num_key_value_heads": llama.KV_HEADS,
    "num_hidden_layers": llama.LAYERS,
    "max_position_embeddings": llama.CONTEXT,
    "rms_norm_eps": llama.EPSILON,
    "layer_norm_eps": llama.EPSILON,
    "rope_theta": llama.THETA,
}
OF_GPT = {"n_embd": llama.HIDDEN, "n_head": llama.HEADS, "n_layer": llama.LAYERS}
OF_GPT |= {"n_inner": llama.INNER, "n_positions": llama.CONTEXT}
OF_GPT |= {"layer_norm_epsilon": llama.EPSILON}
FACTORS = np.linspace(1, 3, llama.HEAD_DIM // 2).tolist()
LONGROPE = {
    "type": "longrope",
    "long_factor": [9.0] * len(FACTORS),
    "short_factor": FACTORS,
    "max_position_embeddings": llama.CONTEXT,
    "original_max_position_embeddings": llama.CONTEXT // 2,
}
OF_PHI = {"rope_scaling": LONGROPE, "pad_token_id": 0}
OF_PHI |= {"original_max_position_embeddings": llama.CONTEXT // 2}
# MLC-LLM has no soft cap of scores, and scales them by the size of a head
OF_GEMMA = {"attn_logit_softcapping": None, "query_pre_attn_scalar": llama.HEAD_DIM}
TIED = {"tie_word_embeddings": True}
OF_QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
OF_QWEN_MOE |= {"norm_topk_prob": True, "decoder_sparse_step": 1}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": OF_GPT | TIED,
    "gpt_bigcode": OF_GPT | {"multi_query": True, "activation_function": "gelu"},
    "qwen2": SIZES,
    "qwen3": SIZES,
    "gemma2": SIZES | OF_GEMMA | TIED,
    "phi3": SIZES | OF_PHI,
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SIZES | OF_QWEN_MOE,
    "gpt_neox": SIZES | {"rotary_pct": 0.25},
    "starcoder2": SIZES | TIED,
}
COMMON = {"vocab_size": llama.VOCABULARY, "tie_word_embeddings": False}
OF_MLC = {"context_window_size": llama.CONTEXT, "prefill_chunk_size": llama.CHUNK}
STEPS, ERROR = 4, 2e-6


def reference(kind: str, fields: dict[str, Any]) -> Any:
    """Return a model of transformers, with weights that spread its logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON | fields)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **eager).double().eval()
    for param in model.parameters():
        if param.ndim > 1:
            torch.nn.init.normal_(param, std=param.shape[-1] ** -0.5)
        else:
            torch.nn.init.normal_(param, mean=float(param.detach().mean()), std=0.1)
    return model


def engine(name: str, weights: dict[str, np.ndarray], fields: dict[str, Any]) -> llama.Engine:
    """Compile a model as MLC-LLM does, and give it the weights by MLC-LLM's own mapping."""
    from mlc_llm.model import MODELS as OF
    from mlc_llm.quantization import QUANTIZATION

    model, kind = OF[name], QUANTIZATION["q0f32"]
    config = model.config.from_dict(deepcopy(fields))
    mapping = model.source["huggingface-safetensor"](config, kind)
    weights = {
        n.removeprefix("transformer.") if name == "gpt2" else n: w for n, w in weights.items()
    }
    module, _ = model.quantize[kind.kind](config, kind)
    params = []
    for param, _ in module.named_parameters():
        sources = [weights[source] for source in mapping.param_map[param]]
        params.append(tvm.runtime.tensor(mapping.map_func[param](*sources)))
    return llama.Engine(build(name, fields, "q0f32"), params, tvm.cpu())


@pytest.mark.parametrize("name", MODELS)
def test_batches(report: Report, name: str, tmp_path: Path) -> None:  # noqa: F811
    import torch

    fields = MODELS[name]
    model = reference(name, deepcopy(fields))
    model.float().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    runner = engine(name, weights, model.double().config.to_dict() | COMMON | fields | OF_MLC)
    tokens = {sequence: list(prompt) for sequence, prompt in PROMPTS.items()}
    rows = runner.prefill(tokens)
    for _ in range(STEPS):
        with torch.no_grad():
            wanted = [model(torch.tensor([t])).logits[0, -1].numpy() for t in tokens.values()]
        assert np.abs(rows - np.stack(wanted)).max() <= ERROR * np.abs(wanted).max()
        new = {s: [int(row.argmax())] for s, row in zip(tokens, rows, strict=True)}
        for sequence, token in new.items():
            tokens[sequence] += token
        rows = runner.call("batch_decode", new)
