"""What a launch of the matmul kernel in CUDA C++ costs."""

from __future__ import annotations

from ....hardware import DeviceSpec
from ...prediction import Prediction, ceil_div
from ...shape import MatmulShape
from .tiles import CudaPlan


def predict(plan: CudaPlan, shape: MatmulShape, dev: DeviceSpec, rows: int) -> Prediction:
    """Return what a plan costs at some rows."""
    tiles = sum(ceil_div(n, plan.block_n) for n in shape.n_parts) * ceil_div(rows, plan.block_m)
    sums = shape.k * plan.block_m * plan.block_n * shape.parts * ceil_div(tiles, dev.sm_count)
    each = 2 * sums / dev.tensor_flops_per_s(shape.dtype) * dev.sm_count
    return Prediction(dev.launch_s + each, shape.weight_bytes, shape.flops(rows), 1, "compute")
