"""Runs warp-specialised Gluon kernels on numpy arrays: a thread for each partition of a program.

Triton's interpreter does not know Gluon.  Here a kernel's functions are run as plain Python, in a
world where Gluon's names stand for what follows.  Barriers block, and time out.  Matrix
instructions read shared memory when they are waited for, and shared memory is NaN at first, so a
tile that is read before it has come, or given back before it has been read, shows in the results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from triton.language import constexpr
from triton.runtime.jit import ConstexprFunction, JITFunction

TIMEOUT_S = 10.0
HERE = threading.local()
"""The place of a thread's program, and the matrix instructions that it has not waited for."""


class Values(np.ndarray):
    """A tensor or a scalar of a kernel."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Keep scalars what they are."""
        return np.asarray(array).view(Values)

    @property
    def type(self) -> Any:
        return ANY

    def to(self, dtype: Any) -> Values:
        return self.astype(dtype)

    def permute(self, order: Sequence[int]) -> Values:
        return self.transpose(order)


def values(x: Any) -> Values:
    return np.asarray(x).view(Values)


class Anything:
    """A layout, and all that is asked of it."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return self


ANY = Anything()


@dataclass
class Pointer:
    """Addresses of elements of a flat array."""

    array: np.ndarray
    offsets: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.offsets)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.array, self.offsets + np.asarray(more, np.int64))

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.array, self.offsets[key])

    def chosen(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return offsets and mask of one shape, and check that those of the mask are inside."""
        at, wanted = np.broadcast_arrays(np.asarray(self.offsets), True if mask is None else mask)
        inside = (at >= 0) & (at < self.array.size)
        assert np.all(inside | ~wanted), "an address outside of the tensor"
        return at, wanted


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Values:
    at, wanted = pointer.chosen(mask)
    return values(
        np.where(wanted, pointer.array[np.where(wanted, at, 0)], pointer.array.dtype.type(other))
    )


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, wanted = pointer.chosen(mask)
    pointer.array[at[wanted]] = np.broadcast_to(value, at.shape)[wanted]


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def update(self, arrivals: int, more_bytes: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += more_bytes
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any, pred: Any = True) -> None:
        with self.changed:
            if pred and not self.changed.wait_for(lambda: self.phase & 1 != parity, TIMEOUT_S):
                raise TimeoutError("a barrier never opened")


@dataclass
class Memory:
    """A part of shared memory: an array."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def index(self, i: Any) -> Any:
        return Memory(self.array[int(i)])

    def slice(self, start: int, length: int, dim: int) -> Memory:
        return Memory(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def store(self, value: Values) -> None:
        assert value.shape == self.shape
        self.array[...] = value

    def load(self, layout: Any) -> Values:
        return values(self.array.copy())

    def reshape(self, shape: Sequence[int]) -> Memory:
        return Memory(self.array.reshape(shape))

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.array.transpose(order))


class Barriers:
    """Some barriers in shared memory."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if dtype is np.int64:
        return Barrier() if len(shape) == 1 else Barriers(shape[0])
    return Memory(np.full(shape, np.nan, dtype))


@dataclass
class Map:
    """A tensor map of ``[batch, head, row, feature]``."""

    array: np.ndarray
    block_shape: tuple[int, ...]
    layout: Any = ANY

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def copy_tile(desc: Map, where: Sequence[Any], barrier: Barrier, tile: Memory) -> None:
    b, n, row, feature = (int(x) for x in where)
    part = desc.array[
        b, n, row : row + desc.block_shape[2], feature : feature + desc.block_shape[3]
    ]
    tile.array[...] = 0
    tile.array[0, 0, : part.shape[0], : part.shape[1]] = part
    barrier.update(0, -tile.array.nbytes)


@dataclass
class Product:
    """A matrix instruction under way."""

    left: Any
    right: Memory
    acc: Any

    def __post_init__(self) -> None:
        HERE.products.append(self)

    def finish(self) -> None:
        left = self.left.array if isinstance(self.left, Memory) else self.left
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc  # they end in order
        self.value = values(acc + left.astype(np.float32) @ self.right.array.astype(np.float32))


