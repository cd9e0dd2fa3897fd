"""Runs the kernels for few rows on numpy, as `warps_on_cpu` does the others.

Here each warp has a part of shared memory to itself: what a copy brought is seen behind the wait
and a barrier of the warp, and only by the warp that asked for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx

from ..gpu.attention_cases import numpy_dtype
from .warps_on_cpu import ELEMENT, LANES, Block, _kernel_of, _tag

BITS = {
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}


class WarpsBlock(Block):
    """One thread block, whose warps meet only to add up what they have."""

    def __init__(self, tensors: dict[str, np.ndarray], sizes: dict[str, int]) -> None:
        super().__init__(tensors, sizes)
        self.scratch: dict[Any, np.ndarray] = {}
        self.written: dict[Any, np.ndarray] = {}

    def _SBlockRealize(self, node: Any) -> None:
        for buffer in node.block.alloc_buffers:
            size = int(np.prod([int(d) for d in buffer.ty.shape]))
            dtype = numpy_dtype(str(buffer.ty.dtype))
            if buffer.scope() == "local":
                self.private[buffer] = np.full((self.threads, size), 77, dtype)
            elif buffer.scope() == "shared":
                self.scratch[buffer] = np.full(size, np.nan, dtype)
                self.written[buffer] = np.zeros(size, int)
            else:
                self.shared = np.full(size, np.nan, dtype)
                self.landed, self.owner = np.full(size, self.epoch), np.full(size, -1)
                self.read, self.busy = np.zeros(size, int), np.zeros(size, int)
                self.fenced, self.arrived = np.zeros(size, bool), np.zeros(size, bool)
        self.run(node.block.body)

    def _BufferStore(self, node: Any) -> None:
        if node.buffer in self.scratch:
            at = self._offset(node.buffer, node.indices)
            assert len(np.unique(at)) == len(self.active), "two threads write one element"
            self.written[node.buffer][at] = self.epoch
        super()._BufferStore(node)

    def _tensor(self, buffer: Any) -> np.ndarray:
        return self.scratch[buffer] if buffer in self.scratch else self.tensors[buffer.name]

    def _TensorLoad(self, node: Any) -> Any:
        if node.source in self.scratch:
            at = self._offset(node.source, node.indices)
            assert (self.written[node.source][at] < self.epoch).all(), "no barrier before a read"
        return super()._TensorLoad(node)

    def value(self, node: Any) -> Any:
        name = type(node).__name__
        if name in BITS:
            dtype = numpy_dtype(str(node.ty.dtype))
            return BITS[name](*(self.value(v).astype(dtype) for v in (node.a, node.b)))
        return super().value(node)

    def _Cast(self, node: Any) -> Any:
        dtype = numpy_dtype(str(node.ty.dtype).split("x")[0])
        return np.asarray(self.value(node.value)).astype(dtype)

    def _Call(self, node: Any) -> Any:
        name = node.op.name.removeprefix("tirx.").removeprefix("prim.").removeprefix("ptx.")
        if name == "reinterpret":
            return self._reinterpreted(node)
        if name.startswith("ld"):
            return self._load_shared(node.args)
        return super()._Call(node)

    def _reinterpreted(self, node: Any) -> Any:
        value, dtype = self.value(node.args[0]), str(node.ty.dtype)
        if dtype == "uint32":
            return np.ascontiguousarray(value).view(np.uint32)[..., 0]
        return np.ascontiguousarray(value)[..., None].view(numpy_dtype(dtype.removesuffix("x2")))

    def call_rsqrt(self, args: Any) -> Any:
        return 1 / np.sqrt(self.value(args[0]))

    def call_cuda_warp_sync(self, args: Any) -> None:
        assert len(self.active) == self.threads
        self.epoch += 1

    def _copy(self, args: Any) -> None:
        to = np.asarray(self.value(args[0])).astype(int)
        at = to[:, None] // ELEMENT + np.arange(int(args[2]) // ELEMENT)
        assert len(np.unique(at)) == at.size, "two copies meet"
        lines = to.reshape(-1, 8) // 16 % 8
        assert (np.sort(lines, -1) == np.arange(8)).all(), "a line shares banks"
        self.owner[at] = self.active[:, None] // LANES
        super()._copy(args)

    def _load_shared(self, args: Any) -> None:
        """Give each thread the 16 bytes at its address."""
        targets, address = args[:4], np.asarray(self.value(args[4])).astype(int)
        at = address[:, None] // ELEMENT + np.arange(16 // ELEMENT)
        mine = self.active[:, None] // LANES
        assert (self.owner[at] == mine).all(), "a warp reads what it did not ask for"
        assert (self.landed[at] < self.epoch).all(), "what a copy brought is read without a barrier"
        # Eight threads are served at once
        for eight in address.reshape(-1, 8) // 16:
            lines = np.unique(eight)
            assert len(np.unique(lines % 8)) == len(lines), "different lines share a bank"
        self.read[at] = self.epoch
        words = np.ascontiguousarray(self.shared[at]).view(np.uint32)
        for word, target in enumerate(targets):
            self.private[target.source][self.active, int(target.indices[0])] = words[:, word]


def run_warps(
    func: tirx.PrimFunc, name: str, tensors: dict[str, np.ndarray], sizes: dict[str, int]
) -> None:
    """Run every thread block of the kernel whose block is called `name`; writes into `tensors`."""
    loops: list[Any] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    column = next(loop for loop in loops if _kernel_of(loop, name) and _tag(loop) == "blockIdx.x")
    row, thread = column.body, column.body.body
    extents = [int(Block(tensors, sizes).value(loop.extent)) for loop in (column, row, thread)]
    for j, i in np.ndindex(*extents[:2]):
        block = WarpsBlock(tensors, sizes)
        block.threads, block.active = extents[2], np.arange(extents[2])
        block.env = {
            column.loop_var: np.asarray(j),
            row.loop_var: np.asarray(i),
            thread.loop_var: block.active,
        }
        block.run(thread.body)
