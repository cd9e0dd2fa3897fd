"""Predicted time of a workload, fused under a plan or as separate kernels."""

from __future__ import annotations

from ..hardware import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import Attention, MatmulChain, Workload
from . import (
    chain_cost,
    cpu_cost,
    gpu_attention_cost,
    gpu_matmul_cost,
    mma_attention_cost,
    mma_chain_cost,
    mma_cost,
    skinny,
    skinny_cost,
    triton_attention_cost,
    triton_cost,
    unfused,
)
from .footprint import footprint
from .panels import FAMILY as PANELS
from .panels_cost import price_panels
from .prediction import Prediction
from .shape import Size, attention_size, matmul_shape, rows_of


def predict(work: Workload, plan: TilePlan, dev: DeviceSpec, size: Size) -> Prediction:
    """Return what the fused kernel costs at `size`.

    Parameters
    ----------
    size : int or AttentionSize
        Rows of a matmul workload; batch, query and key positions of an attention, where entries
        that the workload knows statically are ignored.

    Returns
    -------
    Prediction
        Only meaningful for a plan without `violations`.
    """
    if isinstance(work, MatmulChain):
        foot, rows = footprint(work, plan, dev), rows_of(work, size)
        if dev.kind == "cpu":
            return chain_cost.predict(work, plan, foot, dev, rows)
        return mma_chain_cost.predict(work, plan, foot, dev, rows)
    if plan.backend == "triton":
        if isinstance(work, Attention):
            return triton_attention_cost.predict(work, plan, dev, attention_size(work, size))
        return triton_cost.predict(work, plan, dev, rows_of(work, size))
    if plan.family == PANELS and not isinstance(work, Attention):
        return price_panels(matmul_shape(work), plan, dev, rows_of(work, size))
    foot = footprint(work, plan, dev)
    if plan.family and not isinstance(work, Attention):
        price = skinny_cost if plan.family == skinny.FAMILY else mma_cost
        return price.predict(work, plan, foot, dev, rows_of(work, size))
    on_cpu = dev.kind == "cpu"
    if isinstance(work, Attention) and plan.family:
        return mma_attention_cost.predict(work, plan, foot, dev, attention_size(work, size))
    if isinstance(work, Attention):
        model = cpu_cost.attention_on_cpu if on_cpu else gpu_attention_cost.attention_on_gpu
        return model(work, plan, foot, dev, attention_size(work, size))
    matmul = cpu_cost.matmul_on_cpu if on_cpu else gpu_matmul_cost.matmul_on_gpu
    return matmul(matmul_shape(work), plan, foot, dev, rows_of(work, size))


def predict_unfused(
    work: Workload, dev: DeviceSpec, size: Size, *, backend: str = "tir"
) -> Prediction:
    """Return what the chain costs at `size` as separate kernels, each with its bytes and launch.

    Parameters
    ----------
    size : int or AttentionSize
        As for `predict`.
    backend : {"tir", "triton"}
        What the separate matmuls run on: plain FMAs, as TVM's own schedules do, or tensor cores,
        as a vendor library does.  Compare like with like.
    """
    if isinstance(work, MatmulChain):
        parts = [
            predict_unfused(part, dev, rows, backend=backend)
            for part, rows in chain_cost.priced(work, dev, rows_of(work, size))
        ]
        return chain_cost.together(parts, work, dev)
    if isinstance(work, Attention):
        kernels = unfused.attention_kernels(work, attention_size(work, size))
    else:
        kernels = unfused.matmul_kernels(work, rows_of(work, size))
    return unfused.price(kernels, work.dtype, dev, backend)
