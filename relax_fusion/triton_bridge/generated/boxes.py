"""Which tiles are boxes of a tensor: what the tensor memory accelerator of Hopper loads.

What lies outside of the tensor is filled with zeros, so that such a load has no mask.
"""

from __future__ import annotations

from ...tiling import Access
from ...workload.dtypes import STORED_BYTES
from ...workload.graph import Tensor
from .tiles import Blocks

MOST_BOX = 256
"""Elements of a box along a dimension (CUDA driver API, cuTensorMapEncodeTiled)."""

ALIGNED_BYTES = 16
"""What strides are multiples of, and the least that a row of a box has (the same)."""

MOST_DIMS = 5
"""Dimensions of a tensor map (the same)."""

_DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8")


def box_of(tensor: Tensor, blocks: Blocks, what: Access) -> tuple[int, ...] | None:
    """Return the box that a tile of an operand is; None where it is none.

    Parameters
    ----------
    tensor : Tensor
        The operand.
    blocks : Blocks
        The loops.
    what : Access
        Which elements the tile has.
    """
    size = STORED_BYTES[tensor.dtype]
    if tensor.dtype not in _DTYPES or not 2 <= len(tensor.shape) <= MOST_DIMS:
        return None
    behind = 1
    for dim in reversed(tensor.shape[1:]):
        if not isinstance(dim, int):
            return None
        behind *= dim
        if behind * size % ALIGNED_BYTES:
            return None
    box = []
    for place, dim in zip(what.at, tensor.shape, strict=True):
        wide = [(loop, stride) for loop, stride in place.terms if blocks.block[loop] > 1]
        if place.div != 1 or place.mod is not None or len(wide) > 1:
            return None
        for loop, stride in wide:
            whole = place.terms == ((loop, 1),) and not place.start and blocks.size[loop] == dim
            if stride != 1 or (blocks.is_padded(loop) and not whole):
                return None
        box.append(blocks.block[wide[0][0]] if wide else 1)
    repeated = len(set(what.loops)) < sum(len(place.terms) for place in what.at)
    if repeated or max(box) > MOST_BOX or box[-1] * size < ALIGNED_BYTES:
        return None
    return tuple(box)
