"""Runs kernels written in Gluon on the CPU, by what their operations mean.

Triton's interpreter does not run Gluon.  Here a kernel is called as plain Python, where tensors are
arrays, shared memory is an array, and copies and products are done at once: layouts mean nothing,
and there are no threads.  So this checks indices, masks and formulas, but no layout, barrier or
race.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

FLOAT32 = np.float32
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def raw(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


class Tensor:
    """A tensor in registers."""

    def __init__(self, values: Any):
        values = np.asarray(values)
        self.values = values.astype(FLOAT32) if values.dtype == np.float64 else values

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.values[index])

    def to(self, dtype: Any) -> Tensor:
        return Tensor(self.values.astype(dtype))

    def reshape(self, shape: Any) -> Tensor:
        return Tensor(self.values.reshape([raw(n) for n in shape]))

    def permute(self, order: Any) -> Tensor:
        return Tensor(self.values.transpose(order))


def array(x: Any) -> Any:
    return x.values if isinstance(x, Tensor) else raw(x)


def elementwise(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = array(self), array(other)
        return Tensor(function(b, a) if swapped else function(a, b))

    return method


for name in (*OPERATORS, *COMPARISONS):
    plain = name.rstrip("_")
    setattr(Tensor, f"__{plain}__", elementwise(getattr(operator, name)))
    if name in OPERATORS:
        setattr(Tensor, f"__r{plain}__", elementwise(getattr(operator, name), swapped=True))


@dataclass(frozen=True)
class Pointer:
    """Pointers into a flat array; reading a place outside of it fails."""

    memory: np.ndarray
    at: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + np.asarray(array(offset)).astype(np.int64))

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        at, wanted = np.broadcast_arrays(self.at, True if mask is None else array(mask))
        assert not np.any(wanted & ((at < 0) | (at >= self.memory.size))), "out of bounds"
        return np.where(wanted, at, 0), wanted


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, values: np.ndarray):
        self.values = values

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)

    def index(self, i: int) -> Shared:
        return Shared(self.values[raw(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        parts: list[Any] = [slice(None)] * self.values.ndim
        parts[dim] = slice(start, start + length)
        return Shared(self.values[tuple(parts)])

    def reshape(self, shape: Any) -> Shared:
        view = self.values.reshape([raw(n) for n in shape])
        assert np.shares_memory(view, self.values)
        return Shared(view)

    def permute(self, order: Any) -> Shared:
        return Shared(self.values.transpose(order))

    def store(self, x: Tensor) -> None:
        assert x.shape == self.shape
        self.values[...] = x.values

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.values.copy())


@dataclass(frozen=True)
class TensorMap:
    """A tensor that is copied in blocks, with zeros for what lies outside of it."""

    tensor: np.ndarray
    block_shape: tuple[int, ...]
    layout: Any = None

    @property
    def dtype(self) -> Any:
        return self.tensor.dtype


def copy_tile(source: TensorMap, start: Any, barrier: Any, target: Shared) -> None:
    begin = [int(array(i)) for i in start]
    ends = [b + n for b, n in zip(begin, source.block_shape, strict=True)]
    part = source.tensor[tuple(map(slice, begin, ends))]
    target.values[...] = 0
    target.values[tuple(slice(n) for n in part.shape)] = part


def multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Tensor:
    out = a.values.astype(FLOAT32) @ b.values.astype(FLOAT32)
    return Tensor(out + acc.values if use_acc else out)


def first_or_all(count: int, deps: list[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    at, wanted = pointer.places(mask)
    return Tensor(np.where(wanted, pointer.memory[at], np.asarray(other, pointer.memory.dtype)))


def store(pointer: Pointer, x: Tensor, mask: Any = None) -> None:
    at, wanted = pointer.places(mask)
    pointer.memory[at[wanted]] = np.broadcast_to(array(x), at.shape)[wanted]


def where(condition: Any, a: Any, b: Any) -> Tensor:
    a, b = array(a), array(b)
    return Tensor(np.where(array(condition), *(x if np.ndim(x) else FLOAT32(x) for x in (a, b))))


def minimum(a: Any, b: Any, propagate_nan: Any = None) -> Tensor:
    return Tensor((np.fmin if propagate_nan is None else np.minimum)(array(a), array(b)))


class Language:
    """What a kernel calls ``gl`` or ``tl``: the real one, but for operations on values."""

    int32, int64, float32 = np.int32, np.int64, FLOAT32
    load, store, where, minimum = map(staticmethod, (load, store, where, minimum))
    static_range = staticmethod(lambda *args: range(*(raw(a) for a in args)))
    arange = staticmethod(
        lambda a, b, layout=None: Tensor(np.arange(raw(a), raw(b), dtype=np.int32))
    )
    zeros = staticmethod(lambda shape, dtype, layout=None: Tensor(np.zeros(shape, dtype)))
    full = staticmethod(lambda shape, x, dtype, layout=None: Tensor(np.full(shape, x, dtype)))
    max = staticmethod(lambda x, axis: Tensor(np.fmax.reduce(x.values, axis)))
    sum = staticmethod(lambda x, axis: Tensor(x.values.sum(axis)))
    exp2 = staticmethod(lambda x: Tensor(np.exp2(array(x))))
    maximum = staticmethod(lambda a, b: Tensor(np.fmax(array(a), array(b))))
    convert_layout = staticmethod(lambda x, layout: x)
    static_assert = staticmethod(lambda condition, message="": None)
    allocate_shared_memory = staticmethod(
        lambda dtype, shape, layout: Shared(np.full([raw(n) for n in shape], 77, dtype))
    )

    def __init__(self, program: tuple[int, ...], warps: int):
        self.program_id = lambda axis: Tensor(np.int32(program[axis]))
        self.num_warps = lambda: warps

    @staticmethod
    def warp_specialize(functions: list[Any], warps: Any, registers: Any) -> None:
        for function, arguments in functions:
            function(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(gl if hasattr(gl, name) else tl, name)


BARRIERS = SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=lambda barrier, count: None,
    expect=lambda barrier, size: None,
    wait=lambda barrier, phase: None,
)
SUBSTITUTES: Mapping[str, Any] = {
    "mbarrier": BARRIERS,
    "copy_tile": copy_tile,
    "barrier": lambda: None,
    "mma_v2": multiply,
    "warpgroup_mma": multiply,
    "warpgroup_mma_wait": first_or_all,
}


def as_python(kernel: JITFunction, language: Language, done: dict[Any, Any]) -> Callable[..., Any]:
    """Return a kernel, and all that it calls, as functions on the types above."""
    if kernel not in done:
        scope = dict(kernel.fn.__globals__)
        done[kernel] = FunctionType(kernel.fn.__code__, scope)
        for name, value in scope.items():
            if name in ("gl", "tl"):
                scope[name] = language
            elif name in SUBSTITUTES:
                scope[name] = SUBSTITUTES[name]
            elif isinstance(value, JITFunction):
                scope[name] = as_python(value, language, done)
            else:
                scope[name] = raw(value)
    return done[kernel]


def run(kernel: JITFunction, grid: tuple[int, ...], warps: int, arguments: dict[str, Any]) -> None:
    """Do the programs of a launch, one after the other."""
    with np.errstate(all="ignore"):
        for program in product(*map(range, grid)):
            as_python(kernel, Language(program, warps), {})(**arguments)
