"""Whatever makes a matmul's activation, its price has the activation in it, fused or apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import candidates, predict, predict_unfused, violations
from relax_fusion.estimator.baseline import price_alone
from relax_fusion.estimator.registry import FAMILIES
from relax_fusion.hardware import DeviceSpec, generic_cpu
from relax_fusion.workload import Atom, Chain, GatedFFN, NormMatmul, Packed, Projection
from relax_fusion.workload.roofline import slots_of

from ..support.estimator_cases import AVX2, AVX512, GPU, ROWS, plans_of
from ..support.matmul_chains import TwoMatmuls

MANY, K, N = 4096, 256, 2048
CHEAP, DEAR = "relu", "gelu"


def matmul(step: str, dtype: str, packed: Packed | None = None) -> NormMatmul:
    return NormMatmul(ROWS, K, (Projection(N, "nk", (step,), packed=packed),), None, dtype, dtype)


def words(step: str, dtype: str) -> NormMatmul:
    return matmul(step, dtype, Packed(4, 32, 7))


def gated(step: str, dtype: str) -> GatedFFN:
    return GatedFFN(ROWS, K, N, "nk", False, True, step, None, dtype, dtype)


def chain(step: str, dtype: str) -> Chain:
    return TwoMatmuls(MANY, K, 64, K, ("kn", "kn"), (step,), (step,), dtype, dtype).chain


def few(step: str, dtype: str) -> Chain:
    return TwoMatmuls(8, K, 64, K, ("kn", "kn"), (step,), (step,), dtype, dtype).chain


WORKS = {make.__name__: make for make in (matmul, words, gated, chain, few)}

PRICED = {
    "CudaMatmul": ("matmul", "words", "gated"),
    "TritonMatmul": ("matmul", "gated"),
    "Generated": ("chain",),
    "Words": ("words",),
    "CpuTiles": ("matmul", "words", "gated"),
    "CpuProducts": ("few",),
    "CpuGenerated": ("chain",),
}
FAMILY = {type(family).__name__: family for family in FAMILIES}
APART = ("matmul", "gated", "chain")


@pytest.mark.parametrize(("name", "of"), [(n, of) for n in PRICED for of in PRICED[n]])
def test_a_kernel_has_its_activation_in_its_price(name: str, of: str) -> None:
    family = FAMILY[name]
    on_cpu = name == "Words" or name.startswith("Cpu")
    dev, dtype = (AVX512, "float32") if on_cpu else (GPU, "float16")
    cheap, dear = (WORKS[of](step, dtype) for step in (CHEAP, DEAR))
    plans = [p for p in plans_of(family, cheap, dev) if not [*violations(p, cheap, dev)]]
    plan = min(plans, key=lambda p: predict(cheap, p, dev, MANY).seconds)
    taken = [predict(work, plan, dev, MANY).seconds for work in (cheap, dear)]
    assert taken[1] > 1.001 * taken[0]


@pytest.mark.parametrize("dev", [AVX2, AVX512], ids=["avx2", "avx512"])
@pytest.mark.parametrize("of", APART)
def test_kernels_apart_have_the_activation_in_their_price(of: str, dev: DeviceSpec) -> None:
    """Of a chain it is as dear apart as fused, else what is decided would follow from it."""
    cheap, dear = (WORKS[of](step, "float32") for step in (CHEAP, DEAR))
    apart = [predict_unfused(work, dev, MANY).seconds for work in (cheap, dear)]
    plan = min(candidates(cheap, dev), key=lambda p: predict(cheap, p, dev, MANY).seconds)
    fused = [predict(work, plan, dev, MANY).seconds for work in (cheap, dear)]
    assert apart[1] - apart[0] == pytest.approx(fused[1] - fused[0], rel=0.25)


def test_the_halves_of_one_weight_are_activated_with_their_product() -> None:
    work = replace(gated(DEAR, "float32"), merged=True)
    assert work.apart(rows=MANY)[-1].slots == MANY * N * (slots_of(DEAR) + slots_of("multiply"))
    memory_s, both_s = (
        price_alone(Atom(8 * N, slots=slots), AVX512).seconds
        for slots in (0, N * slots_of(DEAR) * MANY)
    )
    assert both_s > 2 * memory_s


def test_a_cpu_takes_more_than_its_multiply_adds_for_an_exact_gelu() -> None:
    """Measured on Zen 4: 29 cycles a vector behind 128 x 64 x 1024, of one core."""
    core = generic_cpu(1, 64)
    works = [replace(matmul(step, "float32"), k=64) for step in (CHEAP, DEAR)]
    plan = min(candidates(works[0], core), key=lambda p: predict(works[0], p, core, 128).seconds)
    none, gelu = (predict(work, plan, core, 128).seconds for work in works)
    assert (gelu - none) * core.clock_hz / (128 * N / 16) == pytest.approx(27, rel=0.3)
