"""Products that begin while a norm is computed: the order of their kernels, and their launches."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from relax_fusion.estimator import candidates, footprint
from relax_fusion.estimator.families.few_rows import tiles as few_rows
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import GatedFFN, NormMatmul

from ..support.contraction_cases import HALF, HALF_GATED, RMS, ROWS, plain
from .compiled import compiled
from .test_attention import kernels

Work = NormMatmul | GatedFFN
H200 = device_of(make_target("h200"))
NORMED = replace(HALF, rows=ROWS, k=4096, outputs=(plain(512), plain(64)), norm=RMS)
WAIT, ANNOUNCE = "griddepcontrol_wait()", "griddepcontrol_launch_dependents()"


def plan_of(work: Work, family: str, inside: bool = False) -> TilePlan:
    """Return the smallest plan of a family with a kernel for the norm, or with it `inside`."""
    found = [p for p in candidates(work, H200) if p.family == family]
    fitting = [p for p in found if (family == few_rows.FAMILY and few_rows.normalises(p)) == inside]
    return min(fitting, key=lambda p: (p.block_m * p.block_n, p.num_stages))


def bodies(text: str) -> list[str]:
    """Return the statements of each kernel."""
    return [kernel[kernel.index("{") :] for kernel in kernels(text)]


def launches(host: str) -> list[str]:
    """Return the launch parameters of each kernel."""
    return re.findall(r"call_ffi_kernel\(.*launch_params=\[(.*?)\]", host)


@pytest.mark.parametrize("family", [few_rows.FAMILY, "mma", "wgmma"])
def test_products_begin_while_a_norm_is_computed(family: str) -> None:
    plan = plan_of(NORMED, family)
    text, host = compiled(NORMED, plan)
    check_shared_memory(NORMED, plan, text, host)
    norm, *products = bodies(text)
    assert norm.index(WAIT) < norm.index(ANNOUNCE) < norm.index("x_ptr")
    assert len(products) == 2
    for index, product in enumerate(products):
        assert product.count(WAIT) == 1
        assert ANNOUNCE not in product
        assert product.index(WAIT) < product.index("x_norm_ptr")
        assert (product.index(f"w{index}_ptr") < product.index(WAIT)) == (family == few_rows.FAMILY)
    found = launches(host)
    assert len(found) == 3
    assert all("programtic_dependent_launch" in params for params in found)


def test_every_kernel_of_every_range_waits() -> None:
    few, one = (
        plan_of(NORMED, few_rows.FAMILY),
        plan_of(replace(NORMED, rows=1), few_rows.FAMILY, True),
    )
    table = PlanTable(((1, one), (16, few), (None, plan_of(NORMED, "mma"))))
    for body in bodies(compiled(NORMED, table)[0]):
        assert body.count(WAIT) == 1


@pytest.mark.parametrize(
    ("target", "inside", "has_norm"),
    [("a100", False, True), ("h200", True, True), ("h200", False, False)],
    ids=["older device", "one kernel", "no norm"],
)
def test_other_launches_are_plain(target: str, inside: bool, has_norm: bool) -> None:
    work = replace(NORMED, outputs=(plain(512),), rows=1, norm=RMS if has_norm else None)
    text, host = compiled(work, plan_of(work, few_rows.FAMILY, inside), make_target(target))
    assert len(bodies(text)) == (2 if has_norm and not inside else 1)
    assert "griddepcontrol" not in text
    assert "programtic" not in host


def check_shared_memory(work: Work, plan: TilePlan, text: str, host: str) -> None:
    """Assert that the kernels of products have the dynamic shared memory of the plan, and no other.

    TVM lets a kernel have more than 48 KB only if its dynamic shared memory alone is more.
    """
    sizes = re.findall(r"T\.int64\((\d+)\), launch_params=.*dyn_shared", host)
    assert set(sizes) == {str(footprint(work, plan, H200).smem_bytes)}
    for product in bodies(text)[-len(sizes) :]:
        assert "__shared__" not in product.replace("extern __shared__", "")


GATED = replace(HALF_GATED, rows=1, k=4096, n=64, norm=RMS)
FEW = TilePlan(
    *(8, 16, 256), reg_m=1, reg_n=16, lanes=8, num_stages=2, num_warps=4, family=few_rows.FAMILY
)


@pytest.mark.parametrize(
    "plan",
    [FEW, replace(FEW, num_warps=8, block_k=512, split_k=2)],
    ids=["a ring of less than 48 KB", "split"],
)
def test_shared_memory_is_all_dynamic(plan: TilePlan) -> None:
    check_shared_memory(GATED, plan, *compiled(GATED, plan))
