"""MendImports: what front ends mean, where TVM reads something else."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion.canonical import MendImports

from ..support.quick import machine, quickly
from .common import assert_same_numbers, module, operators

X = "x: R.Tensor(('b', 's', 8), 'float32')"
ROW = "x: R.Tensor((8,), 'float32')"


def run(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    """Compile by TVM's own pipeline and run."""
    vm = machine(quickly(mod))
    return vm["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def test_sums_of_bools_count() -> None:
    params = "x: R.Tensor((2, 6), 'bool')"
    body = """
c = R.cumsum(x, axis=-1)
a = R.expand_dims(c, axis=[2])
d = R.expand_dims(c, axis=[1])
y = R.equal(a, d)
"""
    after = MendImports()(module(params, body, ""))
    (sums,) = [b for b in after["main"].body.blocks[0].bindings if "cumsum" in str(b.value)]
    assert str(sums.var.ty.dtype) == "int64"
    starts = np.array([[1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]], "bool")
    count = np.cumsum(starts, axis=-1)
    assert np.array_equal(run(after, starts), count[:, :, None] == count[:, None, :])


def test_other_bools_stay() -> None:
    before = module("x: R.Tensor((2, 6), 'bool')", "c = R.logical_not(x)\ny = R.equal(c, x)", "")
    assert MendImports()(before).same_as(before)


@pytest.mark.parametrize("shape", ["(3, 's', 4)", "(3, 5, 4)"])
@pytest.mark.parametrize("indices", [[-2], [1, -1, -5], [[-1], [0]]])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_indices_from_the_end(shape: str, indices: list, dtype: str) -> None:
    s = tvm.tirx.Var("s", "int64")
    middle = s if "s" in shape else 5
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([3, middle, 4], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            at = relax.const(np.array(indices), dtype)
            out = builder.emit_output(relax.op.negative(builder.emit(relax.op.take(x, at, axis=1))))
        builder.emit_func_output(out)
    after = MendImports()(builder.get())
    array = np.arange(60, dtype="float32").reshape(3, 5, 4)
    np.testing.assert_array_equal(run(after, array), -np.take(array, indices, axis=1))


@pytest.mark.parametrize("mode", ["clip", "wrap"])
@pytest.mark.parametrize("indices", [[1, 0, 9, -1], [-9], [7, 6, 5]])
def test_modes_say_what_indices_outside_are(mode: str, indices: list[int]) -> None:
    body = f'i = R.const({indices}, "int64")\ny = R.take(x, i, axis=1, mode="{mode}")'
    array = np.arange(16, dtype="float32").reshape(2, 8)
    after = MendImports()(module("x: R.Tensor((2, 8), 'float32')", body))
    np.testing.assert_array_equal(run(after, array), np.take(array, indices, axis=1, mode=mode))


@pytest.mark.parametrize(("params", "index", "axis"), [(X, 1, 1), (X, -1, 1), (ROW, 7, 0)])
def test_no_index_reads_beyond_the_end(params: str, index: int, axis: int, capfd) -> None:
    body = f'i = R.const({index}, "int64")\ny = R.take(x, i, axis={axis})'
    after = MendImports()(module(params, body))
    assert MendImports()(after).same_as(after)
    array = np.arange(8, dtype="float32").reshape((1, 1, 8) if axis else 8)
    np.testing.assert_array_equal(run(after, array), array[:, 0] if axis else array[7])
    assert "segfaults" not in capfd.readouterr().err  # what TVM says of the mode "fast"


def test_indices_beyond_the_start_stay() -> None:
    before = module(X, 'i = R.const([0, -9], "int64")\ny = R.take(x, i, axis=2)')
    assert MendImports()(before).same_as(before)


@pytest.mark.parametrize("index", [0, 3, -1, -8])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_place_is_a_slice(index: int, rank: int) -> None:
    at = f"[{index}]" if rank else str(index)
    before = module(X, f'i = R.const({at}, "int64")\ny = R.negative(R.take(x, i, axis=2))')
    after = MendImports()(before)
    assert operators(after) == ["strided_slice", "reshape", "negative"]
    array = np.arange(48, dtype="float32").reshape(2, 3, 8)
    want = -np.take(array, [index] if rank else index, axis=2)
    np.testing.assert_array_equal(run(after, array), want)
    beyond = module(X, 'i = R.const([8], "int64")\ny = R.negative(R.take(x, i, axis=2))')
    assert operators(MendImports()(beyond)) == ["take", "negative"]


@pytest.mark.parametrize(
    "params, body, expected",
    [
        ("x: R.Tensor((1, 's'), 'float32')", "a = R.tile(x, (4, 1))", "broadcast_to"),
        ("x: R.Tensor(('s', 3), 'float32')", "a = R.tile(x, (2, 1, 1))", "broadcast_to"),
        ("x: R.Tensor(('s', 1), 'float32')", "a = R.repeat(x, 3, axis=1)", "broadcast_to"),
        ("x: R.Tensor((2, 's'), 'float32')", "a = R.tile(x, (4, 1))", "tile"),
        ("x: R.Tensor(('s', 2), 'float32')", "a = R.repeat(x, 3, axis=1)", "repeat"),
    ],
)
def test_what_is_repeated_along_one(params: str, body: str, expected: str) -> None:
    before = module(params, body + "\ny = R.negative(a)", "s")
    after = MendImports()(before)
    assert operators(after) == [expected, "negative"]
    if expected == "broadcast_to":
        assert_same_numbers(before, after)


SLICES = {
    "in order": (
        "v = R.slice_scatter(x, a, 0, 3, 1, axis=1)\ny = R.slice_scatter(v, e, 3, 8, 1, axis=1)",
        "concat",
    ),
    "last first": (
        "v = R.slice_scatter(x, e, 3, 8, 1, axis=1)\ny = R.slice_scatter(v, a, 0, 3, 1, axis=1)",
        "concat",
    ),
    "apart": (
        "v = R.slice_scatter(x, a, 0, 3, 1, axis=1)\ny = R.slice_scatter(v, a, 3, 6, 1, axis=1)",
        "slice_scatter",
    ),
    "over one another": (
        "v = R.slice_scatter(x, a, 1, 4, 1, axis=1)\ny = R.slice_scatter(v, e, 0, 5, 1, axis=1)",
        "slice_scatter",
    ),
    "along two axes": (
        "v = R.slice_scatter(x, e, 3, 8, 1, axis=1)\ny = R.slice_scatter(v, x, 0, 2, 1, axis=0)",
        "slice_scatter",
    ),
}


@pytest.mark.parametrize("case", SLICES)
def test_slices_that_cover_an_axis_lie_side_by_side(case: str) -> None:
    body, expected = SLICES[case]
    params = ", ".join(
        f"{n}: R.Tensor((2, {size}), 'float32')" for n, size in (("x", 8), ("a", 3), ("e", 5))
    )
    before = module(params, body, "")
    after = MendImports()(before)
    assert operators(after)[-1] == expected
    arrays = [
        np.arange(n, n + size * 2, dtype="float32").reshape(2, size)
        for n, size in ((0, 8), (100, 3), (200, 5))
    ]
    np.testing.assert_array_equal(run(after, *arrays), run(before, *arrays))


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_a_pad_of_nothing_goes(mode: str) -> None:
    pads = [f"R.nn.pad(x, [0, 0, 0, {n}, 0, 0], '{mode}')".replace("'", '"') for n in (0, 1)]
    after = MendImports()(module(X.replace("'s'", "4"), f"p = {pads[0]}\ny = R.negative(p)"))
    assert operators(after) == ["negative"]
    before = module(X.replace("'s'", "4"), f"p = {pads[1]}\ny = R.negative(p)")
    assert MendImports()(before).same_as(before)
