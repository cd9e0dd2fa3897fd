"""Plans of the Triton back end: which are generated, refused and chosen, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.estimator import (
    Choice,
    Problem,
    candidates,
    choose,
    predict,
    predict_unfused,
    violations,
)
from relax_fusion.estimator.families.matmuls import NORM_S
from relax_fusion.estimator.families.triton_matmul.family import TritonMatmul
from relax_fusion.estimator.families.triton_matmul.tiles import (
    NORM_INSIDE_S,
    accumulators,
    norm_inside,
    smem_bytes,
)
from relax_fusion.estimator.gpu_cost import LEAST_S
from relax_fusion.estimator.registry import is_launched
from relax_fusion.estimator.shape import matmul_shape
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import device
from relax_fusion.workload import DynamicDim, Norm, NormMatmul, Projection, Rope

from ..support.estimator_cases import AVX2, GPU, RMS, gated_ffn, norm_matmul

pytestmark = pytest.mark.usefixtures("without_cuda_matmul")

WORKS = {"qkv": norm_matmul(), "gate_up": gated_ffn()}


def plan(family: str, *block: int, **fields: int) -> TilePlan:
    numbers = {"num_warps": 4, "num_stages": 4, **fields}
    return TilePlan(*block, family=family, **numbers)


POINTER = plan("pointer", 16, 64, 64)
GEMV = plan("gemv", 1, 2, 2048, num_stages=1)


def rotated(head_dim: int = 128, layout: str = "nk") -> NormMatmul:
    """Return norm -> matmul of which 40 heads are rotated."""
    rope = Rope(head_dim, 40 * head_dim, "float32", DynamicDim("s"))
    return replace(norm_matmul(), outputs=(Projection(48 * head_dim, layout, (), rope),))


ROTATED = rotated()


def test_one_row_alone_has_dot_products() -> None:
    for rows, has in ((1, True), (2, True), (3, False), (DynamicDim("rows"), True)):
        found = candidates(norm_matmul(rows=rows), GPU, "triton")
        assert any(p.family == "gemv" for p in found) == has


@pytest.mark.parametrize(
    ("wanted", "work", "of_a_thread", "smem"),
    [
        # 4 stages of 16 + 64 rows of 64 float16, and 4 KiB of conversions
        (POINTER, norm_matmul(), 8, 4 * 80 * 64 * 2 + (4 << 10)),
        (POINTER, gated_ffn(), 16, 4 * 144 * 64 * 2 + (4 << 10)),
        (POINTER, ROTATED, 8, 4 * 80 * 64 * 2 + (4 << 10)),
    ],
)
def test_resources(wanted, work, of_a_thread, smem) -> None:
    shape = matmul_shape(work, pairs=False)
    assert (accumulators(wanted, shape), smem_bytes(wanted, shape)) == (of_a_thread, smem)


def test_where_triton_has_no_kernel_tir_has() -> None:
    work = norm_matmul(dtype="float32")
    assert not any(is_launched(p) for p in candidates(work, GPU, "triton"))
    assert TritonMatmul().refuses(Problem(work, GPU)) is not None


def test_where_the_norm_goes() -> None:
    layer = replace(norm_matmul(), norm=Norm("layer", 1e-5))
    after_add = replace(norm_matmul(), norm=replace(RMS, residual=True))
    assert norm_inside(norm_matmul(), GEMV) and norm_inside(layer, GEMV)
    assert norm_inside(norm_matmul(), POINTER) and not norm_inside(layer, POINTER)
    assert not norm_inside(norm_matmul(), replace(POINTER, block_k=128))
    assert not norm_inside(norm_matmul(), replace(POINTER, block_m=32))
    assert not norm_inside(after_add, GEMV)
    assert not norm_inside(norm_matmul(norm=None), GEMV)


CPU_AND_DTYPE = [
    (
        POINTER,
        norm_matmul(),
        AVX2,
        "family is 'pointer', there is 'words' and 'cpu_tiles' and 'panels' and 'dots' and",
    ),
    (POINTER, norm_matmul(dtype="float64"), GPU, "dtype is float64, the Triton kernels take"),
]
GEMV_SENTENCES = [
    (replace(GEMV, block_m=2), norm_matmul(), "block_m is 2, family 'gemv' takes 1 row"),
    (replace(GEMV, block_n=16), norm_matmul(), "a thread holds 256 weights, at most 192 fit its"),
    (replace(GEMV, split_k=2), norm_matmul(), "split_k is 2, family 'gemv' reduces in 1 part"),
    (replace(GEMV, block_n=1), ROTATED, "block_n is 1, rotated features come 2 at a time"),
]
TILE_SENTENCES = [
    (replace(POINTER, block_m=96), norm_matmul(), "block_m is 96, triton needs a power of two"),
    (replace(POINTER, num_warps=0), norm_matmul(), "num_warps is 0, triton needs a power of two"),
    (replace(POINTER, block_n=8), norm_matmul(), "block_n is 8, tensor cores need 16"),
    (replace(POINTER, split_k=65), norm_matmul(), "split_k is 65, k has 64 blocks"),
    (
        replace(POINTER, block_m=128, block_n=256),
        norm_matmul(),
        "a thread has 256 accumulators, at most 192 fit its registers",
    ),
    (
        replace(POINTER, num_stages=30),
        norm_matmul(),
        "needs 311296 B of shared memory, the H200 has 232448 B per block",
    ),
]
ON_THE_H200 = [*GEMV_SENTENCES, *TILE_SENTENCES]
ELSEWHERE = [
    (
        replace(POINTER, block_m=128, block_k=128),
        norm_matmul(),
        "rtx3080",
        "needs 200704 B of shared memory, the RTX 3080 has 101376 B per block",
    )
]


@pytest.mark.parametrize(
    ("wrong", "work", "dev", "sentence"),
    [
        *CPU_AND_DTYPE,
        *((plan, work, GPU, text) for plan, work, text in ON_THE_H200),
        *((plan, work, device(name), text) for plan, work, name, text in ELSEWHERE),
    ],
)
def test_each_violation_has_its_sentence(wrong, work, dev, sentence) -> None:
    assert any(s.startswith(sentence) for s in violations(wrong, work, dev))


def test_heads_are_rotated_by_tiles_of_whole_pairs() -> None:
    for head_dim in (128, 48):
        found = {p.family for p in candidates(rotated(head_dim), GPU, "triton")}
        assert found == {"gemv", "pointer"}


@pytest.mark.parametrize(
    ("n", "normed", "columns"), [(2048, False, 4), (2048, True, 2), (4096, False, 2)]
)
def test_all_programs_behind_an_attention_run_at_once_where_they_can(
    n: int, normed: bool, columns: int
) -> None:
    """With 4096 columns no tile of the whole k lets them; with a norm none was looked for."""
    outputs = (Projection(n, "nk", ("residual",)),)
    work = NormMatmul(1, 4096, outputs, RMS if normed else None, "float16", "float16")
    found = candidates(work, device("h200"), "triton")
    whole = [p.block_n for p in found if p.family == "gemv" and p.block_k == 4096]
    assert columns in whole and (2 in whole) == (columns == 2)


@pytest.mark.parametrize("family", ["gemv", "pointer"])
def test_rotating_is_free_but_for_the_pass_over_memory_that_it_saves(family) -> None:
    plain = replace(ROTATED, outputs=(replace(ROTATED.outputs[0], rope=None),))
    turned = [p for p in candidates(ROTATED, GPU, "triton") if p.family == family]
    assert turned
    for p in turned:
        assert predict(ROTATED, p, GPU, 64) == predict(plain, p, GPU, 64)
    alone = [replace(work, norm=None) for work in (ROTATED, plain)]
    turned_s, plain_s = (predict_unfused(work, GPU, 64).seconds for work in alone)
    assert turned_s > plain_s


def test_only_a_bias_comes_before_a_rotation() -> None:
    biased = replace(ROTATED.outputs[0], epilogue=("bias",))
    assert TritonMatmul().refuses(Problem(replace(ROTATED, outputs=(biased,)), GPU)) is None
    residual = replace(ROTATED.outputs[0], epilogue=("residual",))
    adding = Problem(replace(ROTATED, outputs=(residual,)), GPU)
    assert "rotate a matmul" in TritonMatmul().refuses(adding)


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_one_row_has_dot_products_and_several_have_tensor_cores(work) -> None:
    found = choose(work, GPU, backend="triton")
    assert isinstance(found, Choice)
    families = {rows: found.plans.plan_for(rows).family for rows in (1, 16)}
    assert families == {1: "gemv", 16: "pointer"}


def test_the_system_keeps_shared_memory_of_each_block() -> None:
    # Three times 76 kB would be all there is: 320 tiles ran in two waves, 70 us instead of 52
    work = norm_matmul(rows=64, k=8192, n=10240)
    own = replace(POINTER, block_m=32, block_k=64, num_stages=6)
    assert predict(work, own, GPU, 64).waves == 2


def test_what_a_norm_adds() -> None:
    work, alone = norm_matmul(rows=64), norm_matmul(rows=64, norm=None)

    def norm_s(p: TilePlan) -> float:
        return predict(work, p, GPU, 64).seconds - predict(alone, p, GPU, 64).seconds

    # Three blocks are on the busiest multiprocessor
    assert norm_s(POINTER) == pytest.approx(3 * NORM_INSIDE_S)
    # The bytes of 64 rows take less than the least that a kernel takes
    assert norm_s(replace(POINTER, block_m=64)) == pytest.approx(NORM_S + LEAST_S)


def test_splitting_k_pays_where_tiles_are_few() -> None:
    few, many = norm_matmul(rows=16, n=256, k=16384), norm_matmul(rows=16, n=65536, k=4096)
    for work, pays in ((few, True), (many, False)):
        whole, split = (replace(POINTER, split_k=s) for s in (1, 4))
        prices = [predict(work, p, GPU, 16).seconds for p in (whole, split)]
        assert (prices[1] < prices[0]) == pays
