"""Plans that unpack vectors of words: which there are, what they need, and when they are taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import Choice, candidates, choose, predict, violations
from relax_fusion.estimator.families.words import FAMILY
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware.devices import generic_cpu
from relax_fusion.workload import GatedFFN, NormMatmul, Packed, Projection

from ..support.estimator_cases import AVX2, AVX512, RMS, ROWS

Q4 = Packed(4, 32, 7)
Q4_KN = replace(Q4, axis=-2)


def packed(form: Packed | None = Q4, layout: str = "nk", k: int = 2048, n: int = 2560):
    return NormMatmul(ROWS, k, (Projection(n, layout, packed=form),), RMS, "float16", "float16")


GATED = GatedFFN(ROWS, 2048, 5632, "nk", True, True, "silu", RMS, "float32", "float32", packed=Q4)


def families(work, dev=AVX512):
    return {plan.family for plan in candidates(work, dev)}


@pytest.mark.parametrize("dev", [AVX2, AVX512])
@pytest.mark.parametrize("work", [packed(), GATED], ids=["projection", "gated"])
def test_few_rows_take_words_and_many_take_panels(work, dev):
    choice = choose(work, dev)
    assert isinstance(choice, Choice)
    taken = [choice.plans.plan_for(rows).family for rows in (1, 4, 64, 1000)]
    assert taken == [FAMILY, FAMILY, "panels", "panels"]


@pytest.mark.parametrize(
    "work",
    [
        packed(None),
        packed(Q4_KN, "kn"),
        packed(replace(Q4, axis=-2)),
        packed(Packed(4, 24, 7), k=2040),
        packed(Packed(3, 32, 3)),
    ],
    ids=["as they are", "lie along n", "packed along n", "three words a group", "ragged"],
)
def test_others_are_not_unpacked_by_words(work):
    found = families(work)
    assert FAMILY not in found and found


def test_the_lanes_hold_whole_groups():
    def lanes(form, k):
        work = packed(form, k=k)
        return {plan.lanes for plan in candidates(work, AVX512) if plan.family == FAMILY}

    assert lanes(Q4, 2048) == {16}
    assert lanes(Q4, 2048 + 64) == {8}  # 264 words
    assert lanes(Packed(4, 64, 7), 2048) == {16}
    assert lanes(Packed(4, 256, 7), 2048) == {16}
    assert lanes(Packed(3, 40, 3), 2040) == {4}  # 51 groups of four words


def test_weights_are_paid_as_they_are_stored():
    """At one row both are bound by the weights: 4.5 bits against 32."""
    times = []
    for form in (replace(Q4, scale_dtype="float32"), None):
        weight = Projection(32000, "nk", packed=form)
        work = NormMatmul(1, 2048, (weight,), None, "float32", "float32")
        choice = choose(work, AVX512, always=True)
        times.append(predict(work, choice.plans.plan_for(1), AVX512, 1).seconds)
    assert times[0] < times[1] / 2


@pytest.mark.parametrize(
    ("work", "columns"),
    [(packed(), 2), (packed(k=8192), 4), (GATED, 2), (replace(GATED, k=8192), 2)],
    ids=["four in a page", "each in its own", "gated", "gated, each in its own"],
)
def test_a_tile_has_the_columns_that_a_core_reads_at_once(work, columns):
    assert choose(work, AVX512, always=True).plans.plan_for(1).reg_n == columns


GOLDEN_COVE_US = {
    (1, 2048, 2048): 237,
    (1, 5632, 2048): 626,
    (1, 32000, 2048): 3663,
    (1, 4096, 4096): 920,
    (1, 2048, 5632): 604,
    (1, 4096, 11008): 2089,
    (2, 5632, 2048): 759,
    (4, 5632, 2048): 1087,
    (8, 5632, 2048): 2251,
}
"""Least of six rounds from memory on one core at 2.6 GHz."""


@pytest.mark.parametrize(("rows", "n", "k"), GOLDEN_COVE_US)
def test_prices_are_near_what_was_measured(rows, n, k):
    weight = Projection(n, "nk", packed=replace(Q4, scale_dtype="float32"))
    work = NormMatmul(rows, k, (weight,), None, "float32", "float32")
    dev = generic_cpu(cores=1, vector_bytes=64)
    plan = choose(work, dev, always=True).plans.plan_for(rows)
    predicted = predict(work, plan, dev, rows).seconds * 1e6
    assert predicted == pytest.approx(GOLDEN_COVE_US[rows, n, k], rel=0.2)


GOOD = TilePlan(2, 32, 2048, reg_m=2, reg_n=4, lanes=16, family=FAMILY)


def test_a_good_plan_has_no_violations():
    assert violations(GOOD, packed(), AVX512) == ()


@pytest.mark.parametrize(
    ("plan", "work", "dev", "sentence"),
    [
        (GOOD, packed(None), AVX512, "weights are not packed, family 'words' unpacks them"),
        (replace(GOOD, block_m=4), packed(), AVX512, "block_m is 4, family 'words' has 2 here"),
        (replace(GOOD, block_k=256), packed(), AVX512, "block_k is 256, family 'words' has 2048"),
        (replace(GOOD, split_k=2), packed(), AVX512, "split_k is 2, backend 'tir' reduces in 1"),
        (
            GOOD,
            packed(Packed(3, 40, 3), k=2040),
            AVX512,
            "lanes is 16, vectors of whole groups of words",
        ),
        (replace(GOOD, reg_n=8, lanes=8), packed(), AVX2, "needs 26 vector registers"),
    ],
)
def test_violations(plan, work, dev, sentence):
    assert any(sentence in said for said in violations(plan, work, dev))
