"""Runs the kernels for few rows on numpy, as `warps_on_cpu` does the others.

Here each warp has a part of shared memory to itself: what a copy brought is seen behind the wait
and a barrier of the warp, and only by the warp that asked for it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx

from relax_fusion.workload.reference import numpy_dtype

from .nodes import Node
from .warps_on_cpu import ELEMENT, LANES, Block, _kernel_of, _tag

BITS = {
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}


class WarpsBlock(Block):
    """One thread block, whose warps meet only to add up what they have.

    Its shared memory is one buffer of float32, of which copies take the bytes.  ``peers`` are the
    blocks of its cluster, each in a thread of Python, and `meeting` the barrier of all.
    """

    def __init__(self, tensors: dict[str, np.ndarray], sizes: dict[str, int]) -> None:
        super().__init__(tensors, sizes)
        self.peers, self.meeting = [self], Barrier(1)
        self.met = 1
        self.waited = False
        self.peers_read = 0  # when last

    def _SBlockRealize(self, node: Any) -> None:
        for buffer in node.block.alloc_buffers:
            size = int(np.prod([int(d) for d in buffer.ty.shape]))
            dtype = numpy_dtype(str(buffer.ty.dtype))
            if buffer.scope() == "local":
                self.private[buffer] = np.full((self.threads, size), 77, dtype)
                continue
            assert buffer.scope() == "shared.dyn", "TVM would not allow the kernel both"
            assert dtype == np.float32
            self.whole = buffer
            half = self.tensors["x"].dtype if "x" in self.tensors else np.float16
            self.shared = np.full(size, np.nan, np.float32).view(half)
            size = self.shared.size
            self.landed, self.owner = np.full(size, self.epoch), np.full(size, -1)
            self.read, self.busy = np.zeros(size, int), np.zeros(size, int)
            self.fenced, self.arrived = np.zeros(size, bool), np.zeros(size, bool)
            self.used = np.zeros(size, int)  # when a warp multiplied what is there
            self.written = np.full(size, -1)  # when a sum was put there
            self.stored = np.full(size, -1)  # when threads stored for all
        self.run(node.block.body)

    def _halves(self, node: Any, buffer: Any) -> np.ndarray:
        """Return where the halves of what is indexed lie."""
        at = np.broadcast_to(self._offset(buffer, node.indices), self.active.shape)
        return at[:, None] * 2 + np.arange(2)

    def _BufferStore(self, node: Any) -> None:
        if node.buffer is not self.whole:
            super()._BufferStore(node)
            return
        at = self._halves(node, node.buffer)
        assert len(np.unique(at)) == at.size, "two threads write one element"
        assert (self.used[at] < self.met).all(), "another warp may still multiply what is there"
        assert not any(np.isin(at, where).any() for where, _ in self._on_their_way())
        values = np.broadcast_to(self.value(node.value), self.active.shape).astype(np.float32)
        self.shared[at] = np.ascontiguousarray(values)[:, None].view(self.shared.dtype)
        self.written[at] = self.met

    def _on_their_way(self) -> list[Any]:
        return [copy for group in (*self.groups, self.pending) for copy in group]

    def sums_at(self, at: np.ndarray, met: int) -> np.ndarray:
        """Return what threads that have met so often read as float32."""
        assert (self.written[at] < met).all(), "no barrier before a read"
        return np.ascontiguousarray(self.shared[at]).view(np.float32)[:, 0]

    def _TensorLoad(self, node: Any) -> Any:
        if node.source is self.whole:
            return self.sums_at(self._halves(node, node.source), self.met)
        return super()._TensorLoad(node)

    def call_tvm_storage_sync(self, args: Any) -> None:
        super().call_tvm_storage_sync(args)
        self.met += 1

    def call_barrier_cluster_arrive(self, args: Any) -> None:
        assert len(self.active) == self.threads

    def call_barrier_cluster_wait(self, args: Any) -> None:
        assert len(self.active) == self.threads
        self.met += 1
        self.meeting.wait(10)

    def call_griddepcontrol(self, args: Any) -> None:
        assert len(self.active) == self.threads
        self.waited = True

    def call_mapa_u32(self, args: Any) -> None:
        """Note the block in the highest byte of an address."""
        target, address, rank = args[0], self.value(args[1]), int(args[2])
        self.private[target.source][:, int(target.indices[0])] = address + (rank << 24)

    def value(self, node: Any) -> Any:
        if node.kind in BITS:
            dtype = numpy_dtype(str(node.ty.dtype))
            return BITS[node.kind](*(self.value(v).astype(dtype) for v in (node.a, node.b)))
        return super().value(node)

    def _Cast(self, node: Any) -> Any:
        dtype = numpy_dtype(str(node.ty.dtype).split("x")[0])
        return np.asarray(self.value(node.value)).astype(dtype)

    def _Call(self, node: Any) -> Any:
        name = node.op.name.removeprefix("tirx.").removeprefix("prim.").removeprefix("ptx.")
        if name == "reinterpret":
            return self._reinterpreted(node)
        if name.startswith("ld"):
            cluster = "shared::cluster" in _words(node.args)
            return self._load_peer(node.args) if cluster else self._load_shared(node.args)
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
        source = args[1].args[0].source
        assert self.waited or source.name != "x_norm", "rows may not be there yet"
        to = np.asarray(self.value(args[0])).astype(int)
        at = to[:, None] // ELEMENT + np.arange(int(args[2]) // ELEMENT)
        assert len(np.unique(at)) == at.size, "two copies meet"
        lines = to.reshape(-1, 8) // 16 % 8
        assert (np.sort(lines, -1) == np.arange(8)).all(), "a line shares banks"
        assert (self.stored[at] < 0).all(), "a copy overwrites what is kept"
        super()._copy(args)

    def _load_peer(self, args: Any) -> None:
        """Give each thread the sum at its address, in another block of the cluster."""
        target, address = args[0], np.asarray(self.value(args[1])).astype(int)
        at = (address & 0xFFFFFF)[:, None] // ELEMENT + np.arange(2)
        rank = np.unique(address >> 24)
        assert len(rank) == 1
        found = self.peers[int(rank[0])].sums_at(at, self.met)
        self.peers_read = self.met
        self.private[target.source][self.active, int(target.indices[0])] = found

    def _load_shared(self, args: Any) -> None:
        """Give each thread the 16 bytes at its address."""
        targets, address = args[:4], np.asarray(self.value(args[4])).astype(int)
        at = address[:, None] // ELEMENT + np.arange(16 // ELEMENT)
        mine = self.active[:, None] // LANES
        common = self.stored[at] >= 0
        assert (self.stored[at] < self.met).all(), "no barrier behind a store"
        asked = common | (self.owner[at] // LANES == mine)
        assert asked.all(), "a warp reads what it did not ask for"
        own = common | (self.owner[at] == self.active[:, None])
        assert (own | (self.landed[at] < self.epoch)).all(), (
            "what a copy brought is read without a barrier"
        )
        pending = [where for where, _ in self._on_their_way()]
        assert not any(np.isin(at, where).any() for where in pending), "a copy is on its way"
        lines = address.reshape(-1, 8) // 16  # eight threads are served at once
        one, other = lines[:, :, None], lines[:, None]
        assert not ((one != other) & (one % 8 == other % 8)).any(), "different lines share a bank"
        self.read[at], self.used[at] = self.epoch, self.met
        words = np.ascontiguousarray(self.shared[at]).view(np.uint32)
        for word, target in enumerate(targets):
            self.private[target.source][self.active, int(target.indices[0])] = words[:, word]


def run_warps(
    func: tirx.PrimFunc, name: str, tensors: dict[str, np.ndarray], sizes: dict[str, int]
) -> None:
    """Run every thread block of the kernel whose block is called `name`; writes into `tensors`."""
    loops: list[Any] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    grid = [loop for loop in loops if _kernel_of(loop, name) and _tag(loop)]
    body = Node(func.body)
    of = {_tag(loop): body.of(loop) for loop in grid}
    tile, thread = of["blockIdx.x"], of["threadIdx.x"]
    tiles, threads = (int(Block(tensors, sizes).value(e.extent)) for e in (tile, thread))
    cluster = of.get("clusterCtaIdx.y")
    parts = int(cluster.extent) if cluster else 1
    assert not cluster or int(of["blockIdx.y"].extent) == parts
    for index in range(tiles):
        blocks: list[WarpsBlock] = []
        meeting = Barrier(parts)
        for part in range(parts):
            block = WarpsBlock(tensors, sizes)
            block.peers, block.meeting = blocks, meeting
            block.threads, block.active = threads, np.arange(threads)
            block.env = {tile.loop_var: np.asarray(index), thread.loop_var: block.active}
            if cluster:
                block.env[cluster.loop_var] = np.asarray(part)
            blocks.append(block)
        with ThreadPoolExecutor(parts) as pool:
            for done in [pool.submit(block.run, thread.body) for block in blocks]:
                done.result()
        assert all(b.peers_read < b.met for b in blocks), "a block is gone while it is read"


def _words(args: Any) -> set[str]:
    return {str(a.value) for a in args if a.kind == "StringImm"}
