"""Triton kernels of every kind that the bridge launches, each as a Relax module with a reference.

The modules are built without a GPU: the GPU tests run them, `scripts/export_triton_cases.py` writes
them as libraries for another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl
import tvm
from tvm import ir, relax, tirx
from tvm.script import relax as R
from tvm.target import Target

from relax_fusion.triton_bridge import (
    OUT,
    InOut,
    Out,
    TensorMap,
    Variant,
    Workspace,
    call_tir_extern,
)


@triton.jit
def vector_add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def softmax(x, out, cols, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0) * cols
    scores = tl.load(x + row + i, i < cols, -float("inf"))
    weights = tl.exp(scores - tl.max(scores))
    tl.store(out + row + i, weights / tl.sum(weights), i < cols)


@triton.jit
def tma_matmul(a, b, c, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    sums = tl.zeros((BM, BN), tl.float32)
    for i in range(0, k, BK):
        sums = tl.dot(a.load([m, i]), b.load([n, i]).T, sums)
    c.store([m, n], sums.to(tl.float16))


@triton.jit
def device_tma_scale(x, out, rows, cols, factor, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, cols], [cols, 1], [BM, BN])
    target = tl.make_tensor_descriptor(out, [rows, cols], [cols, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([m, n], source.load([m, n]) * factor)


@triton.jit
def cluster_matmul(a, b, c, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        left = tl.load(a + m[:, None] * k + start + i)
        right = tl.load(b + (start + i)[:, None] * n + j)
        sums = tl.dot(left, right, sums)
    tl.store(c + m[:, None] * n + j, sums.to(tl.float16))


@triton.jit
def no_constexprs(x, out, n):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out + i, 2 * tl.load(x + i, i < n), i < n)


@triton.jit
def double_wide(x, out, n):
    i = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    tl.store(out + i, 2 * tl.load(x + i, i < n), i < n)


@triton.jit
def five_constexprs(
    x,
    out,
    n,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    NEGATE: tl.constexpr,
    ROUND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < n).to(DTYPE) * SCALE
    if NEGATE:
        value = -value
    if ROUND == "floor":
        value = tl.floor(value)
    tl.store(out + i, value, i < n)


@triton.jit
def reverse_after_all(x, out, partial, counter, n, BLOCK: tl.constexpr):
    """Every program writes its block, waits for all, and reads the mirrored one's."""
    p, count = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    tl.store(partial + p * BLOCK + i, tl.load(x + p * BLOCK + i, p * BLOCK + i < n))
    tl.debug_barrier()
    tl.atomic_add(counter, 1.0, sem="release")
    while tl.atomic_add(counter, 0.0, sem="acquire") < count:
        pass
    tl.debug_barrier()
    mirrored = tl.load(partial + (count - 1 - p) * BLOCK + i, volatile=True)
    tl.store(out + p * BLOCK + i, mirrored, p * BLOCK + i < n)


@triton.jit
def dependent_double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + i, 2 * tl.load(x + i, i < n), i < n)


