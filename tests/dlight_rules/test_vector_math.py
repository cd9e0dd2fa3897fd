"""Functions of numbers as arithmetic on a CPU: their errors, their ends, and what is left."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, te, tirx

import relax_fusion
from relax_fusion import host_target
from relax_fusion.compute.activations import activate
from relax_fusion.dlight_rules.cpu.vector_math import with_vector_math
from relax_fusion.matching.expressions import found_in
from relax_fusion.workload.reference import numpy_dtype

BITS = np.arange(0, 2**32, 5003, dtype="uint64").astype("uint32")
VALUES = np.concatenate(
    [BITS.view("float32"), np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], "float32")]
)
"""Numbers of all sizes, NaN among them: every 5003rd that there is, of either sign."""

LANES = 16


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def each(function: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.fromiter(map(function, x.tolist()), "float64", len(x))


def one_and_erf(x: tirx.Expr) -> tirx.Expr:
    return tirx.const(1.0, str(x.ty.dtype)) + te.erf(x)


FUNCTIONS: dict[str, tuple[Callable[..., tirx.Expr], Callable[..., np.ndarray], float]] = {
    "exp": (te.exp, np.exp, 1),
    "log": (te.log, np.log, 1),
    "cube": (lambda x: te.power(x, tirx.const(3.0, str(x.ty.dtype))), lambda x: x * x * x, 2),
    "sigmoid": (te.sigmoid, sigmoid, 2.5),
    "tanh": (te.tanh, np.tanh, 1.5),
    "erf": (te.erf, each(math.erf), 1.6),
    "erf and 1": (one_and_erf, each(lambda x: math.erfc(-x)), 80),
}
"""The function, what it is, and how many units in the last place it may err by.

