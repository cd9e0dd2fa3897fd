"""The contraction kernels of the Triton back end, run on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from relax_fusion.estimator import Problem, candidates
from relax_fusion.estimator.families.triton_matmul.family import TritonMatmul
from relax_fusion.estimator.registry import is_launched
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.hardware.target import device_of
from relax_fusion.workload import Adapter, DynamicDim, GatedFFN, NormMatmul, Rope

from ..support.contraction_cases import RMS, Case, cases, plain, turned
from ..support.gpu import gpu_target, needs_gpu
from ..support.triton_modules import build_triton, run_triton

pytestmark = [pytest.mark.gpu, needs_gpu]

ROWS = DynamicDim("rows")
LARGER = NormMatmul(ROWS, 256, (plain(384),), RMS, "float16", "float16")
LARGER_GATED = GatedFFN(ROWS, 256, 192, "nk", True, True, "silu", RMS, "bfloat16", "bfloat16")
ROPE = Rope(64, 256, "float32", DynamicDim("s"))
LARGER_ROTATED = replace(LARGER, outputs=(turned(ROPE, 384, "bias"),))
QUERIES, KEYS = (turned(replace(ROPE, features=n), n, "bias") for n in (384, 128))
LARGER_TOGETHER = replace(LARGER, outputs=(QUERIES, KEYS, plain(128)))
LARGER_TWO = replace(LARGER, norm=None, outputs=(plain(192, "bias"), plain(72, "gelu", "residual")))
ADAPTED = [replace(plain(384, "bias", "residual"), adapter=Adapter(r, "nk", 0.5)) for r in (16, 72)]
LARGER_ADAPTED = replace(LARGER, norm=None, outputs=(*ADAPTED, plain(72)))
UNALIGNED = replace(LARGER, outputs=(plain(385, "bias"),))
UNALIGNED_WORKS = {
    "unaligned": UNALIGNED,
    "unaligned_float32": replace(UNALIGNED, out_dtype="float32"),
    "unaligned_pairs": replace(UNALIGNED, outputs=(plain(386, "bias", "gelu"),)),
    "unaligned_residual": replace(UNALIGNED, outputs=(plain(390, "bias", "gelu", "residual"),)),
    "unaligned_gated": replace(LARGER_GATED, n=193),
}
LARGER_WORKS = {
    **UNALIGNED_WORKS,
    "norm_matmul": LARGER,
    "gated": LARGER_GATED,
    "rotated": LARGER_ROTATED,
    "together": LARGER_TOGETHER,
    "two": LARGER_TWO,
    "adapted": LARGER_ADAPTED,
    "norm_adapted": replace(LARGER, outputs=(ADAPTED[0], ADAPTED[0])),
}


def _halved(case: Case) -> Case:
    """Return the case in a dtype of tensor cores: half of them in float16."""
    work = case.work
    if work.dtype == "float32":
        dtype = "float16" if len(case.name) % 2 else "bfloat16"
        work = replace(work, dtype=dtype, out_dtype=dtype)
    return replace(case, work=work)


H200 = device("h200")
CASES = [c for c in map(_halved, cases()) if TritonMatmul().refuses(Problem(c.work, H200)) is None]


def _one_of_each(work: NormMatmul | GatedFFN) -> list[TilePlan]:
    """Return a plan of every family, and of every way to reduce k, that fits."""
    found = {}
    for plan in candidates(work, device_of(gpu_target()), "triton"):
        if is_launched(plan):
            found.setdefault(
                (plan.family, plan.split_k, plan.block_m > 16, plan.block_n % 64), plan
            )
    return list(found.values())


def _check_rows(work: NormMatmul | GatedFFN, cases: Mapping[PlanTable, Iterable[Case]]) -> None:
    """Compile all tables of plans at once, which is faster, and run each with its cases."""
    outputs = len(work.graph.outputs)
    executable = build_triton(work, *cases, outputs=outputs, target=gpu_target())
    for i, each in enumerate(cases.values()):
        name = f"main{i}" if len(cases) > 1 else "main"
        for case in each:
            arrays = case.inputs()
            case.check(arrays, run_triton(executable, list(arrays.values()), name), stored=True)


def _with_rows(work: NormMatmul | GatedFFN, plans: PlanTable, *sizes: int) -> list[Case]:
    return [Case(f"{plans.key} {rows} rows", work, rows) for rows in sizes]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_family_matches_reference(case: Case) -> None:
    tables = map(PlanTable.single, _one_of_each(case.work))
    _check_rows(case.work, {table: [case] for table in tables})


SHARES = 8  # of the candidates, for as many workers


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("work", LARGER_WORKS.values(), ids=LARGER_WORKS)
def test_every_candidate_matches_reference(work: NormMatmul | GatedFFN, share: int) -> None:
    cases = {}
    for plan in list(candidates(work, device_of(gpu_target()), "triton"))[share::SHARES]:
        table = PlanTable.single(plan)
        cases[table] = _with_rows(work, table, *((1, 5) if plan.family == "gemv" else (3, 300)))
    _check_rows(work, cases)


@pytest.mark.parametrize("work", LARGER_WORKS.values(), ids=LARGER_WORKS)
def test_ranges_are_picked_at_run_time(work: NormMatmul | GatedFFN) -> None:
    plans = _one_of_each(work)
    uppers = [1, 16, 64, *range(100, 1000, 25)][: len(plans) - 1]
    table = PlanTable(tuple(zip([*uppers, None], plans, strict=True)))
    sizes = (1, 2, 16, 17, 64, 65, 100, 101, 257, 1000)
    _check_rows(work, {table: _with_rows(work, table, *sizes)})