def multiply(a: Any, b: Memory, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    return Product(a, b, acc if use_acc else np.float32(0))


def multiply_wait(left: int, deps: list[Any]) -> Any:
    done = HERE.products[: len(HERE.products) - left]
    del HERE.products[: len(done)]
    for product in done:
        product.finish()
    found = [d.value if isinstance(d, Product) else d for d in deps]
    return found[0] if len(found) == 1 else found


def specialize(partitions: Any, warps: Any, registers: Any) -> None:
    """Run functions at the same time, as warp groups of this thread's program."""
    program, errors = HERE.program, []

    def run(function: Callable[..., None], args: Any) -> None:
        HERE.program, HERE.products = program, []
        try:
            with np.errstate(all="ignore"):
                function(*args)
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=run, args=p, daemon=True) for p in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def minimum(a: Any, b: Any, propagate_nan: Any = False) -> Values:
    return values(np.minimum(a, b) if propagate_nan else np.fmin(a, b))


GLUON = SimpleNamespace(
    int32=np.int32,
    int64=np.int64,
    float32=np.float32,
    constexpr=lambda x: x,
    program_id=lambda axis: values(HERE.program[0][axis]),
    num_programs=lambda axis: values(HERE.program[1][axis]),
    num_warps=lambda: 4,
    static_range=range,
    static_assert=lambda *args: None,
    arange=lambda start, stop, layout: values(np.arange(start, stop, dtype=np.int32)),
    zeros=lambda shape, dtype, layout: values(np.zeros(shape, dtype)),
    full=lambda shape, value, dtype, layout: values(np.full(shape, value, dtype)),
    convert_layout=lambda x, layout: x,
    where=lambda c, a, b: values(np.where(c, a, b)),
    minimum=minimum,
    maximum=lambda a, b: values(np.fmax(a, b)),
    PropagateNan=SimpleNamespace(ALL=True),
    max=lambda x, axis: values(np.fmax.reduce(x, axis)),
    sum=lambda x, axis: values(np.sum(x, axis, dtype=np.float32)),
    exp2=lambda x: values(np.exp2(x)),
    expand_dims=lambda x, axis: np.expand_dims(x, axis),
    reshape=lambda x, shape: values(x).reshape(shape),
    split=lambda x: (x[..., 0], x[..., 1]),
    join=lambda a, b: values(np.stack(np.broadcast_arrays(a, b), -1)),
    load=load,
    store=store,
    allocate_shared_memory=allocate,
    warp_specialize=specialize,
    barrier=lambda: None,
    NVMMADistributedLayout=lambda version, warps, shape: SimpleNamespace(warps_per_cta=warps),
    DotOperandLayout=ANY,
    SliceLayout=ANY,
    BlockedLayout=ANY,
    DistributedLinearLayout=ANY,
    SharedLinearLayout=ANY,
    SwizzledSharedLayout=ANY,
)
MBARRIER = SimpleNamespace(
    MBarrierLayout=ANY,
    init=lambda barrier, count: barrier.init(count),
    expect=lambda barrier, size: barrier.update(1, size),
    arrive=lambda barrier, count: barrier.update(count, 0),
    wait=lambda barrier, parity, pred=True: barrier.wait(parity, pred),
)
WORLD = {
    "gl": GLUON,
    "tl": GLUON,
    "mbarrier": MBARRIER,
    "copy_tile": copy_tile,
    "barrier": lambda: None,
    "fence_async_shared": lambda: None,
    "mma_v2": lambda a, b, acc: acc + a.astype(np.float32) @ b.astype(np.float32),
    "warpgroup_mma": multiply,
    "warpgroup_mma_wait": multiply_wait,
}


def names_in(code: CodeType) -> set[str]:
    """Return the global names of a function, those inside of its comprehensions included."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def plain(x: Any, done: dict[int, Any]) -> Any:
    """Return a function or constant of a kernel's module for this world."""
    if isinstance(x, constexpr):
        return x.value
    if not isinstance(x, JITFunction | ConstexprFunction):
        return x
    if id(x) not in done:
        names: dict[str, Any] = {}
        defaults = tuple(plain(value, done) for value in x.fn.__defaults__ or ())
        done[id(x)] = FunctionType(x.fn.__code__, names, x.__name__, defaults)
        outer = x.fn.__globals__
        for name in outer.keys() & names_in(x.fn.__code__):
            names[name] = WORLD[name] if name in WORLD else plain(outer[name], done)
    return done[id(x)]


def launch(kernel: JITFunction, grid: int | tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Run a kernel, one program after the other."""
    function = plain(kernel, {})
    for program in np.ndindex(grid):
        HERE.program = (program, np.atleast_1d(grid))
        with np.errstate(all="ignore"):
            function(**arguments)
