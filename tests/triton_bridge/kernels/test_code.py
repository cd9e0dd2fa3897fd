"""What the compiler makes of the kernels of matmuls, for GPUs that need not be there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.triton_bridge.contraction import contraction_steps
from relax_fusion.triton_bridge.launches import FixedWeights
from relax_fusion.workload import DynamicDim, GatedFFN, Norm, NormMatmul, Projection, Rope

from ...support.contraction_cases import OFFSET, RMS, plain, turned
from ...support.launches import H200, parameters
from ...support.slow import sampled
from .compiled import FEW, NARROW, SIGNS, compiled, compiled_step, stack_bytes

HALF = ("float16", "float16")
ROWS = DynamicDim("rows")
WORK = NormMatmul(ROWS, 4096, (plain(6144),), None, *HALF)
GATED = GatedFFN(ROWS, 4096, 14336, "nk", True, True, "silu", None, "bfloat16", "bfloat16")
ROPE = Rope(128, 5120, "float16")
PART = Rope(128, 256, "float16", rotary_dim=32, by_pair=True)
NEIGHBOURS = replace(ROPE, rotary_dim=64, by_pair=True, pairing="neighbours")
QKV = turned(replace(ROPE, features=6144), 6144), turned(replace(ROPE, features=1024), 1024)


def matmul(*outputs: Projection, norm: Norm | None = None, k: int = 4096) -> NormMatmul:
    return replace(WORK, outputs=outputs or WORK.outputs, norm=norm, k=k)


def kn(n: int = 6144, rope: Rope | None = None) -> Projection:
    return Projection(n, "kn", (), rope)


SUMMED = matmul(norm=replace(RMS, residual=True, returns_sum=True))
THREE = matmul(*QKV, plain(1024))
GEMV = TilePlan(1, 2, 4096, num_warps=4, family="gemv")
POINTER = TilePlan(16, 64, 64, num_stages=8, num_warps=4, family="pointer")
TALL = replace(POINTER, block_m=64)
OLDER = TilePlan(128, 128, 32, num_stages=4, num_warps=8, family="pointer")
SPLIT = replace(POINTER, split_k=3)
LAST = -1
"""The place of the launch that adds up parts of a reduction, among those of a workload."""

CASES = {
    "gemv": (matmul(norm=RMS), GEMV, {"loads"}),
    "gemv-gated": (replace(GATED, norm=RMS), replace(GEMV, block_k=2048), {"loads"}),
    "gemv-rope": (matmul(turned(ROPE, 6144), norm=RMS), GEMV, {"wide loads"}),
    "gemv-rope-neighbours": (matmul(turned(NEIGHBOURS, 6144), norm=RMS), GEMV, {"wide loads"}),
    "gemv-three": (replace(THREE, norm=RMS), GEMV, {"wide loads"}),
    "gemv-unit_offset": (matmul(norm=OFFSET), GEMV, {"loads"}),
    "norm": (SUMMED, TALL, {"loads"}),
    "pointer": (WORK, POINTER, {"copies", "wgmma"}),
    "pointer-rms": (matmul(norm=RMS), POINTER, {"copies", "wgmma"}),
    "pointer-gated": (GATED, POINTER, {"copies", "wgmma"}),
    "pointer-two": (matmul(plain(1024), plain(1024)), POINTER, {"copies", "wgmma"}),
    "pointer-three": (THREE, POINTER, {"copies", "wgmma"}),
    "pointer-rope": (matmul(turned(ROPE, 6144), norm=RMS), POINTER, {"copies", "wgmma"}),
    "pointer-rope-part": (matmul(turned(PART, 6144)), POINTER, {"copies", "wgmma"}),
    "pointer-rope-neighbours": (matmul(turned(NEIGHBOURS, 6144)), POINTER, {"copies", "wgmma"}),
    "pointer-kn": (matmul(kn()), POINTER, {"copies", "wgmma"}),
    "pointer-kn-1000": (matmul(kn(1000), k=776), POINTER, {"copies", "wgmma"}),
    "pointer-kn-two": (matmul(kn(), kn(1000)), POINTER, {"copies", "wgmma"}),
    "pointer-kn-rope": (matmul(kn(6144, ROPE)), POINTER, {"copies", "wgmma"}),
    "pointer-kn-neighbours": (matmul(kn(6144, NEIGHBOURS)), POINTER, {"copies", "wgmma"}),
    "pointer-kn-gated": (replace(GATED, layout="kn"), POINTER, {"copies", "wgmma"}),
    "pointer-kn-tall": (matmul(kn()), TALL, {"copies", "wgmma"}),
    "pointer-a100": (WORK, OLDER, {"copies", "mma"}),
    "pointer-rtx4090": (WORK, OLDER, {"copies", "mma"}),
    "reduce": (matmul(norm=RMS), SPLIT, set()),
    "reduce-rope": (matmul(turned(ROPE, 6144), norm=RMS), SPLIT, set()),
    "reduce-three": (replace(THREE, norm=RMS), SPLIT, set()),
}


@pytest.mark.parametrize("name", sampled(CASES))
def test_the_code_is_wide_and_stays_in_registers(name: str, tmp_path: Path) -> None:
    work, plan, signs = CASES[name]
    place = LAST if name.startswith("reduce") else 0
    dev = name.rpartition("-")[2] if plan is OLDER else "h200"
    kernel = compiled(work, plan, dev, place)
    text = kernel.ptx.decode()
    assert kernel.entry == ("row_norm" if name == "norm" else kernel.entry)
    assert place == 0 or kernel.entry == "split_reduce"
    for sign in signs:
        assert re.search(SIGNS[sign], text), sign
        assert sign not in NARROW or not re.search(NARROW[sign], text), sign
    if "wgmma" in signs:
        assert not re.search(SIGNS["mma"], text)
    assert stack_bytes(kernel.image, tmp_path) == 0 and kernel.scratch_bytes == 0
    assert ("griddepcontrol.wait" in text) == (dev == "h200"), "it is launched before its time"


@pytest.mark.parametrize("name", ["gemv", "gemv-gated"])
def test_warps_of_a_gemv_meet_once(name: str) -> None:
    work, plan, _ = CASES[name]
    # With all sums in one place: to write them and to read them (Triton 3.9: and to end)
    assert compiled(work, plan).ptx.count(b"bar.sync") <= 3


@pytest.mark.parametrize(("leads", "early"), [(False, True), (True, False)])
def test_a_gemv_requests_weights_before_the_wait_where_no_kernel_writes_them(
    leads: bool, early: bool
) -> None:
    inputs = parameters(WORK)
    fixed = FixedWeights() if leads else FixedWeights(inputs, leads=False)
    (step,) = contraction_steps(WORK, GEMV, inputs, FEW, H200, {}, fixed)
    text = compiled_step(step, WORK, H200).ptx.decode()
    assert ("ld.global" in text[: text.index("griddepcontrol.wait")]) == early