Where ``1 + erf(x)`` is small, it is ``exp(-x * x)`` times something, and a square of 88 is rounded
to a multiple of 64 such units of its exponential.
"""


def element_wise(function: Callable[..., tirx.Expr], dtype: str, lanes: int = 1) -> tirx.PrimFunc:
    """Return a function of an array as long as `VALUES`, and a little longer."""
    size = -(-len(VALUES) // LANES) * LANES
    x = te.placeholder((size,), dtype, "x")
    func = te.create_prim_func([x, te.compute((size,), lambda i: function(x(i)), "y")])
    if lanes == 1:
        return func
    sch = s_tir.Schedule(func)
    sch.vectorize(sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, lanes])[1])
    return sch.mod["main"]


def computed(func: tirx.PrimFunc, *inputs: np.ndarray) -> list[np.ndarray]:
    """Compile a function, and return what it computes of each of `inputs`."""
    library = tvm.compile(func, target=host_target())
    size, dtype = int(func.params[0].ty.shape[0]), str(func.params[0].ty.dtype)
    found = []
    for values in inputs:
        out = tvm.runtime.empty((size,), dtype)
        library["main"](tvm.runtime.tensor(np.resize(values, size).astype(dtype)), out)
        found.append(out.numpy()[: len(values)])
    return found


def called(func: tirx.PrimFunc) -> set[str]:
    return {str(getattr(call.op, "name", "")) for call in found_in(func, tvm.ir.Call)}


@pytest.mark.parametrize("lanes", [1, LANES], ids=["alone", "vectors"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32(name: str, lanes: int) -> None:
    function, exact, units = FUNCTIONS[name]
    before = element_wise(function, "float32", lanes)
    func = with_vector_math(before)
    assert (
        not called(func)
        & {"tirx.exp", "tirx.sigmoid", "tirx.tanh", "tirx.erf", "tirx.log", "tirx.pow"}
        & called(before)
    )
    with np.errstate(over="ignore"):
        want = np.full(VALUES.shape, np.nan)
        known = ~np.isnan(VALUES)
        want[known] = exact(VALUES[known].astype("float64"))
        rounded = want.astype("float32")
    (got,) = computed(func, VALUES)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(rounded))
    tiny = np.finfo("float32").tiny
    normal = np.isfinite(rounded) & (np.abs(want) >= tiny)
    errors = np.abs(got[normal].astype("float64") - want[normal])
    errors /= np.spacing(np.abs(rounded[normal]))
    assert errors.max() <= units
    small = np.abs(want) < tiny
    assert (np.abs(got[small] - want[small]) <= 2e-43).all()
    assert len(got[small]) > 1000 or name in ("erf and 1", "log")
    np.testing.assert_array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float16(name: str) -> None:
    function, exact, _ = FUNCTIONS[name]
    with np.errstate(all="ignore"):
        values = np.arange(2**16).astype("uint16").view("float16")
        values = values[np.isfinite(values)]
        want = exact(values.astype("float64")).astype("float16")
    (got,) = computed(with_vector_math(element_wise(function, "float16", LANES)), values)
    np.testing.assert_allclose(got, want, rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_odd_functions(name: str) -> None:
    func = with_vector_math(element_wise(FUNCTIONS[name][0], "float32", LANES))
    got, turned = computed(func, VALUES, -VALUES)
    np.testing.assert_array_equal(got, -turned)
    assert np.nanmax(np.abs(got)) == 1


def test_gelu_of_negative_numbers() -> None:
    """Nothing cancels: only the roundings of x / sqrt(2) and of its square are seen."""
    x = np.linspace(-6, 0, len(VALUES), endpoint=False, dtype="float32")
    func = element_wise(lambda value: activate("gelu", value), "float32", LANES)
    (got,) = computed(with_vector_math(func), x)
    exact = 0.5 * x * each(math.erfc)(-x.astype("float64") * math.sqrt(0.5))
    np.testing.assert_allclose(got, exact, rtol=2**-18)


def test_functions_of_functions() -> None:
    func = with_vector_math(element_wise(lambda x: te.tanh(te.exp(te.sigmoid(x))), "float32", 8))
    assert not called(func) & {"tirx.tanh", "tirx.exp", "tirx.sigmoid"}
    x = np.linspace(-100, 100, 5001, dtype="float32")
    (got,) = computed(func, x)
    np.testing.assert_allclose(got, np.tanh(np.exp(sigmoid(x.astype("float64")))), rtol=1e-6)


def test_what_is_guarded_is_read_in_its_alternative_only() -> None:
    far = 1 << 20
    x = te.placeholder((4 * far,), "float32", "x")

    def value(i: tirx.Var) -> tirx.Expr:
        guarded = te.exp(te.tanh(x(i * tirx.const(far, str(i.ty.dtype)))))
        return tirx.if_then_else(i < 4, guarded, tirx.const(2.0, "float32"))

    func = with_vector_math(te.create_prim_func([x, te.compute((1024,), value, "y")]))
    assert not called(func) & {"tirx.exp", "tirx.tanh"}
    given = tvm.runtime.tensor(np.zeros(4 * far, "float32"))
    out = tvm.runtime.empty((1024,))
    tvm.compile(func, target=host_target())["main"](given, out)
    np.testing.assert_array_equal(out.numpy(), [1.0] * 4 + [2.0] * 1020)


def test_float64_stays() -> None:
    func = element_wise(te.exp, "float64")
    assert with_vector_math(func).same_as(func)


EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "erf": np.vectorize(math.erf),
    "gelu": lambda x: 0.5 * x * np.vectorize(math.erfc)(-x * math.sqrt(0.5)),
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "cube": lambda x: x * x * x,
}

LIBRARY = re.compile(r"\b(expf|exp2f|erff|tanhf|powf|logf)\b")

Operators = Callable[[relax.Expr], relax.Expr]
MODELS: dict[str, Operators] = {
    "erf": relax.op.erf,
    "gelu": relax.op.nn.gelu,
    "gelu_tanh": relax.op.nn.gelu_tanh,
    "silu": relax.op.nn.silu,
    "sigmoid": relax.op.sigmoid,
    "tanh": relax.op.tanh,
    "softplus": relax.op.nn.softplus,
    "softmax": lambda x: relax.op.nn.softmax(x, axis=-1),
}


def cube(x: relax.Expr) -> relax.Expr:
    return relax.op.power(x, relax.const(3.0, "float32"))


def behind_matmul(x: relax.Expr) -> relax.Expr:
    gamma, weight = (relax.const(np.full(s, 0.1, "float32")) for s in (64, (64, 64)))
    return relax.op.nn.gelu(relax.op.matmul(relax.op.nn.rms_norm(x, gamma, axes=[-1]), weight))


def built(functions: dict[str, Operators], dtype: str) -> tvm.runtime.Executable:
    """Compile a Relax function of an array for each of `functions`."""
    builder = relax.BlockBuilder()
    for name, function in functions.items():
        x = relax.Var("x", relax.TensorType((24, 64), dtype))
        with builder.function(name, [x]):
            with builder.dataflow():
                out = builder.emit_output(builder.normalize(function(x)))
            builder.emit_func_output(out)
    return relax_fusion.build(builder.get(), host_target())


@pytest.mark.parametrize(
    ("functions", "dtype"),
    [
        (MODELS, "float32"),
        ({"all": behind_matmul, "cube": cube}, "float32"),
        *(pytest.param(MODELS, dtype, marks=pytest.mark.slow) for dtype in ("float16", "bfloat16")),
    ],
    ids=["float32", "behind_matmul", "float16", "bfloat16"],
)
def test_no_library_is_called_for_single_elements(
    functions: dict[str, Operators], dtype: str
) -> None:
    made = built(functions, dtype)
    (code,) = [part.inspect_source("asm") for part in made.mod.imports if part.kind == "llvm"]
    assert not LIBRARY.findall(code)
    machine = relax.VirtualMachine(made, tvm.cpu())
    x = np.linspace(-6, 6, 24 * 64).reshape(24, 64).astype(numpy_dtype(dtype))
    for name, exact in EXACT.items():
        if name not in functions:
            continue
        got = machine[name](tvm.runtime.tensor(x)).numpy().astype("float64")
        want = exact(x.astype("float64"))
        unit = {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        np.testing.assert_allclose(got, want, rtol=unit, atol=2.0**-25)
