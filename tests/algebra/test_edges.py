"""The edges of the machinery: constants in layouts, dtypes, axes, prices, and what stays."""

from __future__ import annotations

from types import SimpleNamespace as Attrs

import numpy as np
import pytest
import tvm
from tvm import ir, relax

from relax_fusion.algebra import AlgebraOptions, SimplifyAlgebra
from relax_fusion.algebra.matcher import axes_of_both
from relax_fusion.algebra.price import Price
from relax_fusion.hardware.target import device_of
from relax_fusion.matching.pattern import BlockView

from ..canonical.common import assert_same_numbers, module, operators
from .cases import TARGET, simplified

RNG = np.random.default_rng(1)


def told(params: dict[str, str], body: str, **constants: np.ndarray) -> list[str]:
    """Return the rules that fire in ``main``, whose numbers stay the same."""
    types = {n: f"R.Tensor({a.shape}, '{a.dtype}')" for n, a in constants.items()}
    given = ", ".join(f"{name}: {type_}" for name, type_ in {**params, **types}.items())
    mod = module(given, body.replace("; ", "\n"), symbols="")
    mod = relax.transform.BindParams("main", constants)(mod)
    after, found = simplified(mod, exact=True)
    assert_same_numbers(mod, after, rtol=1e-5)
    return [one.rule for one in found]


