"""Tiles of a generated kernel: how many elements a block of Triton has, and what is padding.

A tile is a Triton value with a dimension for each of its loops, `Frame`, where loops whose tile is
one element are left out.  Triton's blocks are powers of two, so a tile of another size is one with
a mask.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...tiling import Access, Schedule
from ...tiling.axes import loop_names
from ...tiling.structure import block_sizes
from ...workload.dims import Dim, DynamicDim
from ...workload.dtypes import STORED_BYTES
from ...workload.graph import Block, Graph, Tensor
from ...workload.roofline import Sizes

_ATOM = re.compile(r"[\w.]+(\[[^\[\]]*\])?|\([^()]*\)")

Frame = tuple[str, ...]
"""The loops that the dimensions of a value are, in order."""


@dataclass(frozen=True)
class Blocks:
    """The loops of a schedule as Triton has them."""

    block: Mapping[str, int]
    """Elements of a block along each loop: a power of two."""
    size: Mapping[str, Dim]
    """Elements of each loop."""
    loop_of: Mapping[tuple[str, str], str]
    """The loop of an axis, by what the statement makes and the axis's name."""

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, sizes: Sizes) -> Blocks:
        """Return the blocks of a schedule.

        Raises `TilingError` if a loop of several tiles has one that is no power of two.
        """
        names, _ = loop_names(graph, sizes)
        loop_of = {(graph.blocks[at].out, axis): loop for (at, axis), loop in names.items()}
        size = {
            loop_of[each.out, axis.name]: axis.size
            for each in graph.blocks
            for axis in (*each.axes, *each.reduced)
        }
        return cls(block_sizes(schedule), size, loop_of)

    def loops(self, block: Block, reduced: bool) -> Frame:
        """Return the loops of a statement's axes: those that it combines over, or the others."""
        axes = block.reduced if reduced else block.axes
        return tuple(self.loop_of[block.out, axis.name] for axis in axes)

    def frame(self, loops: Frame) -> Frame:
        """Return the dimensions of a tile with these loops."""
        return tuple(name for name in dict.fromkeys(loops) if self.block[name] > 1)

    def shape(self, frame: Frame) -> str:
        """Return the shape of a tile, as text."""
        return f"[{', '.join(str(self.block[name]) for name in frame)}]"

    def is_padded(self, loop: str) -> bool:
        """Tell whether a block of the loop may have elements that there are not."""
        size = self.size[loop]
        return isinstance(size, DynamicDim) or size % self.block[loop] != 0

    def count(self, loop: str) -> str:
        """Return the number of elements of a loop, as text."""
        return size_name(self.size[loop])

    def tiles(self, loop: str) -> str:
        """Return the number of tiles of a loop, as text."""
        size = self.size[loop]
        if isinstance(size, DynamicDim):
            return f"tl.cdiv({size_name(size)}, {self.block[loop]})"
        return str(-(-size // self.block[loop]))


def size_name(size: Dim) -> str:
    """Return the number, or the name of the parameter that has it."""
    return f"{size.name}_size" if isinstance(size, DynamicDim) else str(size)


def bracketed(text: str) -> str:
    """Return an expression so that something can be done with all of it."""
    return text if _ATOM.fullmatch(text) else f"({text})"


def spread(text: str, own: Frame, frame: Frame) -> str:
    """Return a tile as one that is broadcast to the dimensions of another."""
    order = tuple(name for name in frame if name in own)
    if order != own:
        text = f"tl.permute({text}, ({', '.join(str(own.index(name)) for name in order)}))"
    if not own or order == frame:
        return text
    return f"{text}[{', '.join(':' if name in own else 'None' for name in frame)}]"


MOST_BOX = 256
"""A box has at most this many elements along a dimension (CUDA driver API,
cuTensorMapEncodeTiled)."""

ALIGNED_BYTES = 16
"""Strides are multiples of this many bytes, and a row of a box has at least as many
(cuTensorMapEncodeTiled)."""

MOST_DIMS = 5
"""A tensor map has at most this many dimensions (cuTensorMapEncodeTiled)."""

_DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8")


def box_of(tensor: Tensor, blocks: Blocks, what: Access) -> tuple[int, ...] | None:
    """Return the box that a tile of an operand is for Hopper's copy engine; None if it is none.

    What lies outside of the tensor is filled with zeros, so that such a load has no mask.
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
