"""Models of MLC-LLM, taken from a checkout of its sources: exported, and lowered by its passes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.target import Target

from relax_fusion.errors import VersionError
from relax_fusion.mlc.package import load as load_mlc_llm
from relax_fusion.options import make_options
from relax_fusion.pipeline import PHASES

LAYERS = {"qwen3_5": 4, "qwen3_5_text": 4}
"""Layers of each model, 2 if it is not here; the others repeat them."""

LLAMA = {"preset": "tinyllama_1b_chat_v1.0"}
CHANGED: dict[str, dict[str, Any]] = {
    "bert-bge": {"preset": "snowflake-arctic-embed-m"},
    "deepseek_v3": {
        "preset": "deepseek_v2_lite",
        "q_lora_rank": 1536, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    },
    "eagle": LLAMA,
    "gemma3": {"preset": "gemma3_1b_it"},
    "llava": {
        "preset": "llava",
        "text_config": {
            "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_hidden_layers": 2, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
            "vocab_size": 32064, "context_window_size": 4096,
        },
    },
    "llama4": {
        "text_config": {
            "hidden_size": 5120, "intermediate_size": 8192, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "use_qk_norm": True,
            "interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "num_local_experts": 16,
            "hidden_act": "silu", "intermediate_size_mlp": 16384,
            "rope_scaling": {
                "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
        "context_window_size": 8192, "prefill_chunk_size": 2048,
    },
    "medusa": {
        "medusa_num_heads": 4, "medusa_num_layers": 1, "hidden_size": 4096, "vocab_size": 32000,
    },
    "nemotron": {
        "vocab_size": 256000, "max_position_embeddings": 4096, "hidden_size": 3072,
        "intermediate_size": 9216, "num_attention_heads": 24, "num_key_value_heads": 8,
        "num_hidden_layers": 2,
    },
    "olmo": {
        "vocab_size": 50304, "hidden_size": 2048, "num_attention_heads": 16,
        "intermediate_size": 8192, "hidden_act": "silu", "num_hidden_layers": 2,
        "context_window_size": 2048,
    },
    "phi3": {"preset": "phi-4", "rope_scaling": None},
    "phi3_v": {"preset": "phi-3_5-vision", "rope_scaling": None},
    "phi": {
        "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240,
        "num_attention_heads": 32, "num_hidden_layers": 2, "partial_rotary_factor": 0.4,
        "context_window_size": 2048,
    },
    "qwen3-embedding": {"preset": "qwen3_0.6b"},
    "qwen3_5": {
        "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 248320, "num_hidden_layers": 4,
        "tie_word_embeddings": True, "context_window_size": 4096,
    },
    "qwen3_moe": {
        "preset": "qwen3_0.6b", "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "decoder_sparse_step": 1, "norm_topk_prob": True,
        "intermediate_size": 6144,
    },
    "rwkv6": {
        "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 2,
        "vocab_size": 65536,
    },
}  # fmt: skip
"""Configurations of models without a preset of their own: those of their publishers, or a preset
of a similar model and what differs."""
CHANGED["qwen3_5_text"] = CHANGED["qwen3_5"]


@dataclass(frozen=True)
class Variant:
    """A model in one quantisation."""

    model: str
    preset: str
    quantization: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.quantization}"


def load(checkout: Path) -> None:
    """Make ``mlc_llm`` importable from a checkout: its compiler, not its native library.

    Raises
    ------
    ImportError
        If it is no checkout, or one that does not fit the installed TVM.
    """
    if not (checkout / "python" / "mlc_llm" / "model" / "model.py").is_file():
        raise ImportError(f"{checkout} holds no python/mlc_llm: give a checkout of MLC-LLM")
    sys.path.insert(0, str(checkout / "python"))
    try:
        load_mlc_llm()
    except VersionError as err:
        raise ImportError(str(err)) from err


def models() -> dict[str, str]:
    """Return the models of MLC-LLM, each with the preset that its configuration starts from."""
    from mlc_llm.model import MODEL_PRESETS, MODELS

    presets: dict[str, str] = {}
    for name, preset in MODEL_PRESETS.items():
        presets.setdefault(preset["model_type"], name)
    return {m: CHANGED.get(m, {}).get("preset", presets.get(m, "")) for m in MODELS}


def quantizations(model: str) -> list[str]:
    """Return the quantisations that MLC-LLM has for a model."""
    from mlc_llm.model import MODELS
    from mlc_llm.quantization import QUANTIZATION

    return [name for name, q in QUANTIZATION.items() if q.kind in MODELS[model].quantize]


def configuration(variant: Variant) -> Any:
    """Return the configuration of a model with its own widths, and few layers."""
    from mlc_llm.model import MODELS

    return MODELS[variant.model].config.from_dict(fields_of(variant))


def fields_of(variant: Variant) -> dict[str, Any]:
    """Return the fields of a configuration with the model's own widths, and few layers."""
    from mlc_llm.model import MODEL_PRESETS

    changed = {k: v for k, v in CHANGED.get(variant.model, {}).items() if k != "preset"}
    values = {**MODEL_PRESETS.get(variant.preset, {}), **changed}
    return _with_few_layers(values, LAYERS.get(variant.model, 2))


