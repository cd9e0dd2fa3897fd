"""PrimFuncs as TVM's legaliser and FuseTIR make them, and how to run one against numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, sym, te, tirx
from tvm.target import Target

from relax_fusion.workload.reference import numpy_dtype

from .quick import loaded, quick, quick_passes

Shape = tuple[int | str, ...]
SIZES = {"b": 3, "s": 5, "t": 7}
OTHER_SIZE = 4
"""Values of the symbolic dimensions: of the tests' own, and of those that a model has."""


@dataclass(frozen=True)
class Input:
    shape: Shape
    dtype: str = "float32"


def symbols() -> dict[str, tirx.Var]:
    return {name: tirx.Var(name, "int64") for name in SIZES}


def module(inputs: Sequence[Input], emit: Callable[..., relax.Expr]) -> tvm.IRModule:
    """Return the Relax module of one expression of the inputs, legalised."""
    names = symbols()
    params = [
        relax.Var(f"x{i}", relax.TensorType([names.get(d, d) for d in x.shape], x.dtype))
        for i, x in enumerate(inputs)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(emit(*params))
        builder.emit_func_output(out)
    return relax.transform.LegalizeOps()(builder.get())


def fused(inputs: Sequence[Input], emit: Callable[..., relax.Expr]) -> tirx.PrimFunc:
    """Return everything as one PrimFunc, as FuseTIR makes it of a function marked primitive."""
    mod = relax.transform.AnnotateTIROpPattern()(module(inputs, emit))
    main = mod["main"]
    whole = relax.Function(main.params, main.body, main.ret_ty).with_attr("Primitive", True)
    others = {g: f for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    builder = relax.BlockBuilder(tvm.IRModule(others))
    gvar = builder.add_func(whole, "fused")
    params = [relax.Var(p.name, p.ty) for p in main.params]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(relax.Call(gvar, params))
        builder.emit_func_output(out)
    (func,) = prim_funcs(relax.transform.FuseTIR()(builder.get()))
    return func


def prim_funcs(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    return [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]


def shape_of(param: tirx.Var) -> tuple[int, ...]:
    """Return the shape of a parameter, with values for its symbolic sizes."""
    analyzer = sym.Analyzer()

    def value(var: ir.Var) -> ir.Expr:
        return tirx.IntImm(str(var.ty.dtype), SIZES.get(var.name, OTHER_SIZE))

    sizes = [tvm_ffi.structural_map(d, (ir.Var, value)) for d in param.ty.shape]
    return tuple(int(analyzer.simplify(d)) for d in sizes)


def array(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if "int" in dtype:
        return rng.integers(0, 2**32 if dtype == "uint32" else 4, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(numpy_dtype(dtype))


def compiled(func: tirx.PrimFunc, target: Target) -> tvm.runtime.Module:
    """Compile a scheduled function by itself, without LLVM's optimisations."""
    func = func.with_attr("global_symbol", "main").with_attr("tirx.is_scheduled", 1)
    return tvm.compile(tvm.IRModule({"main": func}), target=quick(target))


def run(func: tirx.PrimFunc, target: Target, like: tirx.PrimFunc) -> tuple[list[np.ndarray], Any]:
    """Run a scheduled function; return its inputs and its result.  `like` has its signature."""
    *ins, result = like.params
    arrays = [array(shape_of(p), str(p.ty.dtype), seed) for seed, p in enumerate(ins)]
    out = tvm.runtime.empty(shape_of(result), str(result.ty.dtype))
    with quick_passes():
        library = loaded(compiled(func, target))
    library["main"](*(tvm.runtime.tensor(a) for a in arrays), out)
    return arrays, out.numpy()


def check(got: np.ndarray, steps: Callable[..., np.ndarray], arrays: list[np.ndarray]) -> None:
    """Compare with float64: at most twice the error of float32 steps, and a rounding."""
    exact = steps(*(wide(a, "float64") for a in arrays))
    single = steps(*(wide(a, "float32") for a in arrays))
    info = np.finfo(got.dtype) if got.dtype.kind == "f" else ml_dtypes.finfo(got.dtype)
    allowed = 2 * np.abs(single - exact).max(initial=0) + np.abs(exact) * float(info.eps)
    floor = 4 * np.finfo("float32").eps * np.abs(exact).max(initial=0)
    assert got.shape == exact.shape
    assert np.all(np.abs(got.astype("float64") - exact) <= allowed + floor)


def wide(a: np.ndarray, dtype: str) -> np.ndarray:
    return a if a.dtype.kind in "biu" else a.astype(dtype)


@dataclass(frozen=True)
class Quantised:
    """A matmul whose weights are `bits` wide, as MLC-LLM's group quantisation has them.

    Words hold whole weights, from the lowest bits on, along k; `group` of them share a scale.
    """

    n: int
    k: int
    rows: int | str
    bits: int = 4
    layout: str = "nk"
    dtype: str = "float16"
    group: int = 32
    batch: int = 0
    """Matrices; 0 for one without such a dimension."""
    epilogue: bool = False
    """Whether sums are cut off, at a bound for each column and at one for each element."""
    zeros: bool = False
    """Whether each group has a zero of its own, in the lowest bits of a word."""

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def zero(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def _shape(self, length: int) -> tuple[int, ...]:
        matrix = (self.n, length) if self.layout == "nk" else (length, self.n)
        return (self.batch, *matrix) if self.batch else matrix

    def func(self) -> tirx.PrimFunc:
        rows = tirx.Var(self.rows, "int64") if isinstance(self.rows, str) else self.rows
        words, groups = -(-self.k // self.per_word), -(-self.k // self.group)
        packed = te.placeholder(self._shape(words), "uint32", "packed")
        scale = te.placeholder(self._shape(groups), self.dtype, "scale")
        zero_words = te.placeholder(self._shape(groups), "uint32", "zero")
        x = te.placeholder((self.batch or 1, rows, self.k), self.dtype, "x")
        given = [packed, scale, x, *([zero_words] if self.zeros else [])]

        def at(b: tirx.Expr, j: tirx.Expr, k: tirx.Expr) -> tuple[tirx.Expr, ...]:
            matrix = (j, k) if self.layout == "nk" else (k, j)
            return (b, *matrix) if self.batch else matrix

        def weight(*place: tirx.Expr) -> tirx.Expr:
            *b, i, j = place
            j, k = (i, j) if self.layout == "nk" else (j, i)
            word = packed[at(*b or (0,), j, k // self.per_word)]
            shift = (k % self.per_word * self.bits).astype("uint32")
            number = tirx.bitwise_and(word >> shift, 2**self.bits - 1).astype(self.dtype)
            zero = tirx.const(self.zero, self.dtype)
            if self.zeros:
                word = zero_words[at(*b or (0,), j, k // self.group)]
                zero = tirx.bitwise_and(word, 2**self.bits - 1).astype(self.dtype)
            return (number - zero) * scale[at(*b or (0,), j, k // self.group)]

        w = te.compute(self._shape(self.k), weight, "dequantize")
        r = te.reduce_axis((0, self.k), "r")
        shape = (self.batch or 1, rows, self.n)
        total = te.compute(
            shape, lambda b, i, j: te.sum(x[b, i, r] * w[at(b, j, r)], axis=r), "matmul"
        )
        if not self.epilogue:
            return te.create_prim_func([*given, total])
        bias = te.placeholder((self.n,), self.dtype, "bias")
        residual = te.placeholder(shape, self.dtype, "residual")
        out = te.compute(
            shape, lambda *at: tirx.max(tirx.min(total[at], bias[at[-1]]), residual[at]), "out"
        )
        return te.create_prim_func([*given, bias, residual, out])

    def steps(self, packed: np.ndarray, scale: np.ndarray, x: np.ndarray, *more: np.ndarray) -> Any:
        """Compute the same in the dtype of `x`, whatever the weights are rounded to."""
        zero: Any = self.zero
        if self.zeros:
            zero, *more = more
            zero = (zero & (2**self.bits - 1)).astype(x.dtype)
            zero = zero.swapaxes(-1, -2) if self.layout == "kn" else zero
            zero = zero.repeat(self.group, axis=-1)[..., : self.k]
        if self.layout == "kn":
            packed, scale = packed.swapaxes(-1, -2), scale.swapaxes(-1, -2)
        shifts = (np.arange(self.per_word) * self.bits).astype("uint32")
        numbers = (packed[..., None] >> shifts) & (2**self.bits - 1)
        numbers = numbers.reshape(*packed.shape[:-1], -1)[..., : self.k].astype(x.dtype)
        scales = scale.repeat(self.group, axis=-1)[..., : self.k]
        w = ((numbers - zero) * scales).astype(numpy_dtype(self.dtype)).astype(x.dtype)
        total = x @ w.swapaxes(-1, -2)
        return np.maximum(np.minimum(total, more[0]), more[1]) if more else total