def array(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


X = {"x": "R.Tensor((8, 64), 'float32')"}
HALF = {"x": "R.Tensor((8, 64), 'float16')"}


SCALED = 'R.multiply(a, R.const(3.0, "float32"))'


@pytest.mark.parametrize(
    ("laid", "shape"),
    [
        ("R.reshape(A, R.shape([64, 96]))", (96, 64)),
        ("R.expand_dims(R.reshape(A, R.shape([6144])), axis=[0])", (64, 96)),
        ("R.squeeze(A, axis=[0])", (1, 64, 96)),
        ("R.permute_dims(A)", (96, 64)),
    ],
)
def test_constants_in_any_layout_are_folded(laid: str, shape: tuple[int, ...]) -> None:
    view = "w = R.reshape(t, R.shape([64, 96]))" if "expand" in laid else "w = t"
    body = f"t = {laid}; {view}; a = R.matmul(x, w); y = {SCALED}"
    assert told(X, body, A=array(*shape)) == ["(x @ A) * c -> x @ (A * c)"]


def test_rows_of_one_matrix_axis_are_columns_of_weights() -> None:
    body = "a = R.multiply(x, V); y = R.matmul(a, A)"
    fired = told(X, body, V=array(1, 64), A=array(64, 96))
    assert fired == ["(x * V) @ A -> x @ (A * column(V))"]


COPIED = "v = R.reshape(A, R.shape([64, 96])); y = R.concat((u, v), axis=0)"


@pytest.mark.parametrize(
    "body",
    [
        # What a constant is laid out as is read, or itself; sums of other shapes; means of rows
        f"t = R.permute_dims(A); a = R.matmul(x, t); u = {SCALED}; y = R.concat((u, t), axis=0)",
        f"t = R.permute_dims(A); a = R.matmul(x, t); u = {SCALED}; {COPIED}",
        "a = R.matmul(x, B); b = R.matmul(x, C); y = R.add(a, b)",
        "a = R.matmul(x, B); y = R.sign(R.mean(a, axis=[0]))",
    ],
)
def test_what_stays(body: str) -> None:
    assert not told(X, body, A=array(96, 64), B=array(64, 96), C=array(64, 1))


@pytest.mark.parametrize(
    ("u", "body"),
    [
        ("(64,)", "a = R.matmul(x, w); b = R.matmul(u, w); y = R.add(a, b)"),
        ("(1,)", "a = R.multiply(x, u); y = R.matmul(a, w)"),
    ],
)
def test_vectors_stay(u: str, body: str) -> None:
    shapes = {"x": "(64,)", "u": u, "w": "(64, 96)"}
    assert not told({n: f"R.Tensor({s}, 'float32')" for n, s in shapes.items()}, body)


def test_wide_results_of_half_constants_stay() -> None:
    """A product would be rounded to the dtype of the matrices."""
    body = 'a = R.matmul(x, A, out_dtype="float32"); b = R.add(a, V); y = R.add(b, W)'
    given = {"A": array(64, 96, dtype="float16"), "V": array(96), "W": array(96)}
    assert not told(HALF, body, **given)


@pytest.mark.parametrize(
    "body",
    [
        # Numbers whose product float16 has not; a sum of constants that overflows; a small factor
        'a = R.multiply(x, R.const(0.1, "float16")); y = R.multiply(a, R.const(0.3, "float16"))',
        "a = R.matmul(x, A); b = R.matmul(x, B); y = R.add(a, b)",
        'a = R.multiply(x, R.const(0.5, "float16")); y = R.sign(R.sum(a, axis=[1]))',
    ],
)
def test_what_float16_would_lose_stays(body: str) -> None:
    large = np.full((64, 96), 6e4, "float16")
    assert not told(HALF, body, A=large, B=large.copy())
    wide = body.replace("float16", "float32")
    assert told(X, wide, A=array(64, 96), B=array(64, 96))


def test_rows_decide_what_is_too_small_for_float16() -> None:
    """A number may lose digits beside larger ones of its row and column, and not all of them."""
    body = 'a = R.matmul(x, A); y = R.multiply(a, R.const(0.001, "float16"))'
    one = np.ones((64, 96), "float16")
    one[3, 5] = 0.0123
    assert told(HALF, body, A=one) and not told(HALF, body, A=one * np.float16(0.001))


def test_without_options() -> None:
    mod = module("x: R.Tensor((8, 64), 'float32')", "a = R.negative(x)\ny = R.negative(a)", "")
    assert operators(SimplifyAlgebra()(mod)) == ["reshape"] and not AlgebraOptions().validate


def test_products_of_batches_are_reordered() -> None:
    shapes = {"x": (3, 8, 64), "v": (3, 64, 8), "w": (3, 8, 64)}
    params = {n: f"R.Tensor({s}, 'float32')" for n, s in shapes.items()}
    fired = told(params, "a = R.matmul(v, x); y = R.matmul(a, v)")
    assert fired == ["(x @ y) @ z -> x @ (y @ z)"]


def test_a_tensor_that_is_written_to_stays() -> None:
    text = """
@I.ir_module
class Module:
    @T.prim_func(private=True)
    def write(A: T.Buffer((8, 64), "float32")):
        A[0, 0] = T.float32(7)

    @R.function(pure=False)
    def main(x: R.Tensor((8, 64), "float32")):
        cls = Module
        with R.dataflow():
            a = R.negative(x)
            w = R.call_tir_inplace(cls.write, (x,), inplace_indices=[0],
                                   out_ty=[R.Tensor((8, 64), "float32")])
            y = R.negative(a)
            R.output(y, w)
        return (y, w)
"""
    assert not simplified(tvm.script.from_source(text))[1]


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize(
    ("inner", "outer"), [([-3], [1]), ([0], [-2]), ([1, 2], [0]), (None, None), ([2], None)]
)
def test_axes_of_two_reductions(keepdims: bool, inner: list | None, outer: list | None) -> None:
    x = RNG.standard_normal((2, 3, 4, 5))
    first = Attrs(axis=inner, keepdims=keepdims)
    both = axes_of_both(Attrs(axis=outer), first, x.ndim)
    twice = x.sum(inner and tuple(inner), keepdims=keepdims)
    twice = twice.sum(outer and tuple(outer)) if twice.ndim else twice
    np.testing.assert_allclose(twice.ravel(), x.sum(tuple(both)).ravel())


DEVICE = device_of(TARGET)
BYTES, FLOPS = DEVICE.dram_bytes_per_s, DEVICE.fma_float32_flops_per_s


def priced(params: str, body: str, bounds: dict[str, int], symbols: str = "") -> tuple[float, ...]:
    mod: ir.IRModule = module(params, body.replace("; ", "\n"), symbols=symbols)
    view = BlockView(mod["main"].body.blocks[0], mod)
    return Price(DEVICE, bounds).of(list(view.defs.items()), False, {})


@pytest.mark.parametrize("reduction", ["sum", "prod"])
def test_prices_count_what_is_in_memory_once(reduction: str) -> None:
    """A reduction reads what element-wise operators make in no memory; results count twice."""
    body = f"a = R.multiply(x, x); y = R.{reduction}(a, axis=[1])"
    least, most = priced("x: R.Tensor((8, 64), 'float32')", body, {})
    moved = (8 * 64 + 2 * 8) * 4
    assert least == most
    assert most == pytest.approx(
        DEVICE.launch_s + moved / BYTES + 4 * 8 * 64 / FLOPS, rel=1e-9, abs=0
    )


def test_prices_of_what_is_between_kernels_and_of_numbers() -> None:
    params = "x: R.Tensor((8, 64), 'float32'), w: R.Tensor((64, 64), 'float32')"
    body = 'a = R.matmul(x, w); b = R.matmul(a, w); y = R.multiply(b, R.const(2.0, "float32"))'
    _, found = priced(params, body, {})
    moved = (8 * 64 * (1 + 1 + 1 + 2) + 2 * 64 * 64) * 4
    operations = 2 * 2 * 8 * 64 * 64 + 2 * 8 * 64
    assert found == pytest.approx(
        2 * DEVICE.launch_s + moved / BYTES + operations / FLOPS, rel=1e-9, abs=0
    )


@pytest.mark.parametrize("name", ["sin", "cos", "erf", "power"])
def test_functions_take_many_instructions(name: str) -> None:
    args = "x, x" if name == "power" else "x"
    params = "x: R.Tensor((8, 64), 'float32')"
    times = [priced(params, f"y = R.{f}({a})", {})[1] for f, a in ((name, args), ("abs", "x"))]
    assert (times[0] - times[1]) * FLOPS / (2 * 8 * 64) > 20


def test_prices_of_matmuls_by_their_sizes() -> None:
    params = "x: R.Tensor(('s', 64), 'float32'), w: R.Tensor((64, 96), 'float32')"
    prices = priced(params, "a = R.matmul(x, w); y = R.nn.relu(a)", {"s": 32}, "s")
    for rows, found in zip((1, 32), prices, strict=True):
        moved = (rows * 64 + 64 * 96 + 2 * rows * 96) * 4
        operations = 2 * rows * 96 * 64 + 6 * rows * 96  # of a ReLU, three
        wanted = DEVICE.launch_s + moved / BYTES + operations / FLOPS
        assert found == pytest.approx(wanted, rel=1e-9, abs=0)
