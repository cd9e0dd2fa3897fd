"""Runs the kernels for few rows on numpy, as `warps_on_cpu` does the others.

Here each warp has a part of shared memory to itself: what a copy brought is seen behind the wait
and a barrier of the warp, and only by the warp that asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Barrier
from typing import Any

import numpy as np

from .matrices_on_cpu import is_text
from .warps_on_cpu import ELEMENT, LANES, Block


class WarpsBlock(Block):
    """One thread block, whose warps meet only to add up what they have.

    Its shared memory is one buffer of float32, of which copies take the bytes.
    """

    def __init__(
        self,
        tensors: dict[str, np.ndarray],
        sizes: dict[str, int],
        cluster: Sequence[Block] = (),
        meeting: Barrier | None = None,
    ) -> None:
        super().__init__(tensors, sizes, cluster, meeting)
        self.met = 1
        self.waited = False
        self.peers_read = 0  # when last

    def check_end(self) -> None:
        assert self.peers_read < self.met, "a block is gone while it is read"

    def share(self, buffer: Any, size: int, dtype: np.dtype) -> None:
        assert buffer.scope() == "shared.dyn", "TVM would not allow the kernel both"
        assert dtype == np.float32
        self.whole = buffer
        half = self.tensors["x"].dtype if "x" in self.tensors else np.dtype("float16")
        super().share(buffer, size * dtype.itemsize // half.itemsize, half)
        size = self.shared.size
        self.used = np.zeros(size, int)  # when a warp multiplied what is there
        self.written = np.full(size, -1)  # when a sum was put there
        self.stored = np.full(size, -1)  # when threads stored for all

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

    def load_peer(self, args: Any) -> None:
        """Give each thread the sum at its address, in another block of the cluster."""
        target, address = args[0], np.asarray(self.value(args[1])).astype(int)
        at = (address & 0xFFFFFF)[:, None] // ELEMENT + np.arange(2)
        rank = np.unique(address >> 24)
        assert len(rank) == 1
        found = self.cluster[int(rank[0])].sums_at(at, self.met)
        self.peers_read = self.met
        self.private[target.source][self.active, int(target.indices[0])] = found

    def load_shared(self, args: Any) -> None:
        """Give each thread the words at its address: as many as there are registers."""
        *targets, address = [a for a in args if not is_text(a)]
        size = 4 * len(targets)
        address = np.broadcast_to(np.asarray(self.value(address)).astype(int), self.active.shape)
        assert (address % size == 0).all(), "a load must be aligned"
        at = address[:, None] // ELEMENT + np.arange(size // ELEMENT)
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
        for group in np.unique(together := self.active // (LANES // len(targets))):
            lines = np.unique(address[together == group] // size)
            assert len(np.unique(lines % (128 // size))) == len(lines), (
                "different lines share a bank"
            )
        self.read[at], self.used[at] = self.epoch, self.met
        words = np.ascontiguousarray(self.shared[at]).view(np.uint32)
        for word, target in enumerate(targets):
            found = words[:, word].view(self.private[target.source].dtype)
            self.private[target.source][self.active, int(target.indices[0])] = found

    def store_operands(self, address: Any, values: list[Any]) -> np.ndarray:
        if len(values) == 1:
            to = np.broadcast_to(np.asarray(self.value(address)).astype(int), self.active.shape)
            at = to[:, None] // ELEMENT + np.arange(4 // ELEMENT)
            assert len(np.unique(at)) == at.size, "two stores meet"
            words = np.broadcast_to(values[0], to.shape).astype(np.uint32)
            self.shared[at] = np.ascontiguousarray(words)[:, None].view(self.shared.dtype)
            self.stored[at] = self.met
            return at
        at = super().store_operands(address, values)
        self.stored[at] = self.met
        return at
