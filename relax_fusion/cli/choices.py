"""What can be chosen by name.  The parser has it from here, so that help does not wait for TVM."""

from __future__ import annotations

BACKENDS = ("auto", "tir", "triton")
DTYPES = ("float32", "float16", "bfloat16")
MODELS = (
    *("llama-3.1-8b", "llama-3.2-1b", "llama-2-7b", "gpt2", "bert-base"),
    *("demo-llama", "demo-gpt2"),
)
PASSES = (
    *("MendImports", "MergeDuplicates", "MultiplyConvolutions", "MoveReshapes", "MoveTransposes"),
    *("RecogniseOperators", "FuseNormRotation"),
    *("FuseAdapters", "FuseChains", "FuseGatedFFN", "FuseRMSNormMatmul"),
    *("FuseAttentionChain", "FuseProjections", "FuseMatmulEpilogue"),
)
PEERS = ("tvm", "torch", "torch-compile", "torch-graphs")
QUANTIZATIONS = (
    *("q3f16_0", "q3f16_1", "q4f16_0", "q4f16_1"),
    *("q4bf16_0", "q4bf16_1", "q4f32_1", "q8f16_1"),
)
PLANS = 8
"""Plans that `tune` measures for each range of rows, unless it is told otherwise."""
