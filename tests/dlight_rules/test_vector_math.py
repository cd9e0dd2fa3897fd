"""Functions of numbers as arithmetic on a CPU: their errors, their ends, and what is left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from relax_fusion import host_target
from relax_fusion.dlight_rules.cpu.vector_math import with_vector_math
from relax_fusion.matching.expressions import found_in

ENDS = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -3e38, 1e-40, -1e-40]
VALUES = np.concatenate(
    [np.linspace(-120, 120, 4801), np.linspace(-5, 5, 5001), 10.0 ** np.linspace(-30, 0, 200), ENDS]
).astype("float32")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FUNCTIONS: dict[str, tuple[Callable[..., tirx.Expr], Callable[..., np.ndarray], float]] = {
    "exp": (te.exp, np.exp, 3),
    "sigmoid": (te.sigmoid, sigmoid, 4),
    "tanh": (te.tanh, np.tanh, 4),
}
"""The function, what it is, and how many units in the last place it may err by."""


def element_wise(function: Callable[..., tirx.Expr], dtype: str) -> tirx.PrimFunc:
    x = te.placeholder(VALUES.shape, dtype, "x")
    return te.create_prim_func([x, te.compute(VALUES.shape, lambda i: function(x(i)), "y")])


def computed(func: tirx.PrimFunc, *inputs: np.ndarray) -> list[np.ndarray]:
    """Compile a function, and return what it computes of each of `inputs`."""
    library = tvm.compile(func, target=host_target())
    found = []
    for values in inputs:
        out = tvm.runtime.empty(values.shape, str(values.dtype))
        library["main"](tvm.runtime.tensor(values), out)
        found.append(out.numpy())
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers(name: str, dtype: str) -> None:
    function, exact, units = FUNCTIONS[name]
    func = with_vector_math(element_wise(function, dtype))
    assert f"tirx.{name}" not in {getattr(c.op, "name", "") for c in found_in(func, tvm.ir.Call)}
    with np.errstate(over="ignore"):
        values = VALUES.astype(dtype)
        want = exact(values.astype("float64"))
        rounded = want.astype(dtype)
    (got,) = computed(func, values)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(rounded))
    normal = np.isfinite(rounded) & (np.abs(want) >= np.finfo(dtype).tiny)
    errors = np.abs(got[normal].astype("float64") - want[normal])
    errors /= np.spacing(np.abs(rounded[normal]))
    assert errors.max() <= (units if dtype == "float32" else 1)
    assert (np.abs(got[np.abs(want) < np.finfo(dtype).tiny]) <= np.finfo(dtype).tiny).all()


def test_tanh_is_odd() -> None:
    func = with_vector_math(element_wise(te.tanh, "float32"))
    got, turned = computed(func, VALUES, -VALUES)
    np.testing.assert_array_equal(got, -turned)
    assert np.nanmax(np.abs(got)) == 1


def test_functions_of_functions_stay() -> None:
    """Only the innermost is arithmetic: of both, TVM takes minutes to compile eight copies."""
    func = with_vector_math(element_wise(lambda x: te.tanh(te.exp(te.sigmoid(x))), "float32"))
    names = {getattr(call.op, "name", "") for call in found_in(func, tvm.ir.Call)}
    assert {"tirx.tanh", "tirx.exp"} <= names and "tirx.sigmoid" not in names
    with np.errstate(over="ignore"):
        exact = np.tanh(np.exp(sigmoid(VALUES.astype("float64"))))
    np.testing.assert_allclose(*computed(func, VALUES), exact, rtol=1e-6)


def test_rounding_to_bfloat16_stays() -> None:
    x = te.placeholder((8,), "float32", "x")
    y = te.compute((8,), lambda i: te.exp(x(i)).astype("bfloat16"), "y")
    func = te.create_prim_func([x, y])
    assert with_vector_math(func).same_as(func)


def test_float64_stays() -> None:
    func = element_wise(te.exp, "float64")
    tvm.ir.assert_structural_equal(with_vector_math(func), func)
