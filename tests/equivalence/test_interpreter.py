"""Operators by numpy: dtypes are exact where they matter, and what is not known is said."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm import relax, tirx

from relax_fusion.equivalence.interpreter import Interpreter, evaluate
from relax_fusion.equivalence.operators import Misfit, Uninterpreted
from relax_fusion.equivalence.prim_funcs import computed
from relax_fusion.equivalence.sizes import WHOLE, Shrink, Sizes

from ..support.chains import Chain, module


def run(inputs: str, body: str, *given: np.ndarray, result: str = "y") -> np.ndarray:
    """Run bindings; return their result."""
    mod = module([Chain("main", inputs, body, result)])
    return evaluate(mod["main"], list(given))[0]


def test_integers_wrap_around() -> None:
    x = np.array([127, -128], "int8")
    assert run("x[2]:int8", "y = R.add(x, R.const(1, 'int8'))", x).tolist() == [-128, -127]
    wide = np.array([300, -1], "int32")
    assert run("x[2]:int32", 'y = R.astype(x, "uint8")', wide).tolist() == [44, 255]


def test_integers_are_divided_towards_zero() -> None:
    x, two = np.array([7, -7], "int32"), "R.const(2, 'int32')"
    assert run("x[2]:int32", f"y = R.divide(x, {two})", x).tolist() == [3, -3]
    assert run("x[2]:int32", f"y = R.floor_divide(x, {two})", x).tolist() == [3, -4]


def test_floats_are_not_rounded_but_those_of_no_data_are() -> None:
    x = np.array([2049.0])
    assert run("x[1]:float32", 'y = R.astype(x, "float16")', x).tolist() == [2049.0]
    mod = module([Chain("main", "x[1]", 'p = R.arange(2048, 2051, 1, "float16")', "p")])
    binding = mod["main"].body.blocks[0].bindings[0]
    values: dict = {}
    bound = [(binding.var, binding.value)]
    Interpreter().run(bound, values, Sizes(), exact=frozenset([binding.var]))
    assert values[binding.var].tolist() == [2048.0, 2048.0, 2050.0]


def test_bitwise_not_of_integers_is_no_logical_not() -> None:
    x = np.array([0, 1], "int32")
    got = run("x[2]:int32", 'a = R.bitwise_not(x); y = R.astype(a, "bool")', x)
    assert got.tolist() == [True, True]


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("y = R.strided_slice(x, axes=[1], begin=[-3], end=[6])", (4, 3)),
        ("y = R.strided_slice(x, axes=[0], begin=[3], end=[0], strides=[-2])", (2, 6)),
        ("s = R.split(x, [1, 5], axis=1); y = s[1]", (4, 4)),
        ("y = R.tile(x, (1, 2, 1))", (1, 8, 6)),
        ("y = R.take(x, R.const([1, 0], 'int32'), axis=1)", (4, 2)),
        ("y = R.mean(x, axis=[-1], keepdims=True)", (4, 1)),
        ("y = R.repeat(x, 3, axis=0)", (12, 6)),
    ],
)
def test_shapes_are_those_that_tvm_infers(body: str, shape: tuple[int, ...]) -> None:
    assert run("x[4,6]", body, np.ones((4, 6))).shape == shape


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("constant", [7, 1, 2, 3, 7]),
        ("reflect", [2, 1, 2, 3, 2]),
        ("replicate", [1, 1, 2, 3, 3]),
        ("circular", [3, 1, 2, 3, 1]),
    ],
)
def test_pads(mode: str, wanted: list[float]) -> None:
    body = f'y = R.nn.pad(x, pad_width=[1, 1], pad_value=7, pad_mode="{mode}")'
    assert run("x[3]", body, np.array([1.0, 2.0, 3.0])).tolist() == wanted


@pytest.mark.parametrize("operator", ["rms_norm(x, g", "layer_norm(x, g, c"])
def test_parameters_of_a_norm_lie_along_its_axes(operator: str) -> None:
    """Over rows, it is the norm of the transposed tensor, transposed."""
    rng = np.random.default_rng(3)
    x, g, c = rng.standard_normal((5, 5)), rng.standard_normal(5), rng.standard_normal(5)
    over_rows = run("x[5,5] g[5] c[5]", f"y = R.nn.{operator}, axes=[0])", x, g, c)
    over_columns = run("x[5,5] g[5] c[5]", f"y = R.nn.{operator}, axes=[-1])", x.T, g, c)
    np.testing.assert_allclose(over_rows, over_columns.T)


def test_bfloat16_is_taken() -> None:
    x = np.array([1.5, 2.5], ml_dtypes.bfloat16)
    assert run("x[2]:bfloat16", "y = R.multiply(x, x)", x).tolist() == [2.25, 6.25]


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(Uninterpreted, match="the operator einsum"):
        run("x[2,2]", 'y = R.einsum((x, x), "ij,jk->ik")', np.ones((2, 2)))
    with pytest.raises(Uninterpreted, match="not finite, cast to int32"):
        run("x[1]", 'y = R.astype(x, "int32")', np.array([np.nan]))


def test_sizes_that_contradict_each_other_are_refused() -> None:
    body = "y = R.reshape(x, R.shape([2, 128]))"
    mod = module([Chain("main", "x[4,64]", body, "y")])
    (x,), binding = mod["main"].params, mod["main"].body.blocks[0].bindings[0]
    bound = [(binding.var, binding.value)]
    Interpreter().run(bound, {x: np.ones((4, 1))}, Sizes({}, Shrink(64, 64)))
    with pytest.raises((Misfit, ValueError)):
        Interpreter().run(bound, {x: np.ones((4, 1))}, Sizes({}, Shrink(128, 32)))


def test_prim_funcs_as_tvm_legalises_them_are_computed() -> None:
    body = "a = R.matmul(x, W); b = R.add(a, c); y = R.nn.silu(b)"
    mod = module([Chain("main", "x[n,8] W[8,4] c[4]", body, "y")])
    lowered = relax.transform.LegalizeOps()(mod)
    rng = np.random.default_rng(3)
    given = [rng.standard_normal(shape) for shape in ((3, 8), (8, 4), (4,))]
    functions = {
        gvar.name_hint: lambda *arrays, func=func: computed(func, arrays, WHOLE)
        for gvar, func in lowered.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    got = evaluate(lowered["main"], given, functions)[0]
    np.testing.assert_allclose(got, evaluate(mod["main"], given)[0], rtol=1e-12)


def test_another_form_of_a_prim_func_is_refused() -> None:
    mod = module([Chain("main", "x[4,4]", "y = R.max(x, axis=[0])", "y")])
    lowered = relax.transform.LegalizeOps()(mod)
    (func,) = (f for _, f in lowered.functions_items() if isinstance(f, tirx.PrimFunc))
    with pytest.raises(Uninterpreted, match="no sum"):
        computed(func, [np.ones((4, 4))], WHOLE)


def test_sizes_of_data_get_names() -> None:
    n, bb = tirx.Var("n", "int64"), relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1,), "int64"))
    with bb.function("main", [x]):
        shape = bb.emit(relax.op.tensor_to_shape(x))
        bb.match_cast(shape, relax.ShapeType([n]))
        bb.emit_func_output(bb.emit(relax.op.arange(0, n, 1, dtype="int64")))
    assert evaluate(bb.get()["main"], [np.array([3])])[0].tolist() == [0, 1, 2]


def test_minus_infinity_is_the_least_integer() -> None:
    out = run("x[2]", 'y = R.astype(x, "int64")', np.array([-np.inf, 2.5]))
    np.testing.assert_array_equal(out, [np.iinfo("int64").min, 2])
    with pytest.raises(Uninterpreted, match="not finite, cast to int64"):
        run("x[1]", 'y = R.astype(x, "int64")', np.array([np.inf]))


def test_elements_are_gathered() -> None:
    x, places = np.arange(12.0).reshape(3, 4), np.array([[2, 1], [0, 3]])
    out = run("x[3,4] i[2,2]:int64", "y = R.gather_nd(x, i)", x, places)
    np.testing.assert_array_equal(out, [9, 3])
    with pytest.raises(Uninterpreted, match="gather_nd beyond the tensor"):
        run("x[3,4] i[2,2]:int64", "y = R.gather_nd(x, i)", x, places + 2)


def test_booleans_are_not_computed_with() -> None:
    """TVM compiles no arithmetic of them, and numpy's is another one for each operator."""
    for operator in ("negative(x)", "add(x, x)", "square(x)", "maximum(x, x)"):
        with pytest.raises(Uninterpreted, match="of booleans"):
            run("x[2]:bool", f"y = R.{operator}", np.array([True, False]))
