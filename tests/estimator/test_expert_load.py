"""Rows that go to experts unevenly: what was counted, the skew of it, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_fusion import PipelineError
from relax_fusion.estimator import Choice, choose
from relax_fusion.estimator.families.triton_experts import tiles_of
from relax_fusion.hardware import device
from relax_fusion.passes.options import FuseOptions
from relax_fusion.tuning.inputs import draw
from relax_fusion.validation import json_text
from relax_fusion.workload import DynamicDim, ExpertMatmul, Gate
from relax_fusion.workload.expert_load import ExpertLoad, likelihoods, read_expert_load

EVEN = ExpertMatmul(
    *(DynamicDim("rows"), 128, 8, 2048, 768, "nk", "bfloat16", "bfloat16"), gate=Gate()
)
SKEWED = replace(EVEN, skew=1.0)


def drawn(work: ExpertMatmul, rows: int) -> np.ndarray:
    """Return the experts of some rows, as they are drawn for tuning."""
    (ids,) = (o for o in work.graph.inputs if o.name == "ids")
    return draw(work, ids, {"rows": rows}).ravel()


def counted(work: ExpertMatmul, rows: int) -> np.ndarray:
    """Return how many of them go to each expert."""
    return np.bincount(drawn(work, rows), minlength=work.experts)


@pytest.mark.parametrize("skew", [0.0, 0.3, 1.0, 8.0])
def test_likelihoods_are_of_as_many_experts_as_a_row_has(skew: float) -> None:
    found = likelihoods(128, 8, skew)
    assert sum(found) == pytest.approx(8) and max(found) <= 1
    assert list(found) == sorted(found, reverse=True) and len(found) == 128
    assert likelihoods(4, 4, skew) == pytest.approx((1, 1, 1, 1))


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
def test_a_run_with_a_skew_is_told_by_it(skew: float) -> None:
    layer = counted(replace(EVEN, skew=skew), 4096)
    load = ExpertLoad(8, (tuple(map(int, layer)),))
    assert load.skew == pytest.approx(skew, abs=0.15)


def test_a_few_rows_are_not_taken_for_a_skew() -> None:
    few = counted(EVEN, 16)
    assert ExpertLoad(8, (tuple(map(int, few)),)).skew <= 0.3


@pytest.mark.parametrize("rows", [4, 64, 512])
def test_tiles_and_weights_are_those_of_uneven_rows(rows: int) -> None:
    every = drawn(SKEWED, 32 * rows).reshape(32, -1)
    found = np.array([np.bincount(ids, minlength=128) for ids in every])
    tiles = np.ceil(found / 16).sum(1).mean()
    assert tiles_of(SKEWED, rows, 16) == pytest.approx(tiles, rel=0.15)
    assert SKEWED.touched(rows) == pytest.approx((found > 0).sum(1).mean(), rel=0.05)
    assert SKEWED.bytes(rows=rows)["w0"] < EVEN.bytes(rows=rows)["w0"]


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_what_reads_fewer_weights_is_priced_below(name: str) -> None:
    even, skewed = (choose(work, device(name)) for work in (EVEN, SKEWED))
    assert isinstance(even, Choice) and isinstance(skewed, Choice)
    pairs = zip(even.predictions, skewed.predictions, strict=False)
    assert any(b.fused.seconds < a.fused.seconds for a, b in pairs)
    assert EVEN.key != SKEWED.key


def test_names_of_even_ones_are_as_they_were() -> None:
    assert "skew" not in repr(EVEN) and "skew=1.0" in repr(SKEWED)


def test_only_experts_of_the_model_that_was_counted_have_its_skew(tmp_path: Path) -> None:
    load = ExpertLoad(8, (tuple(map(int, counted(SKEWED, 512))),))
    file = tmp_path / "load.json"
    file.write_text(json_text(load))
    assert read_expert_load(file) == load
    options = FuseOptions(expert_load=load)
    assert options.skew(128, 8) == load.skew > 0.8
    assert options.skew(128, 4) == options.skew(64, 8) == FuseOptions().skew(128, 8) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"chosen": 2, "counts": []}', "layers have \\[\\] experts"),
        ('{"chosen": 2, "counts": [[], []]}', "layers have \\[0, 0\\] experts"),
        ('{"chosen": 2, "counts": [[1, 1], [2]]}', "layers have \\[2, 1\\] experts"),
        ('{"chosen": 2, "counts": [[1, 2, 2]]}', "layer 0 are 5 in all, 2 at most"),
        ('{"chosen": 2, "counts": [[3, 1, 0]]}', "layer 0 are 4 in all, 3 at most"),
        ('{"chosen": 2, "counts": [[0, 0]]}', "layer 0 are 0 in all"),
        ('{"chosen": 0, "counts": [[1]]}', "chosen is 0; must be greater"),
        ('{"chosen": 1, "counts": [[-1]]}', "is -1; must be greater"),
        ('{"chosen": 1}', "the field 'counts' is missing"),
        ("[", "load.json"),
    ],
)
def test_counts_of_no_run_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(PipelineError, match=message):
        read_expert_load(file)
    with pytest.raises(PipelineError, match=r"absent.json cannot be read: No such file"):
        read_expert_load(tmp_path / "absent.json")
