"""MCFuser's rules, and its example."""

from __future__ import annotations

import pytest

from relax_fusion.tiling import IterationSpace, expressions, iteration_space, parse, place
from relax_fusion.tiling.placement import distinct, keeps_partial_results

from .graphs import chain

EXAMPLE = iteration_space(chain(1024, 512, 1024, 512))


def counts(space: IterationSpace, single: tuple[str, ...] = ()) -> tuple[int, int, int]:
    """Return the expressions, and what each rule leaves of them."""
    every = expressions(space)
    left = distinct(space, every, single)
    return len(every), len(left), sum(not keeps_partial_results(space, s) for s in left)


def test_the_example_of_mcfuser() -> None:
    """M = N = 1024, K = H = 512: the paper has 26 -> 5 -> 3 expressions."""
    assert counts(EXAMPLE) == (26, 5, 3)


def test_three_contractions() -> None:
    assert counts(iteration_space(chain(512, 256, 256, 256, 256))) == (146, 16, 3)


def test_a_batch_changes_no_count() -> None:
    assert counts(iteration_space(chain(512, 64, 256, 64, batch=8))) == (26, 5, 3)


@pytest.mark.parametrize(
    ("single", "left"), [("k", 2), ("h", 2), ("n", 1), ("kh", 1), ("nkh", 1), ("m", 5)]
)
def test_loops_of_one_tile_make_more_the_same(single: str, left: int) -> None:
    """Of n and k and h inside m: k: nh and hn; h: nk and kn; n, or two of them: one."""
    assert counts(EXAMPLE, tuple(single))[1] == left


@pytest.mark.parametrize(
    ("text", "keeps"),
    [("mhnk", False), ("mnhk", False), ("mn(k,h)", False), ("mhkn", True), ("mknh", True)],
)
def test_partial_results(text: str, keeps: bool) -> None:
    structure = place(EXAMPLE, parse(text, EXAMPLE.ordered))
    assert keeps_partial_results(EXAMPLE, structure) == keeps
