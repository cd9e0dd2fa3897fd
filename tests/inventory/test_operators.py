"""Operators of every kind, and calls of other libraries: operations and bytes counted by hand."""

from __future__ import annotations

import pytest
from tvm.script import from_source

from relax_fusion.report.sizes import value_of
from relax_fusion.workload.dtypes import stored_bytes

from ..support.chains import Chain, module
from .test_hand_counts import work

DOUBLE = 8

CASES = {
    "a matrix by itself": ("x[8,8]", "y = R.matmul(x, x)", (1, 8, 8, 8), 2 * 64),
    "subscripts": (
        "x[2,8,5] w[8,5,7]",
        'y = R.einsum((x, w), "bij,ijk->bk")',
        (1, 2, 7, 40),
        80 + 280 + 14,
    ),
    "subscripts without a result": (
        "x[2,8] w[8,5]",
        'y = R.einsum((x, w), "ab,bc")',
        (1, 2, 5, 8),
        16 + 40 + 10,
    ),
    "groups of a convolution": (
        "x[2,8,5,5] w[8,4,3,3]",
        "y = R.nn.conv2d_transpose(x, w, groups=2)",
        (2, 50, 36, 4),
        400 + 288 + 2 * 8 * 49,
    ),
    "a batch that is broadcast": (
        "x[4,1,6,8] w[3,8,5]",
        "y = R.matmul(x, w)",
        (12, 6, 5, 8),
        192 + 120 + 360,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operators(name: str) -> None:
    """Float64 is multiplied by no kernel of ours, so that the operators stay."""
    inputs, body, sizes, elements = CASES[name]
    (item,) = work(module([Chain("main", inputs, body, "y", dtype="float64")]))
    (product,) = item.products
    found = (product.batch, product.m, product.n, product.k)
    assert tuple(value_of(size, {}) for size in found) == sizes
    batch, m, n, k = sizes
    assert item.flops({}) == 2 * batch * m * n * k
    assert item.bytes({}) == DOUBLE * elements
    assert (item.dtype, item.storage) == ("float64", "float64")


def test_what_is_not_known_is_no_number() -> None:
    """Three factors can be multiplied in two orders; what is read and written is known."""
    body = 'y = R.einsum((x, w, z), "ab,bc,cd->ad")'
    (item,) = work(module([Chain("main", "x[2,8] w[8,5] z[5,3]", body, "y", dtype="float64")]))
    assert item.flops({}) is None and item.note == "its operations are not known"
    assert item.bytes({}) == DOUBLE * (16 + 40 + 15 + 6)


@pytest.mark.parametrize("dtype, width", [("int16", 2), ("uint64", 8)])
def test_elements_of_any_width(dtype: str, width: int) -> None:
    (item,) = work(module([Chain("main", "x[4,8] w[8,5]", "y = R.matmul(x, w)", "y", dtype=dtype)]))
    assert item.bytes({}) == width * (32 + 40 + 20)


@pytest.mark.parametrize(
    "dtype, expected",
    [("bool", 1), ("float8_e4m3fn", 1), ("int64", 8), ("int4", 1), ("float16x4", 8), ("handle", 1)],
)
def test_widths(dtype: str, expected: int) -> None:
    assert stored_bytes(dtype) == expected


OUTSIDE = """
@I.ir_module
class Module:
    @R.function(pure=False)
    def main(x: R.Tensor((4, 64), "float32"), u: R.Tensor("float32", ndim=2)):
        a = R.call_packed("other.call", x, ty_args=R.Tensor((4, 64), "float32"))
        b = R.call_dps_packed(
            "other.two", (x,), out_ty=[R.Tensor((4, 8), "float32"), R.Tensor((2,), "float32")]
        )
        c = R.call_packed("other.unknown", u, ty_args=R.Tensor((4, 64), "float32"))
        return (a, b, c)
"""


def test_calls_of_other_libraries() -> None:
    """Each is told, however it is called; all results count, and an unknown size makes no sum."""
    items = {item.chain: item for item in work(from_source(OUTSIDE))}
    assert {item.status for item in items.values()} == {"outside"}
    assert {name: item.bytes({}) for name, item in items.items()} == {
        "other.call": 4 * 2 * 256,
        "other.two": 4 * (256 + 32 + 2),
        "other.unknown": None,
    }


GRAM = """
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def gram(x: T.Buffer((16, 64), "float32"), y: T.Buffer((16, 16), "float32")):
        for i, j, k in T.grid(16, 16, 64):
            with T.sblock("y"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    y[vi, vj] = T.float32(0)
                y[vi, vj] = y[vi, vj] + x[vi, vk] * x[vj, vk]

    @T.prim_func(private=True, s_tir=True)
    def squares(x: T.Buffer((16, 64), "float32"), y: T.Buffer((16,), "float32")):
        for i, k in T.grid(16, 64):
            with T.sblock("y"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    y[vi] = T.float32(0)
                y[vi] = y[vi] + x[vi, vk] * x[vi, vk]

    @R.function
    def main(x: R.Tensor((16, 64), "float32")):
        cls = Module
        with R.dataflow():
            y = R.call_tir(cls.gram, (x,), out_ty=R.Tensor((16, 16), "float32"))
            z = R.call_tir(cls.squares, (x,), out_ty=R.Tensor((16,), "float32"))
            R.output(y, z)
        return y, z
"""


def test_rows_by_rows_of_one_matrix_in_a_function_of_tir() -> None:
    """A sum of squares, as norms have it, is no matmul."""
    (item,) = work(from_source(GRAM))
    assert (item.chain, item.flops({})) == ("gram", 2 * 16 * 16 * 64)
    assert item.bytes({}) == 4 * (16 * 64 + 16 * 16)
