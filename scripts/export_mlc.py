"""Export MLC-LLM's models, as data for tests.

    git clone https://github.com/mlc-ai/mlc-llm PATH && git -C PATH checkout 79d603f
    python scripts/export_mlc.py --mlc-llm PATH [PRESET ...]

Writes tests/data/mlc/models.tar.xz: each preset with its own widths and two layers, in float16, in
q4f16_1, and in one more quantisation, as MLC-LLM's pipeline would get it.  Of a model's functions
those remain that embed tokens and run the layers.  No weights, native library or GPU are needed.
Presets that are named replace their own modules; without any, all are written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import _mlc_llm as mlc
import tvm_ffi
from tvm.target import Target

from tests.support import mlc_models as corpus

PRESETS = {
    "Mixtral-8x7B-v0.1": "mixtral",
    "aya-23": "cohere",
    "baichuan": "baichuan",
    "chatglm": "chatglm",
    "gemma2_2b": "gemma2",
    "gemma3_1b_it": "gemma3_text",
    "gemma_2b": "gemma",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt_bigcode",
    "gpt_j": "gptj",
    "internlm2": "internlm2",
    "llama2_7b": "llama",
    "llama3_1_8b": "llama",
    "minicpm_2b": "minicpm",
    "ministral3_3b_2512": "ministral3",
    "mistral_7b": "mistral",
    "olmo2_7b": "olmo2",
    "orion": "orion",
    "phi-2": "phi-msft",
    "phi-3_5": "phi3",
    "qwen2.5_3b": "qwen2",
    "qwen2_0_5b": "qwen2",
    "qwen3_0.6b": "qwen3",
    "redpajama_3b_v1": "gpt_neox",
    "stablelm-2-zephyr-1_6b": "stablelm",
    "starcoder2": "starcoder2",
}
"""The presets, each with the model that it configures."""

ALWAYS = ("q0f16", "q4f16_1")
IN_TURN = ("q4f32_1", "q3f16_1", "q4f16_0", "q0f32")
TARGET = Target("llvm")


def quantizations(preset: str) -> list[str]:
    """Return the quantisations that a preset is exported in."""
    turn = list(PRESETS).index(preset)
    return [*ALWAYS, IN_TURN[turn % len(IN_TURN)]]


def exported(preset: str, quantization: str) -> dict[str, str]:
    """Return the text of each function of a preset.

    Raises
    ------
    ValueError
        If a text does not give its module back.
    """
    variant = mlc.Variant(PRESETS[preset], preset, quantization)
    with TARGET:
        whole, _ = mlc.exported(variant, TARGET)
    found = {}
    for name in corpus.FUNCTIONS:
        mod = corpus.only(whole, name)
        found[name] = corpus.printed(mod)
        if not tvm_ffi.structural_equal(corpus.parse(found[name]), mod):
            raise ValueError(f"{preset} {quantization}: the text of {name} gives another module")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mlc-llm", type=Path, required=True, help="a checkout of MLC-LLM")
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=", ".join(PRESETS))
    args = parser.parse_args()
    unknown = [name for name in args.presets if name not in PRESETS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no preset of this script; it has {', '.join(PRESETS)}")
    try:
        mlc.load(args.mlc_llm)
    except ImportError as err:
        sys.exit(f"export_mlc: {err}")
    models = dict(corpus.texts()) if args.presets else {}
    for preset in args.presets or PRESETS:
        for quantization in quantizations(preset):
            models[f"{preset}-{quantization}"] = exported(preset, quantization)
            print(f"{preset} {quantization}", flush=True)
    corpus.pack(models)


if __name__ == "__main__":
    main()
