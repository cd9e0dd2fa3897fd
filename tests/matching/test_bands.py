"""Bands of positions: whether every query sees a key."""

from __future__ import annotations

import pytest
from tvm import tirx

from relax_fusion.matching.attention.bands import Sight, rows_see

KEYS = tirx.Var("m", "int64")


@pytest.mark.parametrize(
    "sight, queries, keys, sees",
    [
        (Sight(), 5, KEYS, True),
        (Sight("top_left"), 5, KEYS, True),
        (Sight("none", 1), 5, KEYS, False),  # of three keys, the last two queries see none
        (Sight("none", 1), 5, 3, False),
        (Sight("none", 3), 5, 3, True),
        (Sight("top_left", 2), 5, KEYS, False),
        (Sight("bottom_right"), 5, KEYS, False),
        (Sight("bottom_right", 2), 3, 5, True),
    ],
)
def test_every_query_sees_a_key(sight: Sight, queries: int, keys: object, sees: bool) -> None:
    assert rows_see(sight, queries, keys) is sees
