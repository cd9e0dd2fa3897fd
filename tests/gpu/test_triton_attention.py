"""The attention kernels of the Triton back end, run on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest

from relax_fusion.estimator import Problem, candidates
from relax_fusion.estimator.families.triton_attention.family import TritonAttention
from relax_fusion.estimator.registry import is_launched
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import DeviceSpec, device
from relax_fusion.hardware.target import device_of
from relax_fusion.workload import Attention, DynamicDim

from ..support.attention_cases import Case, in_half
from ..support.gpu import gpu_target, needs_gpu
from ..support.triton_modules import build_triton, run_triton
from .triton_attention_cases import LARGER, larger_cases

pytestmark = [pytest.mark.gpu, needs_gpu]

H200 = device("h200")
SMALL = [
    c
    for c in in_half(("bfloat16", "float16"))
    if TritonAttention().refuses(Problem(c.work, H200)) is None
]
BATCH, QUERIES, KEYS = DynamicDim("batch"), DynamicDim("q_len"), DynamicDim("kv_len")


def _found(work: Attention, dev: DeviceSpec) -> dict[tuple[str, bool], list[TilePlan]]:
    """Return the candidates by family, and by whether they cut the keys into parts."""

    def kind(plan: TilePlan) -> tuple[str, bool]:
        return plan.family, plan.split_k > 1

    plans = [p for p in candidates(work, dev, "triton") if is_launched(p)]
    return {k: list(group) for k, group in groupby(sorted(plans, key=kind), kind)}


def _one(case: Case, plans: list[TilePlan]) -> TilePlan:
    """Return one of `plans`, for different cases different ones."""
    return plans[sum(map(ord, case.name)) % len(plans)]


def _check(case: Case, *tables: PlanTable) -> None:
    executable = build_triton(case.work, *tables, outputs=1, target=gpu_target())
    for i in range(len(tables)):
        _run(case, executable, f"main{i}" if len(tables) > 1 else "main")


def _run(case: Case, executable, function: str = "main") -> None:
    arrays = case.inputs()
    inputs = [*arrays.values(), *([case.lengths[2]] if case.work.kv_prefix else [])]
    (got,) = run_triton(executable, inputs, function)
    case.check(arrays, got, stored=True)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_small_cases_match_reference(case: Case) -> None:
    kinds = list(_found(case.work, device_of(gpu_target())).values())
    _check(case, PlanTable.single(_one(case, kinds[SMALL.index(case) % len(kinds)])))


@pytest.mark.parametrize("case", larger_cases(), ids=lambda case: case.name)
def test_every_family_matches_reference(case: Case) -> None:
    families: dict[str, list[TilePlan]] = {}
    for (family, _), plans in _found(case.work, device_of(gpu_target())).items():
        families.setdefault(family, []).append(_one(case, plans))
    _check(case, *(PlanTable.single(_one(case, plans)) for plans in families.values()))


SHARES = 15  # of the candidates, for as many workers


@pytest.mark.parametrize("share", range(SHARES))
def test_every_tile_matches_reference(share: int) -> None:
    tiles = {}
    for head_dim in (64, 128):
        work = replace(LARGER, head_dim=head_dim, v_dim=head_dim, causal="bottom_right")
        for plan in candidates(work, device_of(gpu_target()), "triton"):
            key = plan.family, plan.block_m, plan.block_n, plan.num_warps
            tiles.setdefault(key, (work, plan))
    for work, plan in list(tiles.values())[share::SHARES]:
        _check(Case(plan.key, work), PlanTable.single(plan))


@pytest.mark.parametrize("prefix", [False, True])
def test_ranges_are_picked_at_run_time(prefix: bool) -> None:
    work = replace(
        LARGER, batch=BATCH, q_len=QUERIES, kv_len=KEYS, causal="bottom_right", kv_prefix=prefix
    )
    plans = [found[0] for found in _found(work, device_of(gpu_target())).values()]
    uppers = [1, 16, 64, 100, 200][: len(plans) - 1]
    table = PlanTable(tuple(zip([*uppers, None], plans, strict=True)))
    executable = build_triton(work, table, outputs=1, target=gpu_target())
    sizes = [(1, 1, 1), (3, 1, 900), (1, 16, 16), (2, 17, 700), (1, 64, 333), (1, 150, 150)]
    for batch, q_len, kv_len in [*sizes, (2, 300, 555), (1, 1, 5000), (1, 4, 0)]:
        lengths = {"batch": batch, "q_len": q_len, "kv_len": kv_len}
        case = Case("ranges", work, {**lengths, "kv_capacity": kv_len + 37})
        _run(case, executable)
