"""Elements: what is read by position is what the graph computes, in the dtypes that it does."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tvm import ir, tirx

from relax_fusion.matching.attention.bands import Band, band_of, sight_of
from relax_fusion.matching.element_arithmetic import ARITHMETIC, LOGIC
from relax_fusion.matching.element_readers import READERS
from relax_fusion.matching.element_values import Element, is_boolean
from relax_fusion.matching.elements import Elements
from relax_fusion.matching.pattern import BlockView

from ..support.attention_chains import positions
from ..support.chains import Chain, module
from ..support.masks import in_sight
from ..support.masks_at_random import LARGE, SIZES, Draft, symbolic
from ..support.typed import Typed, element_value

ROW, COLUMN = tirx.Var("row", "int64"), tirx.Var("column", "int64")
BOUNDS = ({}, {}, {"s": 5, "n": 130}, {"s": 3000, "n": 3000})
RUNS = ((1, 1), (4, 4), (1, 9), (5, 7), (7, 5), (3, 130), (140, 140), (2, 2055))
"""Sizes for symbolic ones."""


def readings(seed: int, steps: int = 40) -> int:
    """Compare all that is read of a random block with numpy; return how many elements that are."""
    rng = random.Random(seed)
    dynamic = rng.random() < 0.3
    bounds: Mapping[str, int] = {}
    if dynamic:
        rows, columns = symbolic()
        columns = rows if rng.random() < 0.3 else columns
        bounds = rng.choice(BOUNDS)
        fits = [r for r in RUNS if r[0] <= bounds.get("s", 140) and r[1] <= bounds.get("n", 3000)]
        sizes = rng.sample([r for r in fits if columns is not rows or r[0] == r[1]], 2)
    else:
        rows, columns = rng.choice(LARGE if rng.random() < 0.02 else SIZES)
        sizes = [(rows, columns)]
    draft = Draft(rng, rows, columns)
    block = draft.block(steps)
    view = BlockView(block, ir.IRModule(), bounds)
    extents = [(v, d + tirx.IntImm("int64", 0)) for v, d in ((ROW, rows), (COLUMN, columns))]
    runs = [(size, Typed(block.bindings, {rows: size[0], columns: size[1]})) for size in sizes]
    found = 0
    for var in draft.pool:
        element = Elements(view, extents).at(var, (ROW, COLUMN))
        if element is None:
            continue
        found += 1
        for size, typed in runs:
            where = f"seed {seed}, {size}: {var.name} = {typed.bound[var]}\nread as {element}"
            places = {ROW: np.arange(size[0])[:, None], COLUMN: np.arange(size[1])[None]}
            places |= {rows: size[0], columns: size[1]}
            _assert_same(element, typed(var), places, size, where)
    return found


def _assert_same(
    element: Element, want: Any, places: Mapping[Any, Any], size: tuple[int, int], where: str
) -> None:
    """Compare an element, the band that it is and what a workload says of that, with the graph."""
    want = np.broadcast_to(want, size)
    assert np.array_equal(np.broadcast_to(element_value(element, places), size), want), where
    if not is_boolean(element):
        return
    band = band_of(element, ROW, COLUMN)
    if band is None:
        return
    assert np.array_equal(_seen(band, places), want), f"{where}, {band}"
    sight = sight_of(band, *size)
    if sight is not None:
        seen = in_sight(sight.causal, sight.window, size)
        assert np.array_equal(seen, want), f"{where}, {sight}"


def _seen(band: Band, places: Mapping[Any, Any]) -> np.ndarray:
    offset = places[COLUMN] - places[ROW]
    seen = np.ones(offset.shape, bool)
    if band.above is not None:
        seen &= offset > element_value(band.above, places)
    if band.upto is not None:
        seen &= offset <= element_value(band.upto, places)
    return seen


@pytest.mark.parametrize("shard", range(4))
def test_random_blocks(shard: int) -> None:
    assert sum(readings(seed) for seed in range(shard, 48, 4)) > 240


DEEP = (
    'd = R.expand_dims(R.arange(0, 3, 1, "int64"), axis=[0, 2])\n'
    'e = R.add(R.expand_dims(j, axis=[1]), R.multiply(d, R.const(10, "int64")))\n'
    "f = R.add(e, R.expand_dims(i, axis=[1]))\n"
)
"""Elements that differ along three axes: ``[6, 3, 7]``."""
WHOLE = 'f = R.full(R.shape([6, 7]), R.const(3, "int32"), "int64")\n'
READ = {
    **{name: f"y = R.{name}(j, i)" for name in ARITHMETIC},
    **{name: f"y = R.{name}(R.less(j, i), R.greater(j, R.const(2, 'int64')))" for name in LOGIC},
    "abs": "y = R.abs(R.subtract(j, i))",
    "abs of a number": WHOLE + "y = R.add(i, R.abs(R.negative(f)))",
    "arange": 'y = R.expand_dims(R.arange(3, 24, 3, "int32"), axis=[0])',
    "astype": 'y = R.astype(R.subtract(j, i), "bool")',
    "astype of a number": (
        'f = R.full(R.shape([6, 7]), R.const(0.1, "float32"), "float32")\n'
        'y = R.astype(f, "float16")'
    ),
    "broadcast_to": "y = R.broadcast_to(j, R.shape([6, 7]))",
    "concat": "y = R.concat((R.add(i, j), R.subtract(i, j)), axis=0)",
    "cumsum": WHOLE + "y = R.cumsum(f, axis=0)",
    "expand_dims": 'y = R.expand_dims(R.arange(0, 6, 1, "int64"), axis=[1])',
    "full": WHOLE + "y = R.add(f, j)",
    "full_like": 'y = R.full_like(R.add(i, j), R.const(2.5, "float32"), "float32")',
    "index_tensor": DEEP + "y = R.index_tensor(f, (i, R.const(1, 'int64'), j))",
    "negative": "y = R.negative(R.add(i, j))",
    "ones": 'y = R.ones((6, 7), "int32")',
    "ones_like": "y = R.ones_like(R.less(j, i))",
    "permute_dims": "y = R.permute_dims(R.permute_dims(R.add(i, j)), axes=[1, 0])",
    "reshape": "y = R.reshape(R.add(i, j), R.shape([6, 1, 7, 1]))",
    "squeeze": "y = R.squeeze(R.expand_dims(R.add(i, j), axis=[1]), axis=[1])",
    "strided_slice": ("y = R.strided_slice(R.add(i, j), axes=[1, 0], begin=[-3, 1], end=[7, 5])"),
    "a table of a line": (
        'y = R.add(R.expand_dims(R.const([3, 5, 7, 9, 11, 13, 15], "int64"), axis=[0]), i)'
    ),
    "take": DEEP + 'y = R.take(f, R.const(2, "int64"), axis=1, mode="fast")',
    "tril": "y = R.tril(R.broadcast_to(R.less(j, R.const(4, 'int64')), R.shape([6, 7])), 1)",
    "triu": "y = R.triu(R.add(i, j), -1)",
    "where": "y = R.where(R.less(j, i), R.add(i, j), R.const(-7, 'int64'))",
    "zeros": 'y = R.zeros((6, 7), "bool")',
    "zeros_like": "y = R.zeros_like(R.less(j, i))",
    "equal of booleans": "y = R.equal(R.less(j, i), R.less(i, j))",
    "not_equal of booleans": "y = R.not_equal(R.less(j, i), R.less(i, j))",
}


def test_negated_comparisons_are_bands() -> None:
    band = band_of(tirx.Not(tirx.LT(ROW, COLUMN)), ROW, COLUMN)
    assert band is not None and band.above is None and int(band.upto) == 0
    assert Band().is_open and not band.is_open and not Band(above=band.upto).is_open


def test_every_operator_that_is_followed_is_read_here() -> None:
    assert {*ARITHMETIC, *LOGIC, *READERS} <= READ.keys()


def reading(body: str) -> tuple[Element | None, dict[Any, Any], np.ndarray]:
    """Return an element of y, the places of all of them, and what they are."""
    mod = module([Chain("main", "x[1]", positions("6", "7") + body, "y")])
    block = mod["main"].body.blocks[0]
    y = block.bindings[-1].var
    index = tuple(tirx.Var("at", "int64") for _ in y.ty.shape)
    extents = list(zip(index, y.ty.shape, strict=True))
    want = Typed(block.bindings, {})(y)
    places = dict(zip(index, np.indices(want.shape), strict=True))
    return Elements(BlockView(block, mod), extents).at(y, index), places, want


@pytest.mark.parametrize("name", READ)
def test_each_element_is_what_the_graph_computes(name: str) -> None:
    element, places, want = reading(READ[name])
    assert element is not None
    assert np.array_equal(np.broadcast_to(element_value(element, places), want.shape), want)


@pytest.mark.parametrize(
    "body",
    [
        "y = R.add(R.astype(j, 'float32'), R.const(0.5, 'float32'))",
        "y = R.less(R.const(2.5, 'float32'), R.astype(j, 'float32'))",
        "y = R.expand_dims(R.const([0, 1, 3, 4, 5, 6, 9], 'int64'), axis=[0])",
    ],
    ids=["sum_with_a_fraction", "comparison_with_a_fraction", "table_of_two_steps"],
)
def test_what_is_no_whole_number_or_line_is_unknown(body: str) -> None:
    assert reading(body)[0] is None


@pytest.mark.parametrize(("choices", "known"), [(3, True), (12, True), (36, False)])
def test_an_element_of_many_choices_is_unknown(choices: int, known: bool) -> None:
    body = "".join(
        f"c{n} = R.equal(p, R.const({n}, 'int64'))\n"
        f"w{n} = R.where(c{n}, R.const({n * n}, 'int64'), w{n - 1})\n"
        for n in range(1, choices)
    )
    first = "p = R.add(R.multiply(i, R.const(7, 'int64')), j)\nw0 = R.subtract(j, i)\n"
    element, _, _ = reading(f"{first}{body}y = R.add(w{choices - 1}, j)")
    assert (element is not None) == known
