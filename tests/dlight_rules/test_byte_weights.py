"""Kernels of weights that are numbers of a byte: which instructions they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import ir, s_tir, tirx

from relax_fusion.compute import contraction_prim_func
from relax_fusion.dlight_rules.cpu.contraction import schedule_cpu
from relax_fusion.dlight_rules.tensor_cores.contraction import emit
from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.few_rows.packed import PackedPlan
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.matching.expressions import found_in
from relax_fusion.workload import NormMatmul, Packed, Projection

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
BYTES = {
    "e4m3": Packed(8, -1, 0, E4M3, "", number=E4M3),
    "e4m3 in words": Packed(8, -1, 0, "uint32", "float32", number=E4M3, lines=-1),
    "e4m3 of blocks": Packed(8, 128, 0, E4M3, "float32", number=E4M3, lines=128),
    "e5m2": Packed(8, -1, 0, E5M2, "float32", number=E5M2),
    "int8": Packed(8, -1, 0, "int8", number="int8"),
    "uint8": Packed(8, 64, 128, "uint8"),
}


def work(name: str) -> NormMatmul:
    projection = Projection(64, "nk", packed=BYTES[name])
    return NormMatmul(1, 256, (projection,), None, "float16", "float16")


def emitted(name: str, target: str) -> tuple[list[str], int]:
    """Return the names of the instructions of a kernel, and how many numbers it makes of bytes."""
    plan = next(
        p
        for p in candidates(work(name), device_of(make_target(target)), "tir")
        if isinstance(p, PackedPlan) and (p.block_m, p.block_n, p.num_stages) == (8, 16, 2)
    )
    body = emit(work(name), plan, make_target(target)).body
    called = [str(call.op.name).removeprefix("tirx.ptx.") for call in found_in(body, ir.Call)]
    casts = [f"{cast.value.ty.dtype} {cast.ty.dtype}" for cast in found_in(body, tirx.Cast)]
    numbers = ("int8", "float8_e4m3fn", "float8_e5m2", "uint8")
    one = [c for c in casts if c.split()[0] in numbers and "float" in c.split()[1]]
    return called, len(one)


@pytest.mark.parametrize("name", BYTES)
def test_two_numbers_are_made_at_once(name: str) -> None:
    """A thread has 32 numbers of each of two columns, in a step of the loop that is unrolled."""
    called, by_one = emitted(name, "h200")
    floats = sum(call == "cvt_f16x2_f8x2" for call in called)
    assert not by_one
    assert floats == (32 if "e4m3" in name else 0)


def test_what_has_no_such_instruction_makes_one_by_one() -> None:
    called, by_one = emitted("e4m3", "a100")
    assert "cvt_f16x2_f8x2" not in called and by_one == 64


@pytest.mark.parametrize("name", ["e4m3", "e4m3 of blocks", "e5m2", "int8", "uint8"])
def test_a_cpu_sums_bytes_along_k_by_vectors(name: str) -> None:
    """Whatever scales follow: they are read last, and do not tell how the weight lies."""
    plan = TilePlan(1, 16, 256, reg_m=1, reg_n=4, lanes=8, family="cpu_tiles")
    func = schedule_cpu(contraction_prim_func(work(name), plan, gpu=False), plan)
    assert "acc0_rf_update" in [b.name_hint for b in found_in(func.body, s_tir.SBlock)]


@pytest.mark.parametrize("name", ["e4m3", "int8"])
def test_bytes_that_lie_across_k_are_not_for_a_gpu(name: str) -> None:
    turned = Projection(64, "kn", packed=replace(BYTES[name], axis=-2))
    found = candidates(
        replace(work(name), outputs=(turned,)), device_of(make_target("h200")), "tir"
    )
    assert not any(isinstance(plan, PackedPlan) for plan in found)
