"""MCFuser's rules, and its example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.hardware import DEVICES, generic_cpu
from relax_fusion.tiling import SearchSpace, iteration_space, parse, place
from relax_fusion.tiling.pruning import (
    all_tiles,
    distinct,
    fits,
    keeps_partial_results,
    little_padded,
)
from relax_fusion.tiling.space import TileLoop
from relax_fusion.workload import MatmulChain

from .graphs import chain

A100 = DEVICES["a100"]
EXAMPLE = iteration_space(chain(1024, 512, 1024, 512))


def test_the_example_of_mcfuser() -> None:
    """M = N = 1024, K = H = 512 on an A100.

    The paper has 26 -> 5 -> 3 expressions and about 1e8 -> 1e6 -> 1e5 -> 1e4 -> 1e4 candidates.
    Expressions, the whole space and what is left in the end agree.  What the first two rules leave
    of the candidates does not follow from their description: dropping 21 of 26 expressions cannot
    leave a hundredth.  Loops of one tile make more schedules the same, but only one in 20 has any.
    """
    report = SearchSpace(EXAMPLE).report(A100)
    found = {p.rule: (p.expressions, p.candidates) for p in report.prunings}
    assert found == {
        "all": (26, 26 * 64 * 64 * 32 * 32),
        "1 distinct": (5, 19_943_296),
        "2 partial results": (3, 12_068_800),
        "3 padding": (3, 4_074),
        "4 memory": (3, 2_049),
    }
    assert str(report).splitlines()[1] == "all                         26  109,051,904"


def test_what_rule_1_leaves_by_hand() -> None:
    """Five structures of four loops; where loops have one tile, so many as there are then.

    Of n and k and h inside m: none of one tile, 5; k: nh and hn, 2; h: nk and kn, 2; n or two of
    them: 1.  m is an axis of the grid, or has one tile, and doubles nothing.
    """
    n, k, h = 63, 31, 31
    inner = 5 * n * k * h + 2 * n * h + 2 * n * k + k * h + n + k + h + 1
    assert SearchSpace(EXAMPLE).report(A100).prunings[1].candidates == 64 * inner


def test_counts_are_what_enumeration_gives() -> None:
    space = iteration_space(chain(48, 32, 48, 32))
    search = SearchSpace(space)
    seen = {
        (structure, tiles)
        for m in (16, 32, 48)
        for n in (16, 32, 48)
        for k in (16, 32)
        for h in (16, 32)
        for tiles in [(m, n, k, h)]
        for structure in distinct(
            space,
            search.expressions,
            [a.name for a, t in zip(space.loops, tiles, strict=True) if t >= a.size],
        )
    }
    report = search.report(A100)
    assert [p.candidates for p in report.prunings[:2]] == [26 * 36, len(seen)]
    lean = {each for each in seen if not keeps_partial_results(space, each[0])}
    assert report.prunings[2].candidates == len(lean) < len(seen)
    assert report.prunings[4].candidates == len(list(search.candidates(A100)))


def test_an_epilogue_changes_no_count() -> None:
    plain = MatmulChain(512, 64, 256, 64, ("kn", "kn"), (), (), "float16", "float16")
    steps = replace(plain, inner=("bias", "gelu"), outer=("bias", "residual"), batch=8)
    for work in (plain, steps):
        report = SearchSpace(iteration_space(work.graph)).report(A100)
        assert [p.expressions for p in report.prunings] == [26, 5, 3, 3, 3]


@pytest.mark.parametrize(
    ("text", "keeps"),
    [("mhnk", False), ("mnhk", False), ("mn(k,h)", False), ("mhkn", True), ("mknh", True)],
)
def test_partial_results(text: str, keeps: bool) -> None:
    structure = place(EXAMPLE, parse(text, EXAMPLE.ordered))
    assert keeps_partial_results(EXAMPLE, structure) == keeps


def test_three_contractions() -> None:
    space = iteration_space(chain(512, 256, 256, 256, 256))
    counts = [p.expressions for p in SearchSpace(space).report(A100).prunings]
    assert counts == [146, 16, 3, 3, 3]


@pytest.mark.parametrize(
    ("size", "count", "kept"),
    [
        (512, 32, [16, 32, 64, 128, 256, 512]),
        (64, 4, [16, 32, 64]),
        (80, 5, [16, 80]),
        (768, 48, [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 400, 768]),
        (100, 7, [16, 112]),
        (16, 1, [16]),
        (8, 1, [8]),
        (17, 2, [16, 32]),
    ],
)
def test_padding(size: int, count: int, kept: list[int]) -> None:
    loop = TileLoop("m", size, batch=False)
    assert len(all_tiles(loop)) == count
    assert little_padded(loop, all_tiles(loop)) == kept
    assert all_tiles(TileLoop("b", size, batch=True)) == [1]


def test_memory() -> None:
    most = int(1.2 * A100.smem_per_block_bytes)
    assert fits(most, A100) and not fits(most + 1, A100)
    cpu = generic_cpu(4)
    most = int(1.2 * cpu.l2_bytes)
    assert fits(most, cpu) and not fits(most + 1, cpu)
