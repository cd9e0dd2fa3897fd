"""Work of functions that others call is told in the sizes of the caller, as often as it is done."""

from __future__ import annotations

import pytest
from tvm.script import from_source

from relax_fusion.report.sizes import renamed

from .test_hand_counts import work

WIDTH = 64
MODULE = f"""
@I.ir_module
class Module:
    @R.function(private=True)
    def inner(
        a: R.Tensor(("m", {WIDTH}), "float64"),
        w: R.Tensor(({WIDTH}, {WIDTH}), "float64"),
        sizes: R.Shape(["k"]),
        more: R.Tuple(R.Tensor((8, "k"), "float64")),
    ):
        m, k = T.int64(), T.int64()
        with R.dataflow():
            y = R.matmul(a, w)
            z = R.matmul(more[0], R.zeros(R.shape([k, 3]), "float64"))
            R.output(y, z)
        return (y, z)

    @R.function(private=True)
    def middle(
        k: R.Tensor(("m", {WIDTH}), "float64"),
        w: R.Tensor(({WIDTH}, {WIDTH}), "float64"),
        more: R.Tuple(R.Tensor((8, "j"), "float64")),
    ):
        m, j = T.int64(), T.int64()
        cls = Module
        one = cls.inner(k, w, R.shape([j]), more)
        return one

    @R.function
    def main(
        x: R.Tensor(("n", {WIDTH}), "float64"),
        z: R.Tensor((7, {WIDTH}), "float64"),
        w: R.Tensor(({WIDTH}, {WIDTH}), "float64"),
        more: R.Tuple(R.Tensor((8, "m"), "float64")),
    ):
        n, m = T.int64(), T.int64()
        cls = Module
        twice = R.concat([x, x], axis=0)
        a = cls.middle(x, w, more)
        b = cls.middle(z, w, more)
        c = cls.inner(twice, w, R.shape([m]), more)
        d = cls.inner(x, w, R.shape([m]), more)
        return (a, b, c, d)
"""


def test_sizes_are_those_of_the_caller() -> None:
    """The names of the functions that are called mean other sizes in those that call them."""
    items = work(from_source(MODULE))
    assert {item.function for item in items} == {"main"}
    assert {name for item in items for name in item.names} == {"n", "m"}
    sizes = {"n": 5, "m": 11}
    found = {(item.flops(sizes), item.bytes(sizes)): item.count for item in items}

    def expected(rows: int, depth: int, columns: int) -> tuple[float, float]:
        elements = rows * depth + depth * columns + rows * columns
        return 2.0 * rows * depth * columns, 8.0 * elements

    assert found == {
        expected(5, WIDTH, WIDTH): 2,
        expected(7, WIDTH, WIDTH): 1,
        expected(10, WIDTH, WIDTH): 1,
        expected(8, 11, 3): 4,
    }


LOCAL = f"""
@I.ir_module
class Module:
    @R.function
    def main(
        x: R.Tensor(("n", {WIDTH}), "float64"),
        z: R.Tensor((7, {WIDTH}), "float64"),
        w: R.Tensor(({WIDTH}, {WIDTH}), "float64"),
    ):
        n = T.int64()

        @R.function
        def unused(a: R.Tensor((3, {WIDTH}), "float64")) -> R.Tensor((3, {WIDTH}), "float64"):
            return R.matmul(a, w)

        @R.function
        def inner(
            a: R.Tensor(("m", {WIDTH}), "float64")
        ) -> R.Tensor(("m", {WIDTH}), "float64"):
            return R.matmul(a, w)

        @R.function
        def outer(
            a: R.Tensor(("m", {WIDTH}), "float64")
        ) -> R.Tensor(("m", {WIDTH}), "float64"):
            return inner(a)

        a = inner(x)
        b = outer(x)
        c = inner(z)
        return (a, b, c)
"""


def test_local_functions_count_as_often_as_they_are_called() -> None:
    found = {(item.products[0].m, item.count) for item in work(from_source(LOCAL))}
    assert found == {("n", 2), (7, 1)}


@pytest.mark.parametrize(
    "extent, expected",
    [
        (3, 3),
        ("n", "m + 1"),
        ("m", 4),
        ("n * m", "(m + 1) * 4"),
        ("T.min(m, 2)", 2),
        ("T.min(n, k)", "T.min(m + 1, k)"),
        ("k", "k"),
        ("no size", "no size"),
    ],
)
def test_names_are_replaced_all_at_once(extent: int | str, expected: int | str) -> None:
    assert renamed(extent, {"n": "m + 1", "m": 4}) == expected
