"""A small campaign of functions that are compiled and run, and what larger ones found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from . import compiled, movements

SEEDS = (500006, 500024)


@pytest.mark.slow
def test_a_small_campaign() -> None:
    found = compiled.explore(SEEDS)
    assert not found.failures
    assert found.compared == len(SEEDS)


@pytest.mark.parametrize(
    "seed",
    # Sizes that are numbers; two forms of one index; a row that multiplies itself
    [54, 2706, pytest.param(2831, marks=pytest.mark.slow)],
)
def test_groups(seed: int) -> None:
    assert compiled.check(movements.draw(seed), seed) == ""


# A size of n * n + 2 between two steps of a kernel; one row of what was squeezed; a float32 step of
# a float64 result; bfloat16 cast to an integer, exact where TVM's is rounded up; an end of 2**62
@pytest.mark.parametrize("seed", [20000646, 40000025, 41000278, 30000391, 20000235])
def test_movements_of_all_kinds(seed: int) -> None:
    assert compiled.check(movements.draw_shuffled(seed), seed) == ""


def test_functions_of_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = (900006, 900007, 900008, 900009)  # TVM compiles all but one
    found = compiled.explore(seeds, movements.draw)
    assert not found.failures and found.compared == 3
    assert found.seen["skipped"] == {"TVM does not compile it": 1}
    run = compiled._run

    def wrong(function: Any, args: Any, types: Any, rng: Any) -> list[np.ndarray]:
        results = run(function, args, types, rng)
        return results if rng is None else [np.zeros_like(r) + 7 for r in results]

    monkeypatch.setattr(compiled, "_run", wrong)
    failures = compiled.explore(seeds, movements.draw).failures
    assert {f.seed for f in failures} == {900006, 900007, 900009}
    assert all(f.what.startswith("Different: ") for f in failures)


def test_what_is_further_off_than_rounding_explains_is_found() -> None:
    true = np.linspace(0, 1, 8, dtype="float32")
    compiled._compare([true], [true], None, ["float32"])
    with pytest.raises(compiled.Different, match=r"result 0 is off by 0.001"):
        compiled._compare([true + np.float32(1e-3)], [true], None, ["float32"])
    with pytest.raises(compiled.Different, match="off by inf"):
        compiled._compare([np.full_like(true, np.nan)], [true], None, ["float32"])


def test_what_a_rounding_decides_is_no_difference() -> None:
    """A float32 step of a float64 result; a cast of what is nearly 4 to an integer."""
    true, made = np.linspace(0, 1, 8), np.linspace(0, 1, 8) + 1e-7
    with pytest.raises(compiled.Different):
        compiled._compare([made], [true], None, ["float64"])
    compiled._compare([made], [true], None, ["float64"], [[true - 2.0**-23]])
    with pytest.raises(compiled.Different):
        compiled._compare([made + 1e-6], [true], None, ["float64"], [[true - 2.0**-23]])
    ours, theirs, exact, moved = (np.array([n, 7], "int32") for n in (3, 4, 5, 2))
    compiled._compare([ours], [theirs], [ours], ["int32"])
    compiled._compare([ours], [theirs], [exact], ["int32"], [[theirs], [moved]])
    for others in ([], [[theirs]]):
        with pytest.raises(compiled.Different, match="result 0 differs"):
            compiled._compare([ours], [theirs], [exact], ["int32"], others)