@triton.jit
def least_and_most(x, least, most, cols, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    values = tl.load(x + row * cols + i, i < cols)
    tl.store(least + row, tl.min(tl.where(i < cols, values, float("inf"))))
    tl.store(most + row, tl.max(tl.where(i < cols, values, -float("inf"))))


@triton.jit
def add_to(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def through_workspace(x, out, room, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(room + i, tl.load(x + i, i < n).to(tl.float32), i < n)
    tl.debug_barrier()
    tl.store(out + i, 3 * tl.load(room + i, i < n, volatile=True), i < n)


Emit = Callable[[list[relax.Expr], Any, Target], relax.Expr]


@dataclass(frozen=True)
class Case:
    """One kernel in a module.

    `shapes` are those of the float16 or float32 inputs; "n" stands for the dynamic dim, whose
    value is `size` at run time.  `emit` gets the inputs, n and the target.
    """

    name: str
    shapes: tuple[tuple[int | str, ...], ...]
    emit: Emit
    reference: Callable[..., Sequence[np.ndarray]]
    size: int = 1000
    dtype: str = "float32"
    in_place: bool = False

    def module(self, target: Target, *, static: bool) -> ir.IRModule:
        """Return a module whose main runs the kernel on the doubled inputs, twice, and averages.

        A CUDA graph holds neither a kernel that reads a parameter nor one that makes the result,
        and no kernel alone.
        """
        builder, params, n = self._begin(static)
        with builder.function("main", params):
            with builder.dataflow():
                two, half = relax.const(2, self.dtype), relax.const(0.5, self.dtype)
                runs = []
                for _ in range(2):
                    copies = [builder.emit(relax.op.multiply(p, two)) for p in params]
                    runs.append(self._run(builder, copies, n, target))
                means = [
                    builder.emit(relax.op.multiply(builder.emit(relax.op.add(a, b)), half))
                    for a, b in zip(*runs, strict=True)
                ]
                out = builder.emit_output(relax.Tuple(means))
            builder.emit_func_output(out)
        return builder.get()

    def bare_module(self, target: Target) -> ir.IRModule:
        """Return a module whose main runs the kernel and nothing else."""
        builder, params, n = self._begin(static=False)
        with builder.function("main", params):
            with builder.dataflow():
                out = builder.emit_output(relax.Tuple(self._run(builder, params, n, target)))
            builder.emit_func_output(out)
        return builder.get()

    def _begin(self, static: bool) -> tuple[relax.BlockBuilder, list[relax.Var], Any]:
        n: Any = self.size if static else tirx.Var("n", "int64")
        shapes = [[n if d == "n" else d for d in shape] for shape in self.shapes]
        params = [relax.Var(f"x{i}", R.Tensor(shape, self.dtype)) for i, shape in enumerate(shapes)]
        return relax.BlockBuilder(), params, n

    def _run(
        self, builder: relax.BlockBuilder, args: list[relax.Expr], n: Any, target: Target
    ) -> list[relax.Expr]:
        result = builder.emit(self.emit(args, n, target))
        if not isinstance(result.ty, relax.TupleType):
            return [result]
        count = len(result.ty.fields)
        return [builder.emit(relax.TupleGetItem(result, i)) for i in range(count)]

    def inputs(self, seed: int = 0) -> list[np.ndarray]:
        """Return fresh random inputs; a single number is a counter, and 0."""
        random = np.random.default_rng(seed)
        shapes = [[self.size if d == "n" else d for d in shape] for shape in self.shapes]
        return [
            np.zeros(1, self.dtype)
            if shape == [1]
            else random.normal(size=shape).astype(self.dtype)
            for shape in shapes
        ]

    def check(self, inputs: list[np.ndarray], outputs: Sequence[Any], factor: float) -> None:
        """Compare with the reference, in float64, of `factor` times the inputs.

        One rounding step of the dtype is allowed.
        """
        expected = self.reference(*(factor * x.astype("float64") for x in inputs))
        step = float(np.finfo(self.dtype).eps)
        assert len(outputs) == len(expected)
        for out, want in zip(outputs, expected, strict=True):
            # A row's rounding scales with its largest term, hence the absolute part
            np.testing.assert_allclose(
                out.numpy().astype("float64"),
                want,
                rtol=2 * step,
                atol=2 * step * np.abs(want).max(),
            )


def _blocks(n: Any, block: int) -> tuple[Any]:
    return ((n + (block - 1)) // block,)


def _calls(
    kernel: Any,
    block: int,
    args: Callable[[list[relax.Expr], Any], Any],
    ty: Callable[[list[relax.Expr], Any], Any] = lambda v, n: v[0].ty,
    columns: tuple[int, ...] = (),
    **options: Any,
) -> Emit:
    """Return what emits a call in blocks of n: `args` and `ty` get the inputs and n."""
    options = {"constexprs": {"BLOCK": block}, **options}

    def emit(v: list[relax.Expr], n: Any, target: Target) -> relax.Expr:
        grid = (*_blocks(n, block), *columns)
        return call_tir_extern(kernel, grid, args(v, n), ty(v, n), target=target, **options)

    return emit


def _add(block: int, **options: Any) -> Emit:
    return _calls(vector_add, block, lambda v, n: [*v, OUT, n], **options)


def _variants(v: list[relax.Expr], n: Any, target: Target) -> relax.Expr:
    few = n <= tirx.IntImm("int64", 64) if isinstance(n, ir.Expr) else tirx.const(n <= 64, "bool")
    return call_tir_extern(
        vector_add,
        lambda c: _blocks(n, c["BLOCK"]),
        [v[0], v[1], OUT, n],
        v[0].ty,
        constexprs={"BLOCK": 512},
        variants=[Variant(few, {"BLOCK": 64}, {"num_warps": 1})],
        target=target,
    )


def _in_turn(*emits: Emit) -> Emit:
    """Return what emits calls of which each reads the result of the one in front."""

    def emit(v: list[relax.Expr], n: Any, target: Target) -> relax.Expr:
        value, builder = v[0], relax.BlockBuilder.current()
        for each in emits:
            value = builder.emit(each([value, *v[1:]], n, target))
        return value

    return emit


def _first(both: Emit) -> Emit:
    def emit(v: list[relax.Expr], n: Any, target: Target) -> relax.Expr:
        return relax.TupleGetItem(relax.BlockBuilder.current().emit(both(v, n, target)), 0)

    return emit


def _half(columns: int) -> Callable[[list[relax.Expr], Any], Any]:
    return lambda v, n: R.Tensor((n, columns), "float16")


_SOFTMAX = _calls(softmax, 1, lambda v, n: [*v, OUT, 1000], constexprs={"BLOCK": 1024}, num_warps=8)
_TMA = _calls(
    tma_matmul,
    128,
    lambda v, n: [*(TensorMap(x, (128, 64)) for x in v), TensorMap(OUT, (128, 128)), 512],
    _half(384),
    (384 // 128,),
    constexprs={"BM": 128, "BN": 128, "BK": 64},
    num_warps=8,
    num_stages=4,
)
_DEVICE_TMA = _calls(
    device_tma_scale,
    32,
    lambda v, n: [*v, OUT, n, 256, 3.0],
    columns=(4,),
    constexprs={"BM": 32, "BN": 64},
)
_CLUSTER = _calls(
    cluster_matmul,
    128,
    lambda v, n: [*v, OUT, 256, 128],
    _half(256),
    (256 // 128,),
    constexprs={"BM": 128, "BN": 128, "BK": 32},
    num_ctas=2,
)
DOUBLE_WIDE = _calls(double_wide, 1024, lambda v, n: [*v, OUT, n], constexprs={})
"""Takes tensors of more elements than 32 bits count."""
_NONE = _calls(no_constexprs, 128, lambda v, n: [*v, OUT, n], constexprs={})
FIVE = {"BLOCK": 128, "SCALE": 2.5, "NEGATE": True, "ROUND": "floor", "DTYPE": tl.float32}
_FIVE = _calls(five_constexprs, 128, lambda v, n: {"x": v[0], "out": OUT, "n": n}, constexprs=FIVE)
_COOPERATIVE = _calls(
    reverse_after_all,
    256,
    lambda v, n: [v[0], Out(0), Workspace((_blocks(n, 256)[0] * 256,)), InOut(v[1], 1), n],
    lambda v, n: [x.ty for x in v],
    cooperative=True,
)
_DEPENDENT = _calls(dependent_double, 256, lambda v, n: [*v, OUT, n], dependent_launch=True)
_LEAST_AND_MOST = _calls(
    least_and_most,
    1,
    lambda v, n: [*v, Out(0), Out(1), 100],
    lambda v, n: [R.Tensor((n,), "float32")] * 2,
    constexprs={"BLOCK": 128},
)
_IN_PLACE = _calls(add_to, 256, lambda v, n: [InOut(v[0]), v[1], n])
_WORKSPACE = _calls(through_workspace, 256, lambda v, n: [*v, OUT, Workspace((n,), "float32"), n])


def _softmax_reference(x: np.ndarray) -> list[np.ndarray]:
    import torch

    return [torch.softmax(torch.from_numpy(x), -1).numpy()]


def _reversed_blocks(x: np.ndarray, _counter: np.ndarray) -> list[np.ndarray]:
    padded = np.zeros(-(-x.size // 256) * 256)
    padded[: x.size] = x
    return [padded.reshape(-1, 256)[::-1].reshape(-1)[: x.size]]


CASES = (
    Case("vector_add", (("n",), ("n",)), _add(256), lambda x, y: [x + y]),
    Case("variants_few", (("n",), ("n",)), _variants, lambda x, y: [x + y], size=50),
    Case("variants_many", (("n",), ("n",)), _variants, lambda x, y: [x + y], size=5000),
    Case("softmax", (("n", 1000),), _SOFTMAX, _softmax_reference, size=77),
    Case("tma_matmul", (("n", 512), (384, 512)), _TMA, lambda a, b: [a @ b.T], 256, "float16"),
    Case("device_tma", (("n", 256),), _DEVICE_TMA, lambda x: [3 * x], size=96),
    Case("cluster", (("n", 128), (128, 256)), _CLUSTER, lambda a, b: [a @ b], 256, "float16"),
    Case("no_constexprs", (("n",),), _NONE, lambda x: [2 * x]),
    Case("five_constexprs", (("n",),), _FIVE, lambda x: [np.floor(-2.5 * x)]),
    Case(
        "two_plans",
        (("n",), ("n",)),
        _in_turn(_add(128, num_warps=1), _add(1024, num_warps=8)),
        lambda x, y: [x + y + y],
    ),
    Case("cooperative", (("n",), (1,)), _first(_COOPERATIVE), _reversed_blocks, size=5000),
    Case("dependent", (("n",),), _in_turn(*[_DEPENDENT] * 4), lambda x: [16 * x], size=100000),
    Case("two_outputs", (("n", 100),), _LEAST_AND_MOST, lambda x: [x.min(-1), x.max(-1)], 33),
    Case("in_place", (("n",), ("n",)), _IN_PLACE, lambda x, y: [x + y], in_place=True),
    Case("workspace", (("n",),), _WORKSPACE, lambda x: [3 * x]),
)


def build(mod: ir.IRModule, target: Target, *, graph: bool = False) -> tvm.runtime.Executable:
    """Compile by the pipeline, with CUDA graphs or without."""
    with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": graph}):
        pipeline = relax.get_pipeline("relax_fusion", target=target)
        return tvm.compile(mod, target, relax_pipeline=pipeline)
