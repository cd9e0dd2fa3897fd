"""Runs scheduled generic functions on numpy: every launch, and views of parameters.

Kernels for few rows run as `few_rows_on_cpu` has it, all others as `warps_on_cpu`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tvm_ffi
from tvm import s_tir, tirx

from relax_fusion.workload.reference import numpy_dtype

from ..support.generic_cases import SIZES, array, shape_of
from ..support.generic_cases import numpy_dtype as dtype_of
from .few_rows_on_cpu import WarpsBlock
from .nodes import Node
from .warps_on_cpu import ELEMENT, Block, _tag


class Views:
    """What generic kernels have beside those of ours: views, and operands that are computed."""

    views: dict[Any, Any]
    stored: Any = None

    def _DeclBuffer(self, node: Any) -> None:
        self.views[node.buffer] = node.data.args[0]

    def _SBlockRealize(self, node: Any) -> None:
        for axis, value in zip(node.block.iter_vars, node.iter_values, strict=True):
            self.env[axis.var] = self.value(value)
        super()._SBlockRealize(node)

    def _IfThenElse(self, node: Any) -> None:
        everyone = self.active
        inside = np.broadcast_to(self.value(node.condition), everyone.shape)
        for chosen, case in ((inside, node.then_case), (~inside, node.else_case)):
            self.active = everyone[chosen]
            if len(self.active) and case is not None:
                self.run(case)
        self.active = everyone

    def _tensor(self, buffer: Any) -> np.ndarray:
        return super()._tensor(self.views.get(buffer, buffer))

    def _offset(self, buffer: Any, indices: Any) -> Any:
        flat = super()._offset(buffer, indices)
        if buffer not in self.views:
            return flat
        if len(buffer.ty.strides):  # of a matrix, the last of which is 1
            width = int(self.value(buffer.ty.shape[-1]))
            flat = flat // width * self.value(buffer.ty.strides[0]) + flat % width
        return flat + self.value(buffer.ty.elem_offset)

    def _LShift(self, node: Any) -> Any:
        return self._bits(np.left_shift, node)

    def _RShift(self, node: Any) -> Any:
        return self._bits(np.right_shift, node)

    def _BitwiseAnd(self, node: Any) -> Any:
        return self._bits(np.bitwise_and, node)

    def _BitwiseOr(self, node: Any) -> Any:
        return self._bits(np.bitwise_or, node)

    def _bits(self, op: Any, node: Any) -> Any:
        dtype = numpy_dtype(str(node.ty.dtype))
        return op(*(np.asarray(self.value(v)).astype(dtype) for v in (node.a, node.b)))

    def _FloatImm(self, node: Any) -> Any:
        return np.asarray(node.value, numpy_dtype(str(node.ty.dtype)))

    def _Call(self, node: Any) -> Any:
        name = str(node.op.name).removeprefix("tirx.")
        if name.startswith("ptx.fma"):
            return self._fused(node.args)
        if name.startswith("ptx.lop3"):
            a, b, c = (np.broadcast_to(self.value(v), self.active.shape) for v in node.args[1:4])
            assert int(node.args[4]) == 0xEA
            return self._set(node.args[0], a & b | c)
        if name.startswith("ptx.prmt"):
            return self._permuted(node.args)
        if name.startswith("ptx.st"):
            return self._store_shared(node.args)
        if name.startswith("ptx.ld") and "global" in _texts(node.args):
            return self._load_words(node.args)
        if name == "ptx.cvt_f16x2_f8x2" and "e4m3x2" in _texts(node.args):
            codes = np.broadcast_to(self.value(node.args[1]), self.active.shape)
            numbers = codes.astype(np.uint16).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
            return self._set(node.args[0], numbers.view(np.uint32))
        if name.endswith("reinterpret"):
            value, dtype = np.asarray(self.value(node.args[0])), numpy_dtype(str(node.ty.dtype))
            pairs = (2,) if value.dtype.itemsize < dtype.itemsize else ()
            whole = np.ascontiguousarray(np.broadcast_to(value, (*self.active.shape, *pairs)))
            return whole.view(dtype)[..., 0] if pairs else whole.view(dtype)
        return super()._Call(node)

    def mma(self, name: str, args: Any) -> None:
        if not len(self.shared):  # of a kernel that has none
            self.shared = np.zeros(0, _half(args))
        super().mma(name, args)

    def call_griddepcontrol(self, args: Any) -> None:
        """Kernels run one after the other."""
        self.waited = True

    def call_tvm_thread_invariant(self, args: Any) -> Any:
        return self.value(args[0])

    def _load_words(self, args: Any) -> None:
        """Load 16 bytes of a tensor into four registers."""
        load = args[4].args[0]
        first = np.broadcast_to(self._offset(load.source, load.indices), self.active.shape)
        assert (first * ELEMENT % 16 == 0).all(), "a load must be aligned"
        values = self._tensor(load.source)[first[:, None] + np.arange(16 // ELEMENT)]
        words = np.ascontiguousarray(values).view(np.uint32)
        for word, target in enumerate(args[:4]):
            self._set(target, words[:, word])

    def _set(self, target: Any, value: Any) -> None:
        self.private[target.source][self.active, self.value(target.indices[0])] = value

    def _fused(self, args: Any) -> None:
        half = _half(args)
        registers = [np.broadcast_to(self.value(a), self.active.shape) for a in args[1:4]]
        a, b, c = (np.ascontiguousarray(r).view(half).astype(np.float64) for r in registers)
        self._set(args[0], (a * b + c).astype(half).view(np.uint32))

    def _permuted(self, args: Any) -> None:
        low, high, selector = (np.broadcast_to(self.value(a), self.active.shape) for a in args[1:4])
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        result = np.zeros(self.active.shape, np.uint64)
        for byte in range(4):
            choice = selector.astype(np.uint64) >> np.uint64(4 * byte) & np.uint64(7)
            result |= (both >> choice * np.uint64(8) & np.uint64(255)) << np.uint64(8 * byte)
        self._set(args[0], result.astype(np.uint32))

    def _store_shared(self, args: Any) -> None:
        """Store 16 bytes to shared memory, which are seen behind a barrier."""
        to = np.asarray(self.value(args[0])).astype(int)
        assert (to % 16 == 0).all(), "a store must be aligned"
        at = to[:, None] // ELEMENT + np.arange(16 // ELEMENT)
        assert len(np.unique(at)) == at.size, "two stores meet"
        lines = np.sort(to.reshape(-1, 8) // 16 % 8, -1)
        assert (lines == np.arange(8)).all(), "stores share a bank"
        assert (self.read[at] < self.epoch).all(), "a store overwrites what may still be read"
        assert not self.busy[at].any(), "a store overwrites what is being multiplied"
        words = np.stack([np.broadcast_to(self.value(a), to.shape) for a in args[1:5]], -1)
        self.shared[at] = np.ascontiguousarray(words.astype(np.uint32)).view(self.shared.dtype)
        self.landed[at], self.arrived[at], self.fenced[at] = self.epoch, True, False
        if self.stored is not None:
            self.stored[at] = self.met


def _texts(args: Any) -> list[str]:
    return [str(a.value) for a in args if a.kind == "StringImm"]


def _half(args: Any) -> Any:
    """Return the element type that an instruction names."""
    brain = any(text.startswith("bf16") for text in _texts(args))
    return numpy_dtype("bfloat16" if brain else "float16")


class ViewsBlock(Views, Block):
    pass


class ViewsWarpsBlock(Views, WarpsBlock):
    pass


def run_generic(func: tirx.PrimFunc, like: tirx.PrimFunc) -> tuple[list[np.ndarray], np.ndarray]:
    """Run a scheduled function; return its inputs and its result.  `like` has its signature."""
    *ins, result = like.params
    arrays = [array(shape_of(p), str(p.ty.dtype), seed) for seed, p in enumerate(ins)]
    out = np.full(shape_of(result), np.nan, dtype_of(str(result.ty.dtype)))
    flat = [a.copy().reshape(-1) for a in arrays] + [out.reshape(-1)]
    tensors = {p.name: a for p, a in zip(func.params, flat, strict=True)}
    Launches(tensors).run(Node(func.body))
    return arrays, out


class Launches:
    """Walks over host code, and runs the thread blocks of every launch."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.host = ViewsBlock(tensors, SIZES)
        self.host.views = {}

    def run(self, node: Node) -> None:
        if node.kind == "SeqStmt":
            for statement in node.seq:
                self.run(statement)
        elif node.kind == "For" and _tag(node) == "threadIdx.x":
            self._block(node)
        elif node.kind == "For":
            for i in range(int(self.host.value(node.extent))):
                self.host.env[node.loop_var] = np.asarray(i)
                self.run(node.body)
        elif node.kind == "SBlockRealize":
            for axis, value in zip(node.block.iter_vars, node.iter_values, strict=True):
                self.host.env[axis.var] = self.host.value(value)
            for buffer in node.block.alloc_buffers:
                size = int(np.prod([int(d) for d in buffer.ty.shape]))
                empty = np.full(size, np.nan, numpy_dtype(str(buffer.ty.dtype)))
                self.tensors.setdefault(buffer.name, empty)
            self.run(node.block.body)
        elif node.kind == "IfThenElse":
            case = node.then_case if self.host.value(node.condition) else node.else_case
            if case is not None:
                self.run(case)
        else:
            self.host.run(node)

    def _block(self, thread: Node) -> None:
        names: list[str] = []

        def note(block: s_tir.SBlock) -> None:
            names.extend(buffer.name for buffer in block.alloc_buffers)

        tvm_ffi.structural_walk(thread.node, (s_tir.SBlock, note))
        few = "shared_float32" in names  # where warps add up their sums
        block = (ViewsWarpsBlock if few else ViewsBlock)(self.tensors, SIZES)
        block.threads = int(thread.extent)
        block.active = np.arange(block.threads)
        block.views = self.host.views
        block.env = {**self.host.env, thread.loop_var: block.active}
        block.run(thread.body)
