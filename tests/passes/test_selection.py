"""Which proposals are taken: those that save the most together, and what is told of the others."""

from __future__ import annotations

import itertools
import random

import pytest
from tvm import relax, tirx

from relax_fusion import Decision, FuseOptions, FusePatterns, Reason, TilePlan, make_target
from relax_fusion.errors import Decline
from relax_fusion.estimator import Choice, Prediction, RangePrediction
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.matching.pattern import Match
from relax_fusion.passes import block_round, driver, selection
from relax_fusion.passes.selection import Proposal, select
from relax_fusion.workload import Attention, GatedFFN, NormMatmul, Projection, Workload

from ..support.chains import Chain, module

MATMUL = NormMatmul(8, 16, (Projection(16, "nk"),), None, "float32", "float32")
GATED = GatedFFN(8, 16, 16, "nk", False, True, "silu", None, "float32", "float32")
ATTENTION = Attention(1, 8, 8, 1, 1, 16, 16, 0.25, "none", None, "float32", "float32")
EMPTY = tirx.PrimFunc([], tirx.Evaluate(0))
X = relax.Var("x", relax.TensorType((8, 16), "float32"))


def proposal(
    inside: set[int],
    saved_s: float = 0.0,
    work: Workload = GATED,
    hidden: set[int] = frozenset(),
    reads: set[int] = frozenset(),
) -> Proposal:
    sets = frozenset(inside), frozenset(hidden), frozenset(reads)
    match = Match("", (), (), (), work)
    return Proposal("Some", 0, min(inside), X, match, *sets, saved_s=saved_s)


def taken(*proposals: Proposal) -> list[Proposal]:
    return select(proposals, lambda one: one).taken


def test_the_best_set_is_found() -> None:
    rng = random.Random(0)
    for _ in range(40):
        some = [
            proposal({*rng.sample(range(12), rng.randint(1, 4))}, rng.random()) for _ in range(8)
        ]
        sets = (
            each
            for count in range(9)
            for each in itertools.combinations(some, count)
            if all(a.is_apart_from(b) for a, b in itertools.combinations(each, 2))
        )
        best = max(sum(p.saved_s for p in each) for each in sets)
        assert sum(p.saved_s for p in taken(*some)) == pytest.approx(best)


def test_two_that_save_more_than_one_across_both() -> None:
    both, left, right = proposal({1, 2}, 5e-6), proposal({0, 1}, 3e-6), proposal({2, 3}, 3e-6)
    assert taken(both, left, right) == [left, right]
    assert taken(both, left) == [both]


def test_many_rivals_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST_EXACT", 2)
    both, left, right = proposal({1, 2}, 5e-6), proposal({0, 1}, 3e-6), proposal({2, 3}, 3e-6)
    assert taken(left, both, right) == [both]


def test_what_pays_by_nothing_is_made_and_the_first_of_equals() -> None:
    first, second, other = proposal({0, 1}), proposal({1, 2}), proposal({5}, -1e-6)
    assert taken(second, first, other) == [first, other]
    assert taken(proposal({1}), wide := proposal({1, 2, 3})) == [wide]


def test_an_operand_that_another_kernel_hides_makes_rivals() -> None:
    cast, reader = proposal({1, 2}, 1e-6, hidden={1}), proposal({4}, 2e-6, reads={1})
    assert taken(cast, reader) == [reader]
    assert taken(proposal({1, 2}, 1e-6), reader) != [reader]


def test_matmuls_take_what_chains_leave() -> None:
    chain = proposal({1, 2, 3}, 1e-6)
    across, inside = proposal({0, 1}, 9e-6, MATMUL), proposal({3}, 9e-6, MATMUL)
    found = select([chain, across, inside, free := proposal({7}, 0.0, MATMUL)], lambda one: one)
    assert found.taken == [chain, free] and set(found.left) == {across, inside}


def test_parts_are_looked_at_where_the_whole_is_declined() -> None:
    whole, part = proposal({1, 2, 3}, work=ATTENTION), proposal({2}, 1e-6, MATMUL)
    no = Decline(Reason.NOT_PROFITABLE, "fused 3 us, unfused 2 us")
    found = select([whole, part], lambda one: no if one is whole else one)
    assert found.taken == [part] and found.declined == [(whole, no)]
    assert select([whole, part], lambda one: one).left == [part]


def test_the_report_says_what_lost_to_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated layer in front of a matmul, and all of that as one chain, which saves less."""

    def priced(work: Workload, *_: object, **__: object) -> Choice:
        s = {"GatedFFN": 1e-5, "Chain": 3e-5}.get(type(work).__name__, 5e-5)
        fused, apart = (Prediction(x, 0, 0, 1, "launch") for x in (s, 5e-5))
        prediction = RangePrediction(None, 16, fused, apart, fused)
        return Choice(PlanTable.single(TilePlan(1, 1, 1)), (prediction,))

    monkeypatch.setattr(block_round, "choose", priced)
    monkeypatch.setattr(driver, "build_prim_func", lambda *_: EMPTY)
    body = "g = R.nn.silu(R.matmul(x, W)); d = R.multiply(g, R.matmul(x, V)); y = R.matmul(d, U)"
    mod = module([Chain("ffn", "x[24,32] W[32,48] V[32,48] U[48,32]", body, "y", {}, "float16")])
    decisions: list[Decision] = []
    options = FuseOptions(make_target("h200"), decisions=decisions, backend="triton")
    FusePatterns(options)(relax.transform.CanonicalizeBindings()(mod))
    assert [d.pattern for d in decisions if d.fused] == ["FuseGatedFFN", "FuseMatmulEpilogue"]
    (lost,) = (d for d in decisions if not d.fused)
    assert lost.pattern == "FuseChains" and lost.decline.reason is Reason.OVERLAP
    assert lost.decline.detail.endswith(
        "is computed by the kernel of d: FuseGatedFFN saves 20 us more"
    )
