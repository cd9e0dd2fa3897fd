"""The workloads that the sentences of docs/numerics.md are tested with.

Few and small, for each is a kernel on every back end; sizes that tests vary are dynamic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_fusion.workload import (
    ACTIVATIONS,
    Adapter,
    DynamicDim,
    GatedFFN,
    Norm,
    NormMatmul,
    PostNorm,
    Projection,
    Rope,
    Step,
)

from .estimator_cases import attention
from .gpu import gpu
from .matmul_chains import TwoMatmuls

K, N, R = (64, 64, 8) if gpu() else (40, 16, 8)  # warp groups take no smaller ones
ROWS = DynamicDim("rows")
HALF = {"dtype": "float16", "out_dtype": "float16"}
FLOAT = {"dtype": "float32", "out_dtype": "float32"}
BRAIN = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
WIDE = {"out_dtype": "float32"}

RMS, LAYER = Norm("rms", 1e-5), Norm("layer", 1e-5, beta=True)
ADDED = {"residual": True, "returns_sum": True, "returns_norm": True}


def projected(*steps: Step, **changes: Any) -> NormMatmul:
    """Return a matmul with steps."""
    plain = NormMatmul(ROWS, K, (Projection(N, "nk", steps),), None, "float16", "float16")
    return replace(plain, **changes)


PLAIN = projected()
RMS_ROWS, LAYER_ROWS = projected(norm=RMS, **WIDE), projected(norm=LAYER, **WIDE)
OFFSET_ROWS = [replace(w, norm=replace(w.norm, unit_offset=True)) for w in (RMS_ROWS, LAYER_ROWS)]
RMS_ADDED = projected(norm=replace(RMS, **ADDED))
LAYER_ADDED = projected(norm=replace(LAYER, **ADDED))
POST = projected(norm=replace(RMS_ADDED.norm, first=PostNorm(1e-3, unit_offset=True)))
POST_SUM = projected(norm=Norm("none", 0.0, residual=True, first=PostNorm(1e-3)))
POST_SUM_KEPT = replace(POST_SUM, norm=replace(POST_SUM.norm, returns_sum=True))
STEPS = projected("bias", "relu", "residual")
SHARED = projected(64.0, "residual", 2.0**-6)
ACTIVE = {name: projected("bias", name) for name in ACTIVATIONS}
ROTATED = projected("bias")
ROTATED = replace(ROTATED, outputs=(replace(ROTATED.outputs[0], rope=Rope(8, 8, "float32")),))
HEAD = Projection(32, "nk", ("bias",), Rope(16, 16, "float32"))
ROTATED_EIGHTS = replace(ROTATED, outputs=(HEAD,))
"""With pairs of features 8 apart, which all kernels take."""
GATED = GatedFFN(ROWS, K, N, "nk", True, True, "relu", None, "float16", "float16", bias=True)
GATED_SILU = replace(GATED, activation="silu", norm=RMS, bias=False)
TWO_MATMULS = TwoMatmuls(
    ROWS, K, R, N, ("nk", "nk"), ("bias",), (0.5, "residual"), "float16", "float32"
)
CHAIN = TWO_MATMULS.chain
ADAPTED = projected("bias")
ADAPTED = replace(ADAPTED, outputs=(replace(ADAPTED.outputs[0], adapter=Adapter(R, "nk", 2.0)),))
BYTES = NormMatmul(ROWS, 520, (Projection(N, "nk"),), None, "uint8", "int32")

D = 16
SIZES = DynamicDim("batch"), DynamicDim("q_len"), DynamicDim("kv_len", 64)
ATTENTION = attention(*SIZES, (2, 1), (D, D), scale=0.25, out_dtype="float32")
EVERY = (True, True, True, True)
BIASED = replace(ATTENTION, bias_dims=EVERY)
BOUNDED = replace(BIASED, bias_op="min")
MASKED = replace(ATTENTION, mask_dims=EVERY)
CAUSAL = replace(ATTENTION, causal="bottom_right")
WINDOW = replace(ATTENTION, window=3)
SINKS = replace(CAUSAL, sinks="float32")
SLOPES = replace(ATTENTION, alibi="float32")
CAPPED = replace(ATTENTION, softcap=5.0)
CACHE = replace(CAUSAL, kv_prefix=True)


def dtypes(work: Any) -> dict[str, Any]:
    """Return a workload in each dtype of floats."""
    found = {"half": HALF, "brain": BRAIN, "float": FLOAT}
    made = {name: replace(work, **dtype) for name, dtype in found.items()}
    return {n: w.chain if isinstance(w, TwoMatmuls) else w for n, w in made.items()}
