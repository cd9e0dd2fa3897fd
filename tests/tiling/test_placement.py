"""Where statements stand: written out for known chains, and run on a simulated chip for others."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from relax_fusion.errors import TilingError
from relax_fusion.tiling import Schedule, expressions, iteration_space, parse, place
from relax_fusion.workload import Attention
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.graph import Graph
from relax_fusion.workload.values import Axis

from .graphs import chain, norm_mlp, projected_keys, random_graph, row_sums, softmax, structures
from .simulator import run

TWO = iteration_space(chain(1024, 512, 1024, 512))


@pytest.mark.parametrize(
    ("text", "structure"),
    [
        ("mhnk", "grid m h: n(k(L_A, L_B, C_C), L_D, C_E), S_E"),
        ("mhkn", "grid m h: k(L_A, n(L_B, C_C)), n(L_D, C_E), S_E"),
        ("mnhk", "grid m: n(h(k(L_A, L_B, C_C), L_D, C_E)), h(S_E)"),
        ("mknh", "grid m: k(L_A, n(L_B, C_C)), n(h(L_D, C_E)), h(S_E)"),
        ("mn(k,h)", "grid m: n(k(L_A, L_B, C_C), h(L_D, C_E)), h(S_E)"),
    ],
)
def test_two_contractions(text: str, structure: str) -> None:
    """The five structures of MCFuser's example, in all orders of which the others are one."""
    assert str(place(TWO, parse(text, TWO.ordered))) == structure


@pytest.mark.parametrize(
    ("single", "structure"),
    [
        ("k", "grid m h: L_A, n(L_B, C_C, L_D, C_E), S_E"),
        ("n", "grid m h: k(L_A, L_B, C_C), L_D, C_E, S_E"),
        ("mh", "grid : n(k(L_A, L_B, C_C), L_D, C_E), S_E"),
        ("mnkh", "grid : L_A, L_B, C_C, L_D, C_E, S_E"),
    ],
)
def test_loops_of_one_tile_let_loads_rise(single: str, structure: str) -> None:
    assert str(place(TWO, parse("mhnk", TWO.ordered), single)) == structure


def test_what_is_kept() -> None:
    kept = {text: dict(place(TWO, parse(text, TWO.ordered)).kept) for text in ("mhnk", "mknh")}
    assert kept == {"mhnk": {}, "mknh": {"C": ("n",), "E": ("h",)}}


def test_attention_rescales_in_one_loop_over_keys() -> None:
    work = Attention(2, 512, 512, 8, 2, 64, 64, 0.125, "none", None, "float16", "float16")
    space = iteration_space(work.graph)
    assert str(place(space, parse("itdc", space.ordered), ("d", "c"))) == (
        "grid b n e i: L_q, t(L_k, C_dot, C_score, C_row_max, C_weight, C_row_sum, L_v, C_acc), "
        "C_out, S_out"
    )


def test_softmax_of_which_all_is_needed_takes_three_loops() -> None:
    space = iteration_space(softmax(64, 512, divided_late=False))
    assert str(place(space, parse("itc", space.ordered))) == (
        "grid i: t(L_x, C_top), t(L_x, C_e, C_total), t(C_p, c(L_v, C_y)), c(S_y)"
    )


def test_stores_rise_out_of_loops_that_do_not_index_them() -> None:
    g = GraphBuilder()
    m, a, b = Axis("m", 32), Axis("a", 32), Axis("b", 32)
    x, w = g.input("x", (32, 32), "float32"), g.input("w", (32, 32), "float32")
    r = g.sum("r", (m,), (a,), x[m, a])
    p = g.sum("p", (m, b), (a,), x[m, a] * w[a, b])
    g.output(r)
    g.output(g.max("t", (m,), (b,), p[m, b]))
    space = iteration_space(g.graph())
    assert str(place(space, parse("mba", space.ordered))) == (
        "grid m: b(a(L_x, C_r, L_w, C_p), C_t), S_r, S_t"
    )


