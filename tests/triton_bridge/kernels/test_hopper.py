"""What the compiler makes of the kernels for Hopper, launched as plans ask.

They are in Gluon, which Triton's interpreter does not run; their numbers are checked on a GPU.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tvm import relax

from relax_fusion.compute import build_prim_func
from relax_fusion.estimator import violations
from relax_fusion.estimator.families.triton_matmul.tiles import smem_bytes
from relax_fusion.estimator.shape import matmul_shape
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.contraction import contraction_steps
from relax_fusion.triton_bridge.kernels.split_reduce import split_reduce
from relax_fusion.triton_bridge.specialize import specialize
from relax_fusion.triton_bridge.steps import FixedWeights
from relax_fusion.workload import DynamicDim, GatedFFN, NormMatmul, Projection, Rope

from ...support.slow import sampled
from .test_code import SIGNS, stack_bytes

H200 = device("h200")
ROWS = DynamicDim("rows")
ROPE = Rope(128, 5120, "float32", DynamicDim("s"))
PLAIN = NormMatmul(ROWS, 4096, (Projection(6144, "nk"),), None, "float16", "float16")
FULL = replace(PLAIN, outputs=(Projection(6144, "nk", ("bias", "gelu", "residual")),))
ACTIVATED = replace(PLAIN, outputs=(Projection(6144, "nk", ("bias", "gelu")),))
ADDED = replace(PLAIN, outputs=(Projection(6144, "nk", ("bias", "residual")),))
TWICE = replace(PLAIN, outputs=(Projection(6144, "nk", ("bias", "residual", "residual")),))
SCALED = replace(PLAIN, outputs=(Projection(6144, "nk", ("bias", 0.22, "scale", "residual")),))
KN = replace(PLAIN, outputs=(Projection(6144, "kn"),))
ROTATED = replace(PLAIN, outputs=(Projection(6144, "nk", ("bias",), ROPE),))
PART = replace(ROPE, features=256, rotary_dim=32, period=384)
PART_ROTATED = replace(PLAIN, outputs=(Projection(6144, "nk", ("bias",), PART),))
NEIGHBOURS = replace(ROPE, rotary_dim=64, pairing="neighbours")
TURNED = replace(PLAIN, outputs=(Projection(6144, "nk", ("bias",), NEIGHBOURS),))
TURNED_KN = replace(PLAIN, outputs=(Projection(6144, "kn", (), NEIGHBOURS),))
GATED = GatedFFN(ROWS, 4096, 14336, "nk", True, True, "silu", None, "float16", "float16", bias=True)
GATED_KN = replace(GATED, layout="kn", activation="gelu", merged=False)
QKV = replace(
    PLAIN,
    outputs=(
        Projection(4096, "nk", ("bias",), replace(ROPE, features=4096)),
        Projection(1024, "nk", ("bias",), replace(ROPE, features=1024)),
        Projection(1024, "nk"),
    ),
)
ODD, EVEN = (replace(PLAIN, outputs=(Projection(n, "nk", ("bias",)),)) for n in (6145, 6146))
ODD_FULL = replace(PLAIN, outputs=(Projection(6145, "nk", ("bias", "gelu", "residual")),))
TWO = replace(PLAIN, outputs=(ADDED.outputs[0], Projection(1000, "nk", ("gelu",))))


def persistent(columns: int, stages: int) -> TilePlan:
    return TilePlan(
        *(128, columns, 64), num_stages=stages, num_warps=8, backend="triton", family="persistent"
    )


CASES = {
    "persistent-three": (QKV, persistent(128, 6)),
    "persistent-two": (TWO, persistent(192, 5)),
    "256-columns": (ACTIVATED, persistent(256, 4)),
    "192-columns": (ADDED, persistent(192, 5)),
    "160-columns": (ADDED, persistent(160, 5)),
    "128-columns": (FULL, persistent(128, 6)),
    "128-columns-twice": (TWICE, persistent(128, 6)),
    "192-columns-twice": (TWICE, persistent(192, 5)),
    "192-columns-scaled": (SCALED, persistent(192, 5)),
    "256-columns-added": (ADDED, persistent(256, 4)),
    "128-columns-kn": (KN, persistent(128, 6)),
    "96-columns": (FULL, persistent(96, 6)),
    "64-columns": (FULL, persistent(64, 6)),
    "256-columns-odd": (ODD, persistent(256, 4)),
    "128-columns-odd": (ODD, persistent(128, 6)),
    "64-columns-odd": (ODD, persistent(64, 6)),
    "256-columns-even": (EVEN, persistent(256, 4)),
    "64-columns-odd-full": (ODD_FULL, persistent(64, 6)),
    "persistent-gated-odd": (replace(GATED, n=14335), persistent(128, 4)),
    "persistent-gated": (GATED, persistent(128, 4)),
    "persistent-gated-kn": (GATED_KN, persistent(64, 6)),
    "persistent-rope": (ROTATED, persistent(128, 6)),
    "persistent-rope-neighbours-160": (TURNED, persistent(160, 5)),
    "persistent-rope-neighbours-192": (TURNED, persistent(192, 5)),
    "persistent-rope-neighbours-kn": (TURNED_KN, persistent(128, 6)),
    "persistent-rope-part": (PART_ROTATED, persistent(128, 6)),
}


def compiled(
    work: NormMatmul | GatedFFN, plan: TilePlan, fixed: FixedWeights | None = None
) -> CompiledKernel:
    """Compile the last kernel that a plan launches but for a `split_reduce`."""
    assert violations(plan, work, H200) == ()
    func = build_prim_func(work, PlanTable.single(plan))
    types = [relax.TensorType(list(p.ty.shape), str(p.ty.dtype)) for p in func.params]
    count = len(work.graph.outputs)
    inputs = [relax.Var(f"p{i}", ty) for i, ty in enumerate(types[:-count])]
    if fixed is None:
        fixed = FixedWeights(inputs, leads=False)
    steps = contraction_steps(work, plan, inputs, 64, H200, {}, fixed)
    step = [s for s in steps if s.function is not split_reduce][-1]
    source, _ = specialize(
        step.function, step.args, step.constexprs, step.options, types[-count:], 90
    )
    return compile_kernels([source])[0]


DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize(("name", "dtype"), sampled(zip(CASES, itertools.cycle(DTYPES)), 3))
def test_tiles_are_copied_by_tma_and_sums_stay_in_registers(
    name: str, dtype: str, tmp_path: Path
) -> None:
    work, plan = CASES[name]
    kernel = compiled(replace(work, dtype=dtype, out_dtype=dtype), plan)
    text = kernel.ptx.decode()
    assert re.search(SIGNS["tensor copies"], text)
    assert re.search(SIGNS["wgmma"], text)
    assert not re.search(SIGNS["mma"], text)
    assert stack_bytes(kernel.image, tmp_path) == 0
    assert kernel.scratch_bytes == 0
    check_shared_memory(kernel, work, plan)


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(
    "name", sampled([*list(CASES)[::2], *(n for n in CASES if "-odd" in n)], 3)
)
def test_results_in_float32_need_no_more_shared_memory_than_estimated(name: str) -> None:
    work, plan = CASES[name]
    work = replace(work, out_dtype="float32")
    check_shared_memory(compiled(work, plan), work, plan)


def check_shared_memory(
    kernel: CompiledKernel, work: NormMatmul | GatedFFN, plan: TilePlan
) -> None:
    said = smem_bytes(plan, matmul_shape(work, pairs=False))
    assert kernel.shared_bytes <= said <= H200.smem_per_block_bytes


WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def test_a_gemv_requests_weights_before_the_wait_where_allowed() -> None:
    plan = TilePlan(1, 2, 4096, num_warps=4, backend="triton", family="gemv")
    for fixed, early in ((None, True), (FixedWeights(), False)):
        text = compiled(PLAIN, plan, fixed).ptx.decode()
        assert ("ld.global" in text[: text.index(WAIT)]) == early


def test_every_warp_group_of_a_persistent_kernel_waits() -> None:
    text = compiled(PLAIN, persistent(256, 4)).ptx.decode()
    assert text.count(WAIT) == 3 and text.count(LAUNCH) == 1
    first_copy = re.search(SIGNS["tensor copies"], text).start()
    assert text[:first_copy].rindex(LAUNCH) > text[:first_copy].rindex(WAIT)