def _with_few_layers(values: dict[str, Any], layers: int) -> dict[str, Any]:
    found = dict(values)
    for key, value in values.items():
        if key in ("num_hidden_layers", "n_layer", "num_layers"):
            found[key] = min(layers, value)
        elif key in ("text_config", "vision_config", "model_config"):
            found[key] = _with_few_layers(value, layers)
    return found


def lowered(variant: Variant, target: Target) -> ir.IRModule:
    """Return the module of a model as MLC-LLM's pipeline has it where schedules begin.

    That is after its own fusions, legalisation, FuseOps and FuseTIR.
    """
    with target:
        mod, options = exported(variant, target)
        return _until_schedules(mod, target, options)


def through_our_pipeline(variant: Variant, target: Target, phases: int = 6) -> ir.IRModule:
    """Return the module of a model as the first phases of our pipeline make it."""
    from mlc_llm.compiler_pass.dispatch_kv_cache_creation import DispatchKVCacheCreation

    with target:
        mod, options = exported(variant, target)
        mod = DispatchKVCacheCreation(target, False, dict(options["metadata"]))(mod)
        given = make_options(target, {**options, "backend": "tir"})
        for _, phase, _ in PHASES[:phases]:
            mod = tvm.transform.Sequential(phase(given))(mod)
        return mod


def exported(variant: Variant, target: Target) -> tuple[ir.IRModule, dict[str, Any]]:
    """Return the module of a model, and the arguments of MLC-LLM's pipeline for it."""
    from mlc_llm import op as op_ext
    from mlc_llm.interface.compile import (
        _apply_preproc_to_params_and_check_pipeline,
        _infer_kv_state_kind,
    )
    from mlc_llm.model import MODELS
    from mlc_llm.quantization import QUANTIZATION

    op_ext.enable(target=target, flashinfer=False, faster_transformer=False, cutlass=False)
    model, quantization = MODELS[variant.model], QUANTIZATION[variant.quantization]
    config = configuration(variant)
    module, _ = model.quantize[quantization.kind](config, quantization)
    mod, params, external = module.export_tvm(spec=module.get_default_spec(), allow_extern=True)
    metadata = {
        "model_type": variant.model,
        "quantization": variant.quantization,
        "context_window_size": getattr(config, "context_window_size", -1),
        "sliding_window_size": getattr(config, "sliding_window_size", -1),
        "attention_sink_size": -1,
        "prefill_chunk_size": config.prefill_chunk_size,
        "tensor_parallel_shards": config.tensor_parallel_shards,
        "pipeline_parallel_stages": 1,
        "disaggregation": False,
        "kv_state_kind": _infer_kv_state_kind(variant.model),
        "max_batch_size": 8,
        "active_vocab_size": None,
        "model_task": model.model_task,
        "params": [],
    }
    hints = {"batch_decode": ["batch_size"]} if "batch_decode" in _names(mod) else {}
    return mod, {
        "variable_bounds": {"batch_size": 8, "seq_len": 2048, "total_seq_len": 8192},
        "cuda_graph_symbolic_capture_hints": hints,
        "additional_tirs": _apply_preproc_to_params_and_check_pipeline(params, config),
        "ext_mods": external,
        "metadata": metadata,
    }


def _names(mod: ir.IRModule) -> set[str]:
    return {gvar.name_hint for gvar in mod.functions}


def _until_schedules(mod: ir.IRModule, target: Target, options: dict[str, Any]) -> ir.IRModule:
    from mlc_llm.compiler_pass import pipeline

    reached: list[ir.IRModule] = []

    @tvm.transform.module_pass(opt_level=0, name="End")
    class End:
        def transform_module(self, mod: ir.IRModule, _ctx: Any) -> ir.IRModule:
            reached.append(mod)
            raise StopIteration

    first = pipeline.LowBatchGemvSpecialize
    pipeline.LowBatchGemvSpecialize = End  # the first pass that schedules
    try:
        relax.get_pipeline("mlc_llm", target=target, **options)(mod)
    except RuntimeError:
        if not reached:
            raise
    finally:
        pipeline.LowBatchGemvSpecialize = first
    return reached[0]


def prim_funcs(mod: ir.IRModule) -> Iterator[tuple[str, tirx.PrimFunc]]:
    """Return the functions that are no kernels yet, and their names."""
    for gvar, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and not dict(func.attrs or {}).get(
            "tirx.is_scheduled", False
        ):
            yield gvar.name_hint, func
