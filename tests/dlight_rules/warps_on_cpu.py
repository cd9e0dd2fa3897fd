"""Runs the body of a thread block on numpy: all threads in step, one statement after the other.

What it knows is what the tensor-core kernels are made of, as TIR before lowering.  Memory behaves
as badly as the machine may: where an asynchronous copy is on its way there is NaN (85 where there
are integers); what it brought is seen only behind the wait and a barrier; and to overwrite what
another warp may still be reading is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import erf
from threading import Barrier
from typing import Any

import ml_dtypes
import numpy as np

from relax_fusion.workload.reference import numpy_dtype

from .matrices_on_cpu import LANES, TF32_LOST, Matrices, is_text, words

ELEMENT = 2
"""Bytes of what is in shared memory, in kernels for few rows."""

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "Min": np.minimum,
    "Max": np.maximum,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
    "And": np.logical_and,
    "Or": np.logical_or,
}

BITS = {
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}

INSTRUCTIONS = (
    *("cp_async_", "ldmatrix", "mma", "wgmma", "fence_proxy", "cvt", "fma", "lop3", "prmt"),
    *("ld", "st"),
)
"""What the names of instructions begin with."""


class Block(Matrices):
    """One thread block.

    Parameters
    ----------
    tensors : dict
        Flat arrays for the buffers of the function, by name.
    sizes : dict
        Values of the symbolic sizes, by name.
    cluster : sequence of Block
        All blocks that see one another's shared memory.
    meeting : Barrier
        Of the cluster.
    """

    def __init__(
        self,
        tensors: dict[str, np.ndarray],
        sizes: dict[str, int],
        cluster: Sequence[Block] = (),
        meeting: Barrier | None = None,
    ) -> None:
        self.tensors, self.sizes = tensors, sizes
        self.cluster, self.meeting = cluster, meeting
        self.env: dict[Any, Any] = {}
        self.views: dict[Any, Any] = {}
        self.private: dict[Any, np.ndarray] = {}
        self.threads = 0
        self.active = np.arange(0)
        self.shared = np.zeros(0, np.uint16)
        self.epoch, self.pending, self.groups = 1, [], []
        self.products, self.begun = [], []
        self.open_sums: set[tuple[Any, int]] = set()
        self.entered, self.left = 0, 0

    # --- statements --------------------------------------------------------------------------

    def run_to_the_end(self, node: Any) -> None:
        """Run a whole block; if it fails, those that wait for it do as well."""
        try:
            self.run(node)
        except BaseException:
            self.meeting.abort()
            raise

    def check_end(self) -> None:
        """Check, when all blocks of the cluster have ended, that none did so too early."""
        assert self.left == self.entered, "a block ends while others may read its memory"

    def run(self, node: Any) -> None:
        getattr(self, "_" + node.kind)(node)

    def _SeqStmt(self, node: Any) -> None:
        for statement in node.seq:
            self.run(statement)

    def _AttrStmt(self, node: Any) -> None:
        self.run(node.body)

    def _DeclBuffer(self, node: Any) -> None:
        self.views[node.buffer] = node.data.args[0]

    def _SBlockRealize(self, node: Any) -> None:
        for axis, value in zip(node.block.iter_vars, node.iter_values, strict=True):
            self.env[axis.var] = self.value(value)
        for buffer in node.block.alloc_buffers:
            size = int(np.prod([int(d) for d in buffer.ty.shape]))
            dtype = numpy_dtype(str(buffer.ty.dtype))
            if buffer.scope() == "local":
                self.private[buffer] = np.full((self.threads, size), 77, dtype)
            else:
                self.share(buffer, size, dtype)
        self.run(node.block.body)

    def share(self, buffer: Any, size: int, dtype: np.dtype) -> None:
        """Make shared memory, and what is known of each of its elements."""
        self.shared = np.full(size, _junk(dtype), dtype)
        self.landed, self.owner = np.full(size, self.epoch), np.full(size, -1)
        self.read, self.busy = np.zeros(size, int), np.zeros(size, int)
        self.fenced, self.arrived = np.zeros(size, bool), np.zeros(size, bool)

    def _For(self, node: Any) -> None:
        for i in range(int(self.value(node.extent).flat[0])):
            self.env[node.loop_var] = np.asarray(i)
            self.run(node.body)

    def _IfThenElse(self, node: Any) -> None:
        everyone = self.active
        inside = np.broadcast_to(self.value(node.condition), everyone.shape)
        for chosen, case in ((inside, node.then_case), (~inside, node.else_case)):
            self.active = everyone[chosen]
            if len(self.active) and case is not None:
                self.run(case)
        self.active = everyone

    def _BufferStore(self, node: Any) -> None:
        buffer, value = node.buffer, self.value(node.value)
        at = self._offset(buffer, node.indices)
        if buffer in self.private:
            target = self.private[buffer]
            target[self._own(at), at] = value
        else:
            self._tensor(buffer)[at] = value

    def _Evaluate(self, node: Any) -> None:
        self.value(node.value)

    # --- expressions -------------------------------------------------------------------------

    def value(self, node: Any) -> Any:
        """Return the value of an expression in the active threads."""
        if node.kind in BINARY:
            return BINARY[node.kind](self.value(node.a), self.value(node.b))
        if node.kind in BITS:
            dtype = numpy_dtype(str(node.ty.dtype))
            sides = (np.asarray(self.value(v)).astype(dtype) for v in (node.a, node.b))
            return BITS[node.kind](*sides)
        return getattr(self, "_" + node.kind)(node)

    def _IntImm(self, node: Any) -> Any:
        return node.number

    def _FloatImm(self, node: Any) -> Any:
        return np.asarray(node.value, numpy_dtype(str(node.ty.dtype)))

    def _StringImm(self, node: Any) -> Any:
        return str(node.value)

    def _Var(self, node: Any) -> Any:
        if node in self.env:
            value = self.env[node]
            return value[self.active] if value.ndim else value
        return np.asarray(self.sizes[node.name])

    def _Cast(self, node: Any) -> Any:
        dtype = numpy_dtype(str(node.ty.dtype).split("x")[0])
        return np.asarray(self.value(node.value)).astype(dtype)

    def _Select(self, node: Any) -> Any:
        cases = (node.condition, node.true_value, node.false_value)
        return np.where(*(self.value(case) for case in cases))

    def _Not(self, node: Any) -> Any:
        return ~self.value(node.a)

    def _Ramp(self, node: Any) -> Any:
        lanes = np.arange(int(node.lanes)) * self.value(node.stride)
        return np.broadcast_to(self.value(node.base), self.active.shape)[:, None] + lanes

    def _TensorLoad(self, node: Any) -> Any:
        at = self._offset(node.source, node.indices)
        if node.source in self.private:
            assert not self.open_sums or (node.source, int(at)) not in self.open_sums
            return self.private[node.source][self._own(at), at]
        return self._tensor(node.source)[at]

    def _Call(self, node: Any) -> Any:
        name = node.op.name.removeprefix("tirx.").removeprefix("prim.").removeprefix("ptx.")
        if name == "reinterpret":
            return self._reinterpreted(node)
        for prefix in INSTRUCTIONS:
            if name.startswith(prefix):
                return getattr(self, prefix.rstrip("_"))(name, node.args)
        return getattr(self, "call_" + name.removesuffix("_vec").replace(".", "_"))(node.args)

    def call_if_then_else(self, args: Any) -> Any:
        everyone = self.active
        inside = np.broadcast_to(self.value(args[0]), everyone.shape)
        found: list[Any] = []
        for chosen, arg in ((inside, args[1]), (~inside, args[2])):
            self.active = everyone[chosen]
            found.append(np.broadcast_to(self.value(arg), self.active.shape))
        self.active = everyone
        result = np.empty(everyone.shape, found[0].dtype)
        result[inside], result[~inside] = found
        return result

    def call_tvm_thread_invariant(self, args: Any) -> Any:
        return self.value(args[0])

    def call_griddepcontrol(self, args: Any) -> None:
        """Kernels run one after the other."""

    def call_exp(self, args: Any) -> Any:
        return np.exp(self.value(args[0]))

    def call_tvm_warp_shuffle_xor(self, args: Any) -> Any:
        self._whole_warps()
        lanes = np.arange(LANES) ^ int(args[2])
        return self.value(args[1]).reshape(-1, LANES)[:, lanes].reshape(-1)

    def _whole_warps(self) -> None:
        warps = self.active.reshape(-1, LANES)
        assert (warps == warps[:, :1] + np.arange(LANES)).all(), "some lanes of a warp are missing"

    def call_erf(self, args: Any) -> Any:
        return np.vectorize(erf, otypes=[np.float32])(self.value(args[0]))

    def call_cuda_cvta_generic_to_shared(self, args: Any) -> Any:
        return np.asarray(0)

    def call_cuda_func_call(self, args: Any) -> None:
        """Take note that a sum may be read: the products are waited for."""
        assert str(args[0].value).startswith("after_wait") and not self.products
        self.open_sums.discard((args[1].source, int(args[1].indices[0])))

    def call_addr(self, args: Any) -> Any:
        return self.value(args[0]) + self.value(args[1])

    def _reinterpreted(self, node: Any) -> Any:
        """Take bits for others; two halves are a word, and a word is two halves."""
        value, dtype = np.asarray(self.value(node.args[0])), str(node.ty.dtype).removesuffix("x2")
        found = numpy_dtype(dtype)
        if value.dtype.itemsize < found.itemsize:
            value = np.broadcast_to(value, (*self.active.shape, 2))
            return np.ascontiguousarray(value).view(found)[..., 0]
        value = np.ascontiguousarray(np.broadcast_to(value, self.active.shape))
        return (value[:, None] if value.dtype.itemsize > found.itemsize else value).view(found)

    def registers(self, args: Any) -> list[np.ndarray]:
        """Return words of all active threads."""
        found = (np.broadcast_to(self.value(a), self.active.shape) for a in args)
        return [np.ascontiguousarray(values) for values in found]

    def cvt(self, name: str, args: Any) -> None:
        """Round to tf32, ties away from zero; or make two halves of two bytes."""
        (source,) = self.registers(args[1:2])
        if "e4m3x2" in words(args):
            numbers = source.astype(np.uint16).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
            self.set_register(args[0], numbers.view(np.uint32))
            return
        assert "rna" in words(args)
        self.set_register(args[0], (source.view(np.uint32) + (TF32_LOST + 1) // 2) & ~TF32_LOST)

    def fma(self, name: str, args: Any) -> None:
        half = half_of(args)
        a, b, c = (r.view(half).astype(np.float64) for r in self.registers(args[1:4]))
        self.set_register(args[0], (a * b + c).astype(half).view(np.uint32))

    def lop3(self, name: str, args: Any) -> None:
        a, b, c = self.registers(args[1:4])
        assert int(args[4]) == 0xEA
        self.set_register(args[0], a & b | c)

    def prmt(self, name: str, args: Any) -> None:
        """Pick four bytes of two words."""
        low, high, selector = (r.astype(np.uint64) for r in self.registers(args[1:4]))
        both, result = low | high << np.uint64(32), np.zeros(self.active.shape, np.uint64)
        for byte in map(np.uint64, range(4)):
            choice = selector >> np.uint64(4) * byte & np.uint64(7)
            result |= (both >> choice * np.uint64(8) & np.uint64(255)) << np.uint64(8) * byte
        self.set_register(args[0], result.astype(np.uint32))

    def mma(self, name: str, args: Any) -> None:
        if not len(self.shared):  # of a kernel that has none
            self.shared = np.zeros(0, half_of(args))
        super().mma(name, args)

    def set_register(self, target: Any, value: Any) -> None:
        """Store what an instruction leaves in a register of the active threads."""
        self.private[target.source][self.active, int(self.value(target.indices[0]))] = value

    def call_tvm_storage_sync(self, args: Any) -> None:
        assert len(self.active) == self.threads
        self.epoch += 1

    # --- memory ------------------------------------------------------------------------------

    def _own(self, at: Any) -> Any:
        """Return the active threads, in the shape of what they index."""
        return self.active[:, None] if np.ndim(at) == 2 else self.active

    def _tensor(self, buffer: Any) -> np.ndarray:
        return self.tensors[self.views.get(buffer, buffer).name]

    def _offset(self, buffer: Any, indices: Any) -> Any:
        """Return flat offsets, and fail beyond the ends of a dimension."""
        flat = np.asarray(0)
        for index, size in zip(indices, buffer.ty.shape, strict=True):
            at, limit = np.asarray(self.value(index)), self.value(size)
            inside = (at >= 0) & (at < limit)
            assert inside.all() if at.ndim else inside, f"{buffer.name}[{index}] is outside"
            flat = flat * limit + at if flat.ndim >= at.ndim else flat[..., None] * limit + at
        if buffer not in self.views:
            return flat
        if len(buffer.ty.strides):  # of a matrix, the last of which is 1
            width = int(self.value(buffer.ty.shape[-1]))
            flat = flat // width * self.value(buffer.ty.strides[0]) + flat % width
        return flat + self.value(buffer.ty.elem_offset)

    def cp_async(self, name: str, args: Any) -> None:
        if name.endswith("commit_group"):
            self.groups.append(self.pending)
            self.pending = []
        elif name.endswith("wait_group"):
            keep = int(args[0])
            done, self.groups = (
                self.groups[: len(self.groups) - keep],
                self.groups[len(self.groups) - keep :],
            )
            for group in done:
                for at, values in group:
                    self.shared[at], self.landed[at] = values, self.epoch
                    self.arrived[at] = True
        else:
            self._copy(args)

    def _copy(self, args: Any) -> None:
        to = np.asarray(self.value(args[0])).astype(int)
        load, size, element = args[1].args[0], int(args[2]), self.shared.itemsize
        assert (to % size == 0).all(), "an asynchronous copy must be aligned"
        lanes = np.arange(size // element)
        at = to[:, None] // element + lanes
        wanted = np.full(len(self.active), size)
        if not is_text(args[3]):
            wanted = np.broadcast_to(self.value(args[3]).astype(int), wanted.shape)
        values = np.zeros(at.shape, self.shared.dtype)
        everyone = self.active
        self.active = everyone[wanted > 0]
        assert set(wanted) <= {0, size}
        if len(self.active):
            source = self._tensor(load.source)
            first = np.broadcast_to(self._offset(load.source, load.indices), self.active.shape)
            first = first * source.itemsize
            assert (first % size == 0).all(), "an asynchronous copy must be aligned"
            halves = source.reshape(-1).view(self.shared.dtype)
            values[wanted > 0] = halves[first[:, None] // element + lanes]
        self.active = everyone
        own = self.owner[at] == self.active[:, None]
        assert (own | (self.read[at] < self.epoch)).all(), (
            "a copy overwrites what may still be read"
        )
        assert not self.busy[at].any(), "a copy overwrites what is being multiplied"
        self.shared[at], self.owner[at] = _junk(self.shared.dtype), self.active[:, None]
        self.fenced[at] = self.arrived[at] = False
        self.pending.append((at, values))

    def fence_proxy(self, name: str, args: Any) -> None:
        """Let what has arrived be seen by instructions that read memory by themselves."""
        self.fenced[self.arrived] = True

    # --- clusters ----------------------------------------------------------------------------

    def call_barrier_cluster_arrive(self, args: Any) -> None:
        """Count arrivals."""
        assert len(self.active) == self.threads
        assert "release" in words(args)
        self.entered += 1

    def call_barrier_cluster_wait(self, args: Any) -> None:
        """Meet all others, who have arrived as often."""
        assert len(self.active) == self.threads
        assert "acquire" in words(args)
        self.left += 1
        assert self.left == self.entered
        self.meeting.wait(timeout=60)
        self.epoch += 1

    def call_mapa_u32(self, args: Any) -> None:
        """Return an address that tells the block as well."""
        address = self.value(args[1]).astype(np.uint32) | self.value(args[2]) + 1 << 24
        self.set_register(args[0], address)

    def st(self, name: str, args: Any) -> None:
        """Store words: rounded copies in place, operands that were computed, or sums."""
        address, *values = [a for a in args if not is_text(a)]
        found = [self.value(value) for value in values]
        if any(load.source.name == "words" for load in values if hasattr(load, "source")):
            self.store_copies(address, found)
        elif self.shared.itemsize == ELEMENT and found[0].dtype == np.uint32:
            self.store_operands(address, found)
        else:
            self._store_sums(np.asarray(self.value(address)).astype(int) // 4, found)

    def store_operands(self, address: Any, values: list[Any]) -> np.ndarray:
        """Store 16 bytes, which are seen behind a barrier; return where."""
        to = np.asarray(self.value(address)).astype(int)
        assert (to % 16 == 0).all(), "a store must be aligned"
        at = to[:, None] // ELEMENT + np.arange(16 // ELEMENT)
        assert len(np.unique(at)) == at.size, "two stores meet"
        lines = np.sort(to.reshape(-1, 8) // 16 % 8, -1)
        assert (lines == np.arange(8)).all(), "stores share a bank"
        assert (self.read[at] < self.epoch).all(), "a store overwrites what may still be read"
        assert not self.busy[at].any(), "a store overwrites what is being multiplied"
        both = np.stack([np.broadcast_to(v, to.shape) for v in values], -1).astype(np.uint32)
        self.shared[at] = np.ascontiguousarray(both).view(self.shared.dtype)
        self.landed[at], self.arrived[at], self.fenced[at] = self.epoch, True, False
        return at

    def _store_sums(self, at: np.ndarray, values: list[Any]) -> None:
        """Store sums in shared memory, where no operands are needed any more."""
        assert not self.busy.any() and not self.pending and not any(self.groups)
        assert (self.read < self.epoch).all(), "sums overwrite what may still be read"
        assert len(np.unique(at)) == len(at)
        for i, sums in enumerate(values):
            self.shared.view(sums.dtype)[at + i] = sums

    def ld(self, name: str, args: Any) -> None:
        """Load words of a tensor, of this block's memory, or of another one's of the cluster."""
        if "global" in words(args):
            self._load_words(args)
        elif "shared::cluster" in words(args):
            self.load_peer(args)
        else:
            self.load_shared(args)

    def _load_words(self, args: Any) -> None:
        """Load 16 bytes of a tensor into four registers."""
        load = args[4].args[0]
        first = np.broadcast_to(self._offset(load.source, load.indices), self.active.shape)
        assert (first * ELEMENT % 16 == 0).all(), "a load must be aligned"
        values = self._tensor(load.source)[first[:, None] + np.arange(16 // ELEMENT)]
        found = np.ascontiguousarray(values).view(np.uint32)
        for word, target in enumerate(args[:4]):
            self.set_register(target, found[:, word])

    def load_peer(self, args: Any) -> None:
        """Load sums from the shared memory of a block of the cluster."""
        *targets, address = [a for a in args if not is_text(a)]
        at = np.asarray(self.value(address)).astype(int)
        assert (at >> 24).min() == (at >> 24).max() > 0, "the address is of no block"
        peer = self.cluster[int(at[0] >> 24) - 1]
        assert peer.left >= self.left > 0, "sums are read before they must be there"
        for i, target in enumerate(targets):
            dtype = self.private[target.source].dtype
            self.set_register(target, peer.shared.view(dtype)[(at & 0xFFFFFF) // 4 + i])


def half_of(args: Any) -> np.dtype:
    """Return the element type that an instruction names."""
    brain = any(word.startswith("bf16") for word in words(args))
    return numpy_dtype("bfloat16" if brain else "float16")


def _junk(dtype: np.dtype) -> float:
    """Return what is in memory that has not been written."""
    return 85 if dtype.kind in "iu" else np.nan
