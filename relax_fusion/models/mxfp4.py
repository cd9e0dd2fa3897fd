"""Weights of experts in a checkpoint: plain, or in MXFP4, as gpt-oss is published.

MXFP4 is the format of the Open Compute Project's "OCP Microscaling Formats (MX)": numbers of 4 bits
(a sign, two bits of exponent, one of mantissa), of which 32 along k share a power of 2.
"""

from __future__ import annotations

import numpy as np

from ..errors import WeightsError
from ..quantization import MXFP4
from ..workload.reference import numpy_dtype
from .checkpoint import Checkpoint

_NUMBERS = np.arange(16, dtype="uint8").view(numpy_dtype(MXFP4.number)).astype("float32")
"""What 4 bits are.  This table takes a fifth of the time of what decodes any format."""


def stacked(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read the weights ``[experts, k, n]`` or the biases ``[experts, n]`` of all experts.

    Where a checkpoint has weights as ``NAME_blocks`` and ``NAME_scales``, they are decoded: bytes
    ``[experts, n, k / 32, 16]``, the first number of each in its lowest bits, and exponents
    ``[experts, n, k / 32]``.
    """
    if len(shape) < 3 or f"{name}_blocks" not in checkpoint:
        return checkpoint.tensor(name, shape)
    experts, k, n = shape
    if k % MXFP4.group:
        raise WeightsError(
            f"{name}_blocks has {k} features of each expert; MXFP4 has {MXFP4.group} in each group"
        )
    groups = (experts, n, k // MXFP4.group)
    blocks = checkpoint.tensor(f"{name}_blocks", (*groups, MXFP4.group // 2), kinds=("U8",))
    scales = checkpoint.tensor(f"{name}_scales", groups, kinds=("U8",))
    found = np.empty((experts, n, k), "float32")
    for expert in range(experts):
        found[expert] = decoded(blocks[expert], scales[expert])
    return found.swapaxes(1, 2)


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the numbers ``[n, k]`` of bytes ``[n, k / 32, 16]`` and exponents ``[n, k / 32]``."""
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1)
    numbers = _NUMBERS[pairs].reshape(*scales.shape, MXFP4.group)
    exponents = scales.astype(np.int32)[..., None] - 127
    with np.errstate(over="ignore"):  # the largest scales have numbers beyond float32
        whole = np.ldexp(numbers, exponents)
    return np.where(scales[..., None] == 255, np.float32("nan"), whole).reshape(len(blocks), -1)
