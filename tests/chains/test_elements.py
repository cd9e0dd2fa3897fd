"""Elements: what is read by position is what the graph computes, in the dtypes that it does."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tvm import ir, tirx

from relax_fusion.chains.attention.bands import Band, band_of, sight_of
from relax_fusion.chains.element_values import Element, is_boolean
from relax_fusion.chains.elements import Elements
from relax_fusion.pattern import BlockView

from ..passes.masks import in_sight
from .masks_at_random import LARGE, SIZES, Draft, symbolic
from .typed import Typed, element_value

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
