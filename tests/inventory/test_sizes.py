"""Sizes as text, and ranges of them."""

from __future__ import annotations

import pytest

from relax_fusion.errors import PipelineError
from relax_fusion.report.sizes import (
    MOST_POINTS,
    SizeRange,
    grid,
    names_in,
    renamed,
    times,
    value_of,
)


@pytest.mark.parametrize(
    "extent, values, expected",
    [
        (7, {}, 7),
        ("n", {"n": 3}, 3),
        ("n", {}, None),
        ("batch * seq_len * 4", {"batch": 2, "seq_len": 5}, 40),
        ("(n + 15) // 16 * 16 - m % 3", {"n": 17, "m": 5}, 30),
        ("T.min(n, 8)", {"n": 9}, 8),
        ("T.if_then_else(n < 4, 1, n)", {"n": 9}, 9),
        ("n // m", {"n": 9, "m": 0}, None),
        ("__import__('os').getpid()", {}, None),
        ("n.real", {"n": 9}, None),
    ],
)
def test_what_a_size_comes_to(extent: int | str, values: dict, expected: int | None) -> None:
    assert value_of(extent, values) == expected


def test_products_of_sizes() -> None:
    assert times(2, 3) == 6 and times() == 1
    assert times("n", 1) == "n" and times(0, "n") == 0
    assert value_of(times("n + 1", 2, "m"), {"n": 2, "m": 5}) == 30
    assert names_in(times("n + 1", "m")) == {"n", "m"}


def test_values_of_ranges() -> None:
    assert SizeRange(3, 20).values == (3, 4, 8, 16, 20)
    assert SizeRange(8, 8).values == (8,) and SizeRange(1, 1).values == (1,)
    assert SizeRange(1, 4).values == (1, 2, 4)
    assert grid({}) == [{}]
    pairs = grid({"a": SizeRange(1, 2), "b": SizeRange(5, 5)})
    assert pairs == [{"a": 1, "b": 5}, {"a": 2, "b": 5}]


def test_too_many_combinations() -> None:
    wide = {name: SizeRange(1, 2**20) for name in "abc"}
    with pytest.raises(PipelineError, match=rf"a 1\.\.1048576.*more than {MOST_POINTS}"):
        grid(wide)


@pytest.mark.parametrize(
    "extent",
    [
        *("(" * 5000, "n" + "+n" * 4000, "-" * 9000 + "n", "n" * 20000, "'a' * 10 ** 11", "\0"),
        *(
            "'a' * 99999999999",
            "1e400",
            "n // 0",
            "Div(9 ** 999, 1)",
            "Div(n, 0)",
            "n[0]",
            "\ud800",
        ),
    ],
    ids=lambda extent: extent[:20].encode("unicode_escape").decode(),
)
def test_expressions_of_strangers(extent: str) -> None:
    """They are not known, and nothing is computed without end."""
    assert value_of(extent, {"n": 2**31}) is None
    assert names_in(extent) <= {"n"} and renamed(extent, {"n": "m"}) is not None
