"""Tensor-core kernels for few rows: numbers without a GPU, what is declined, and their code."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm.target import Target

from relax_fusion.dlight_rules.tensor_cores.few_rows_kernel import FewRowsKernel
from relax_fusion.dlight_rules.tensor_cores.few_rows_ring import Launch
from relax_fusion.estimator import candidates, choose, footprint, predict, violations
from relax_fusion.estimator.families.few_rows import tiles as few_rows
from relax_fusion.estimator.prediction import ceil_div
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import DeviceSpec
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import GatedFFN, NormMatmul, WeightLayout
from relax_fusion.workload.reference import numpy_dtype

from ..support.contraction_cases import COLUMNS, HALF, RMS, ROWS, Case, few_rows_cases, plain
from ..support.slow import sampled
from .compiled import compiled, cuda, divergent_barriers, kernels, scheduled
from .few_rows_on_cpu import WarpsBlock
from .generic_on_cpu import Launches, of_few_rows
from .nodes import Node

Work = NormMatmul | GatedFFN
H200 = device_of(make_target("h200"))
LLAMA = replace(HALF, rows=1, k=4096, outputs=(plain(6144),), norm=RMS)


def plans(work: Work) -> list[TilePlan]:
    """Return the plans of the family for a workload."""
    return [plan for plan in candidates(work, H200, "tir") if plan.family == few_rows.FAMILY]


def small_plans(work: Work) -> list[TilePlan]:
    """Return the narrowest plans of each height with fewest and with most warps, and a split one.

    Eight warps have more threads than the least tile has elements.
    """
    found = sorted(plans(work), key=lambda p: (p.block_n, -p.num_stages))
    alone = [p for p in found if work.norm is None or few_rows.normalises(p)]
    whole = [p for p in reversed(alone) if p.split_k == 1]
    split = [p for p in alone if p.split_k > 1]
    return [*{(p.block_m, p.num_warps): p for p in whole}.values(), *split[:1]]


def computed(case: Case, plan: TilePlan) -> list[np.ndarray]:
    """Return the results of a case, by its kernels on numpy."""
    func = scheduled(case.work, plan, cuda())["main"]
    inputs = [array.copy().reshape(-1) for array in case.inputs().values()]
    shapes = [(shape, numpy_dtype(dtype)) for shape, dtype in case.out_shapes()]
    results = [np.full(np.prod(shape), np.nan, dtype) for shape, dtype in shapes]
    tensors = {p.name: a for p, a in zip(func.params, [*inputs, *results], strict=True)}
    if case.work.norm and not few_rows.normalises(plan):  # the kernel in front is not run
        rows = case.normalised(case.inputs(), "float32")
        tensors["x_norm"] = rows.astype(tensors["x"].dtype).reshape(-1)
    Launches(tensors, case.sizes, of_few_rows).run(Node(func.body))
    return [result.reshape(shape) for result, (shape, _) in zip(results, shapes, strict=True)]


@pytest.mark.parametrize("case", sampled(few_rows_cases(), 3), ids=lambda case: case.name)
def test_numbers(case: Case) -> None:
    chosen = small_plans(case.work)
    assert chosen
    for plan in chosen:
        case.check(case.inputs(), computed(case, plan), stored=True)


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_statistics_of_rows_are_added_up_in_turns(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "AT_ONCE", 3)
    case = next(case for case in few_rows_cases() if case.name == f"few_{name}")
    assert case.rows % 3 and case.rows > 3
    plan = next(p for p in small_plans(case.work) if p.block_m == 8)
    assert "row_ptr[24]" in kernels(compiled(case.work, plan)[0])[0]
    case.check(case.inputs(), computed(case, plan), stored=True)


@pytest.mark.parametrize("columns", [3, 40])
def test_columns_may_be_dynamic(columns: int) -> None:
    outputs = (plain(COLUMNS, "bias", "residual"),)
    work = replace(HALF, rows=3, outputs=outputs, norm=RMS)
    case = Case("dynamic", work, dynamic_columns=columns)
    for plan in small_plans(work):
        case.check(case.inputs(), computed(case, plan), stored=True)


def test_numbers_behind_a_norm() -> None:
    case = next(case for case in few_rows_cases() if case.name == "few_three")
    plan = next(p for p in plans(case.work) if not few_rows.normalises(p))
    case.check(case.inputs(), computed(case, plan), stored=True)


def test_a_cluster_reads_just_the_sums_that_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last barrier orders no reads: a block might be gone before one that no store waits for
    case = next(case for case in few_rows_cases() if case.name == "few_nk")
    plan = next(p for p in small_plans(case.work) if p.split_k > 1)
    load, found = WarpsBlock.load_peer, []

    def noted(block: WarpsBlock, args: Any) -> None:
        found.append(len(block.active))
        load(block, args)

    monkeypatch.setattr(WarpsBlock, "load_peer", noted)
    computed(case, plan)
    columns = -(-case.work.outputs[0].n // plan.block_n) * plan.block_n
    assert sum(found) == case.rows * columns * plan.num_warps * plan.split_k


def test_the_check_of_numbers_notices_a_wrong_column(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FewRowsKernel.column
    monkeypatch.setattr(FewRowsKernel, "column", lambda self, t, h: right(self, t, 1 - h))
    case = few_rows_cases()[0]
    with pytest.raises(AssertionError, match="few_nk"):
        case.check(case.inputs(), computed(case, small_plans(case.work)[0]))


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("inside", [True, False])
def test_weights_pass_no_barrier(layout: WeightLayout, inside: bool) -> None:
    work = replace(LLAMA, outputs=(plain(6144, layout=layout),))
    plan = next(p for p in plans(work) if few_rows.normalises(p) == inside)
    found = kernels(compiled(work, plan)[0])
    assert len(found) == (1 if inside else 2)  # the norm in front
    product = next(kernel for kernel in found if "mma_sync" in kernel)
    loop = product[product.rindex("cp_async_wait_group") : product.rindex("mma_sync")]
    assert "cuda_warp_sync" in loop
    assert "__syncthreads" not in loop
    assert divergent_barriers(product) == 0
    assert "w0_ptr[" in product and "*(uint4*)(w0" not in product  # by copies alone


def test_launches_ask_for_the_shared_memory_of_the_plan() -> None:
    some = plans(LLAMA)[::29]
    assert some
    for plan in some:
        asked = re.findall(
            r"T\.int64\((\d+)\), launch_params=.*dyn_shared", compiled(LLAMA, plan)[1]
        )
        share = Launch.on(H200, ceil_div(6144, plan.block_n) * plan.split_k).shared_bytes
        assert [int(size) for size in asked] == [
            max(footprint(LLAMA, plan, H200).smem_bytes, share)
        ]


def test_nothing_is_launched_for_no_rows() -> None:
    work = replace(LLAMA, rows=ROWS)
    text = compiled(work, next(p for p in plans(work) if not few_rows.normalises(p)))[1]
    assert text.count("call_ffi_kernel") == 2
    assert text.index("T.int64(0) < rows") < text.index("call_ffi_kernel")
    assert "T.int64(0) < rows" not in compiled(LLAMA, plans(LLAMA)[0])[1]


def test_plans_fit_and_say_what_they_occupy() -> None:
    found = plans(LLAMA)
    assert {p.block_m for p in found} == {8}
    assert {few_rows.normalises(p) for p in found} == {True, False}
    for plan in found:
        foot = footprint(LLAMA, plan, H200)
        assert foot.threads == 32 * plan.num_warps
        assert foot.smem_bytes <= H200.smem_per_block_bytes
        copied = (plan.block_m + plan.block_n) * plan.block_k * 2 * plan.num_stages
        assert foot.smem_bytes >= copied
    assert {p.block_m for p in plans(replace(LLAMA, rows=ROWS))} == {8, 16}


PLAN = TilePlan(
    *(8, 16, 512), reg_m=8, reg_n=16, lanes=8, num_stages=3, num_warps=8, family=few_rows.FAMILY
)
WRONG = [
    ({"block_m": 24}, "block_m is 24, family 'few_rows' has tiles of 8 or 16"),
    ({"block_n": 24, "reg_n": 24}, "block_n is 24, family 'few_rows' takes multiples of 16"),
    ({"block_k": 256}, "block_k is 256, family 'few_rows' takes multiples of 512"),
    ({"lanes": 4}, "lanes is 4, family 'few_rows' copies 8 elements at once"),
    ({"num_stages": 1}, "num_stages is 1, family 'few_rows' needs 2"),
    ({"num_warps": 0}, "num_warps is 0, a kernel for the H200 needs 1"),
    ({"split_k": 9}, "split_k is 9, family 'few_rows' has up to 8 parts of k here"),
    ({"num_stages": 20}, "shared memory"),
]


@pytest.mark.parametrize(("changed", "sentence"), WRONG)
def test_wrong_plans_are_told(changed: dict[str, int], sentence: str) -> None:
    assert violations(PLAN, LLAMA, H200) == ()
    assert any(sentence in said for said in violations(replace(PLAN, **changed), LLAMA, H200))


def test_k_is_split_where_there_are_few_tiles() -> None:
    narrow = replace(LLAMA, rows=16, k=16384, outputs=(plain(64),), norm=None)
    parts = {p.split_k for p in plans(narrow)}
    assert parts == {1, 2, 4, 8}
    best = min(plans(narrow), key=lambda p: predict(narrow, p, H200, 16).seconds)
    assert best.split_k == 8  # 8.5 us, else 13.4
    assert {p.split_k for p in plans(replace(narrow, outputs=(plain(4096),)))} == {1}
    a100 = device_of(make_target("a100"))
    assert {p.split_k for p in candidates(narrow, a100, "tir")} == {1}
    said = violations(replace(PLAN, split_k=2), narrow, a100)
    assert any("A100 80GB SXM has no clusters" in sentence for sentence in said)


def test_many_rows_are_within_the_grid() -> None:
    text = compiled(replace(LLAMA, rows=1 << 20, norm=None), PLAN)[1]
    assert re.findall(r'launch_params=\["blockIdx.x", "threadIdx.x"', text)
    assert violations(PLAN, replace(LLAMA, rows=1 << 20), H200) == ()


REFUSED = [
    (replace(LLAMA, dtype="float32"), H200, "dtype is float32"),
    (replace(LLAMA, k=4100), H200, "copies 8 elements at once, which does not divide 4100"),
    (replace(LLAMA, outputs=(plain(6145, layout="kn"),)), H200, "does not divide 6145"),
    (LLAMA, device_of(Target("metal")), "needs cp.async and mma.m16n8k16 of float16"),
]


@pytest.mark.parametrize(("work", "dev", "sentence"), REFUSED)
def test_what_the_family_has_no_plans_for(work: Work, dev: DeviceSpec, sentence: str) -> None:
    assert not [p for p in candidates(work, dev, "tir") if p.family == few_rows.FAMILY]
    assert any(sentence in said for said in violations(PLAN, work, dev))


def test_a_norm_that_others_need_is_done_in_front() -> None:
    for norm in (replace(RMS, residual=True), replace(RMS, returns_norm=True)):
        work = replace(LLAMA, norm=norm)
        assert not any(few_rows.normalises(p) for p in plans(work))
        assert any("no norm" in said for said in violations(replace(PLAN, reg_m=1), work, H200))


def test_few_rows_get_these_plans() -> None:
    for name in ("h200", "a100"):
        table = choose(
            replace(LLAMA, rows=ROWS), device_of(make_target(name)), always=True, backend="tir"
        ).plans
        assert [table.plan_for(rows).family for rows in (2, 8, 16)] == [few_rows.FAMILY] * 3
        assert table.plan_for(17).family != few_rows.FAMILY
    one = replace(LLAMA, rows=1)
    assert few_rows.normalises(min(plans(one), key=lambda p: predict(one, p, H200, 1).seconds))
