"""Workloads and devices that the estimator's tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from relax_fusion.estimator import AttentionSize, KernelFamily, Problem, Size, violations
from relax_fusion.estimator.families import matmuls
from relax_fusion.estimator.families.tensor_cores.family import TensorCores
from relax_fusion.estimator.families.tensor_cores.tiles import FAMILIES
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import DeviceSpec, device, generic_cpu
from relax_fusion.workload import (
    Attention,
    Dim,
    DynamicDim,
    GatedFFN,
    Norm,
    NormMatmul,
    Projection,
    WeightLayout,
    Workload,
)

RMS = Norm("rms", 1e-5)
ROWS = DynamicDim("rows")


def norm_matmul(
    rows: Dim = ROWS,
    k: int = 4096,
    n: int = 6144,
    layout: WeightLayout = "nk",
    dtype: str = "float16",
    norm: Norm | None = RMS,
) -> NormMatmul:
    return NormMatmul(rows, k, (Projection(n, layout),), norm, dtype, dtype)


def gated_ffn(n: int = 14336, merged: bool = True) -> GatedFFN:
    return GatedFFN(ROWS, 4096, n, "nk", merged, True, "silu", RMS, "float16", "float16")


def attention(
    batch: Dim = 1,
    q_len: Dim = 512,
    kv_len: Dim = 512,
    heads: tuple[int, int] = (12, 12),
    dims: tuple[int, int] = (64, 64),
    **options: Any,
) -> Attention:
    """Return an attention; `options` may be `causal` ("none"), `dtype` ("float16"), `scale`."""
    dtype = options.pop("dtype", "float16")
    return Attention(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        v_dim=dims[1],
        bias_dims=None,
        dtype=dtype,
        **{"causal": "none", "scale": 0.125, "out_dtype": dtype, **options},
    )


LENGTHS = DynamicDim("q_len"), DynamicDim("kv_len")

CACHED = {"causal": "bottom_right", "kv_prefix": True, "scale": 128**-0.5}
CACHE = attention(DynamicDim("batch"), *LENGTHS, (32, 8), (128, 128), **CACHED)

WORKLOADS = {
    "llama_qkv": norm_matmul(),
    "llama_ffn": gated_ffn(),
    "llama_ffn_unmerged": gated_ffn(merged=False),
    "gpt2_kn": norm_matmul(k=768, n=2304, layout="kn", dtype="float32", norm=Norm("layer", 1e-5)),
    "plain": norm_matmul(norm=None),
    "odd": norm_matmul(k=1001, n=503, dtype="float32"),
    "tiny": norm_matmul(k=3, n=5, dtype="float32"),
    "mixed": NormMatmul(
        ROWS,
        256,
        (Projection(96, "nk"), Projection(40, "kn", ("bias",))),
        RMS,
        "float32",
        "float32",
    ),
    "static": norm_matmul(rows=20),
    "bert": attention(batch=32),
    "llama_attention": attention(
        DynamicDim("b"), *LENGTHS, heads=(32, 8), dims=(128, 128), causal="bottom_right"
    ),
    "odd_attention": attention(2, 77, 33, heads=(3, 3), dims=(40, 27), dtype="float32"),
}

GPU, SMALL_GPU = device("h200"), device("rtx3080")
AVX512, AVX2, SSE = generic_cpu(2, 64), generic_cpu(8, 32), generic_cpu(1, 16)
DEVICES: dict[str, DeviceSpec] = {
    "h200": GPU,
    "rtx3080": SMALL_GPU,
    "avx512": AVX512,
    "avx2": AVX2,
    "sse": SSE,
}


def size_of(work: Workload, rows: int) -> Size:
    """Return a size of `work` in which the dimension that tiles cover is `rows`."""
    return AttentionSize(1, rows, 512) if isinstance(work, Attention) else rows


def plans_of(family: KernelFamily[Any], work: Workload, dev: DeviceSpec) -> list[Any]:
    """Return the plans that a family offers, also those that do not fit."""
    return [offer.plan for offer in family.plans(Problem(work, dev))]


def split_plans(work: NormMatmul | GatedFFN, dev: DeviceSpec) -> list[TilePlan]:
    """Return two plans of each family of tensor cores that cut the reduction, however padded."""
    with mock.patch.object(matmuls, "columns_fit", return_value=True):
        found = plans_of(TensorCores(), replace(work, rows=ROWS), dev)
    plans = [p for p in found if p.split_k > 1 and not violations(p, work, dev)]
    chosen = []
    for name in FAMILIES:
        own = sorted((p for p in plans if p.family == name), key=lambda p: p.split_k)
        chosen += [own[len(own) // 5], own[-1]] if own else []
    return chosen