def test_a_norm_is_a_loop_of_its_own() -> None:
    space = iteration_space(norm_mlp(512, 256, 512, 128))
    assert str(place(space, parse("rojk", space.ordered))) == (
        "grid r o: j(k(L_x, C_q), k(L_x, C_n, L_w, C_a), C_s, L_v, C_c), L_x, C_y, S_y"
    )
    assert str(place(space, parse("rojk", space.ordered), "k")) == (
        "grid r o: L_x, C_q, C_n, j(L_w, C_a, C_s, L_v, C_c), L_x, C_y, S_y"
    )


def test_no_loop_repeats_what_it_does_not_index() -> None:
    space = iteration_space(chain(64, 64, 64, 64, 64))
    assert "h(p(k(L_A" not in str(place(space, parse("mnhpk", space.ordered)))


def test_a_running_maximum_is_kept_for_the_rows_inside() -> None:
    space = iteration_space(projected_keys(32, 48))
    structure = place(space, parse("ticed", space.ordered), "ced")
    assert str(structure) == (
        "grid : L_w, t(L_x, C_k, L_v, i(L_q, C_s, C_top, C_p, C_total, C_acc)), i(C_y, S_y)"
    )
    assert dict(structure.kept) == dict.fromkeys(("top", "total", "acc"), ("i",))


def test_an_expression_must_have_the_loops() -> None:
    with pytest.raises(TilingError, match="has the loops k, m, n; must have h, k, m, n"):
        place(TWO, parse("mnk", TWO.ordered))


KNOWN = {
    "two": chain(48, 32, 48, 32),
    "batch": chain(32, 32, 32, 32, batch=2),
    "three": chain(32, 32, 32, 32, 32),
    "norm": norm_mlp(32, 32, 48, 32),
    "softmax": softmax(32, 48),
    "projected keys": projected_keys(32, 48),
    "one sum after the other": row_sums("k", "h", "k"),
    "softmax, divided early": softmax(32, 48, divided_late=False),
}


def _check(graph: Graph, choose: random.Random, most: int) -> int:
    """Run schedules of a graph with some loops of one tile; return how many."""
    space = iteration_space(graph)
    found = list(expressions(space))
    for each in choose.sample(found, min(most, len(found))):
        single = [name for name in space.ordered if choose.random() < 0.3]
        tiles = [1 if a.batch else a.size if a.name in single else 16 for a in space.loops]
        run(Schedule(space, place(space, each, single), tuple(tiles)))
    return min(most, len(found))


@pytest.mark.parametrize("name", KNOWN)
def test_known_chains_run(name: str) -> None:
    assert _check(KNOWN[name], random.Random(0), 200) > 5


def test_random_graphs_run() -> None:
    choose = random.Random(1)
    assert sum(_check(random_graph(choose), choose, 12) for _ in range(200)) > 500


def test_the_simulator_sees_what_is_wrong() -> None:
    right = place(TWO, parse("mknh", TWO.ordered))
    tiles = (512, 512, 256, 256)
    run(Schedule(TWO, right, tiles))
    first, second, store = right.body
    for wrong in (
        replace(right, kept=()),
        replace(right, kept=(("C", ("n",)),)),
        replace(right, body=(replace(first, body=first.body[:1]), second, store)),
        replace(right, body=(second, first, store)),
        replace(right, body=(first, store, second)),
        replace(right, body=(first, second)),
        replace(right, body=(replace(first, body=first.body[1:]), second, store)),
    ):
        with pytest.raises((AssertionError, KeyError)):
            run(Schedule(TWO, wrong, tiles))


def test_candidates_run() -> None:
    space = iteration_space(KNOWN["norm"])
    for single, structure in structures(space):
        tiles = tuple(a.size if a.name in single else 16 for a in space.loops)
        run(Schedule(space, structure, tiles))
