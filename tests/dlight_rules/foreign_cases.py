"""PrimFuncs as TVM's legaliser and FuseTIR make them, and how to run one against numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, sym, tirx
from tvm.target import Target

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


def numpy_dtype(dtype: str) -> Any:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def array(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if "int" in dtype:
        return rng.integers(0, 2**32 if dtype == "uint32" else 4, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(numpy_dtype(dtype))


def compiled(func: tirx.PrimFunc, target: Target) -> tvm.runtime.Module:
    """Compile a scheduled function by itself."""
    func = func.with_attr("global_symbol", "main").with_attr("tirx.is_scheduled", 1)
    return tvm.compile(tvm.IRModule({"main": func}), target=target)


def run(func: tirx.PrimFunc, target: Target, like: tirx.PrimFunc) -> tuple[list[np.ndarray], Any]:
    """Run a scheduled function; return its inputs and its result.  `like` has its signature."""
    *ins, result = like.params
    arrays = [array(shape_of(p), str(p.ty.dtype), seed) for seed, p in enumerate(ins)]
    out = tvm.runtime.empty(shape_of(result), str(result.ty.dtype))
    compiled(func, target)["main"](*(tvm.runtime.tensor(a) for a in arrays), out)
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
