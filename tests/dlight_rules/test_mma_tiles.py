"""Tiles of warps, drawn by a seed: right numbers at sizes that they do not divide, and code."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from relax_fusion.estimator import footprint, violations
from relax_fusion.estimator.families.tensor_cores.family import TensorCores
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.launch.nvrtc import NEEDED, find_nvrtc, require_nvrtc
from relax_fusion.workload import GatedFFN

from ..support.contraction_cases import HALF, HALF_GATED, ROWS, Case, plain
from ..support.estimator_cases import plans_of
from ..support.operand_cases import INTEGERS, TF32, IntegerCase, multiplied
from ..support.slow import sampled
from .test_mma import Work, computed, source_and_host

A100 = make_target("a100")
WORKS: dict[str, Work] = {
    "nk": HALF,
    "kn": replace(HALF, outputs=(plain(80, layout="kn"),)),
    "bfloat16": replace(HALF, dtype="bfloat16", out_dtype="bfloat16"),
    "gated": HALF_GATED,
    "int8": INTEGERS,
    "int8_kn": replace(INTEGERS, outputs=(plain(80, layout="kn"),)),
    "tf32": TF32,
    "tf32_kn": replace(TF32, outputs=(plain(80, layout="kn"),)),
}


def drawn(work: Work, target: str, count: int, seed: int) -> list[TilePlan]:
    """Return some plans for a device, each with another block."""
    dev = device_of(make_target(target))
    large = sized(work, ROWS, 4096, 4096)
    found = [p for p in plans_of(TensorCores(), large, dev) if not violations(p, large, dev)]
    blocks = {(p.block_m, p.block_n): p for p in Random(seed).sample(found, len(found))}
    return list(blocks.values())[:count]


def sized(work: Work, rows: object, n: int, k: int) -> Work:
    """Return a workload of other sizes."""
    if isinstance(work, GatedFFN):
        return replace(work, rows=rows, n=n, k=k)
    return replace(work, rows=rows, k=k, outputs=(replace(work.outputs[0], n=n),))


@pytest.mark.parametrize(("name", "seed"), sampled(product(WORKS, range(2)), 5))
def test_sizes_need_be_no_multiples_of_a_tile(name: str, seed: int) -> None:
    """With one row and some columns in the last tiles, and a step of k that is not whole."""
    work = WORKS[name]
    (plan,) = drawn(work, "a100", 1, seed)
    n, k = plan.block_n + plan.lanes, (plan.num_stages + 1) * plan.block_k + plan.lanes
    small = sized(work, plan.block_m + 1, n, k)
    case = (IntegerCase if name.startswith("int8") else Case)(f"{name} {plan.text}", small)
    arrays = case.inputs()
    case.check(multiplied(arrays) if name.startswith("tf32") else arrays, computed(case, plan))


@pytest.mark.skipif(find_nvrtc() is None, reason=f"needs {NEEDED}")
@pytest.mark.parametrize(
    ("name", "target", "which"),
    sampled(product(["nk", "gated", "int8_kn", "tf32"], ["a100", "rtx4090"], range(2)), 5),
)
def test_tiles_compile_for_their_device_and_stay_in_registers(
    name: str, target: str, which: int
) -> None:
    chosen, dev = make_target(target), device_of(make_target(target))
    work = sized(WORKS[name], ROWS, 4096, 4096)
    plan = drawn(WORKS[name], target, 2, seed=5)[which]
    source, _ = source_and_host(work, plan, chosen)
    log = require_nvrtc().log("tile", source, dev.arch)
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", log)]
    used = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    assert spilled and max(spilled) <= 64, plan
    assert max(used) <= footprint(work, plan, dev).registers_per_thread + 48, plan
