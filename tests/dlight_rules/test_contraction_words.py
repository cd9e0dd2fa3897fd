"""Packed weights on CPUs: numbers, and the machine code of several instruction sets."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import tvm
from tvm import ir, tirx
from tvm.sym import Analyzer
from tvm.target import Target

from relax_fusion.dlight_rules.cpu import contraction
from relax_fusion.dlight_rules.cpu.words import looks_up
from relax_fusion.estimator.families.cpu_tiles import CpuPlan
from relax_fusion.estimator.families.words import WordVectors
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.matching.expressions import found_in, substitute, variables_of
from relax_fusion.workload import GatedFFN, Norm, NormMatmul, Packed, Projection, Rope

from ..support.contraction_cases import DYNAMIC_ROWS, ROWS, Case, normed
from ..support.slow import sampled
from .compiled import library_of, scheduled
from .test_contraction import Work, built, check
from .test_contraction_panels import loops

Q4 = Packed(4, 32, 7)
FORMATS = {
    "q4f16": (Q4, 128),
    "q4f32": (replace(Q4, scale_dtype="float32"), 128),
    "q4bf16": (replace(Q4, scale_dtype="bfloat16"), 128),
    "one scale a vector": (Packed(4, 64, 7), 128),
    "one scale for two vectors": (Packed(4, 128, 7), 256),
    "padded fields": (Packed(3, 40, 3), 150),
    "q8": (Packed(8, 32, 127), 128),
    "q2": (Packed(2, 32, 1), 512),
    "q3": (Packed(3, 40, 3), 640),
    "bytes": (Packed(4, 16, 8, word="uint8"), 128),
    "fields of 12 bits": (Packed(12, 16, 2047), 128),
}
RMS = Norm("rms", 1e-5)


def projection(n: int, *epilogue: str, form: Packed = Q4, rope: Rope | None = None) -> Projection:
    return Projection(n, "nk", epilogue, rope, packed=form)


BASE = NormMatmul(ROWS, 128, (projection(24),), RMS, "float32", "float32")
GATED = GatedFFN(ROWS, 128, 24, "nk", True, True, "silu", RMS, "float16", "float16", packed=Q4)
WORKS = {
    "plain": replace(BASE, norm=None),
    "norm": BASE,
    "three": replace(BASE, outputs=(projection(24), projection(8, "bias"), projection(16))),
    "residual": replace(BASE, outputs=(projection(24, "bias", "residual"),)),
    "rope": replace(BASE, outputs=(projection(24, rope=Rope(8, 16, "float32")),)),
    "heads": replace(
        BASE, outputs=(normed(projection(24, rope=Rope(8, 24, "float32")), 8), projection(8))
    ),
    "merged": GATED,
    "separate": replace(GATED, merged=False, activation="gelu_tanh"),
    "float16": replace(BASE, dtype="float16", out_dtype="float16"),
    "bfloat16": replace(BASE, dtype="bfloat16", out_dtype="bfloat16"),
}


def words(work: Work, reg: tuple[int, int], block_n: int = 8, lanes: int = 8) -> TilePlan:
    return TilePlan(
        *(reg[0], block_n, work.k), reg_m=reg[0], reg_n=reg[1], lanes=lanes, family="words"
    )


def panels(work: Work) -> CpuPlan:
    return CpuPlan(3, 8, work.k, reg_m=3, reg_n=8, lanes=4, family="panels")


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_numbers_of_few_rows(work: Work) -> None:
    library = built(work, PlanTable.single(words(work, (2, 4), lanes=16)))
    for rows in DYNAMIC_ROWS:
        check(Case(f"{rows} rows", work, rows), library)


@pytest.mark.parametrize("work", sampled(WORKS.values(), 2), ids=WORKS)
def test_numbers_of_panels(work: Work) -> None:
    library = built(work, PlanTable.single(panels(work)))
    for rows in DYNAMIC_ROWS:
        check(Case(f"{rows} rows", work, rows), library)


def formatted(name: str, axis: int = -1) -> NormMatmul:
    form, k = FORMATS[name]
    weight = Projection(24, "nk" if axis == -1 else "kn", packed=replace(form, axis=axis))
    return NormMatmul(3, k, (weight,), None, "float32", "float32")


@pytest.mark.parametrize(
    ("looked_up", "name"), [*product([True], FORMATS), *sampled(product([False], FORMATS), 3)]
)
def test_formats_of_few_rows(name: str, looked_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not looked_up:
        monkeypatch.setattr(contraction, "looks_up", lambda *_: False)
    work = formatted(name)
    lanes = 4 if name == "padded fields" else 16
    check(Case(name, work), built(work, PlanTable.single(words(work, (1, 2), lanes=lanes))))


@pytest.mark.parametrize(("name", "axis"), sampled(product(FORMATS, [-1, -2]), 3))
def test_formats_of_panels(name: str, axis: int) -> None:
    work = formatted(name, axis)
    check(Case(name, work), built(work, PlanTable.single(panels(work))))


def test_columns_beyond_the_last_are_not_stored() -> None:
    work = replace(BASE, outputs=(projection(21),))
    check(Case("21 columns", work, 3), built(work, PlanTable.single(words(work, (2, 4)))))


def test_infinities_stay_what_they_are() -> None:
    """A zero point that is subtracted from sums would make NaN of them."""
    work = replace(BASE, norm=None, rows=1)
    arrays = Case("infinity", work).inputs()
    arrays["x"][0, 5] = np.inf
    out = tvm.runtime.empty((1, 24), "float32")
    given = map(tvm.runtime.tensor, arrays.values())
    built(work, PlanTable.single(words(work, (1, 4))))["main"](*given, out)
    field = (arrays["w0"][:, 0] >> 20 & 15).astype(float) - Q4.zero
    np.testing.assert_array_equal(np.sign(out.numpy()[0])[field != 0], np.sign(field)[field != 0])


TARGETS = {
    "haswell": ({"mcpu": "haswell"}, 8),
    "skylake-avx512": ({"mcpu": "skylake-avx512"}, 16),
    "aarch64": ({"mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}, 4),
}


def assembly(work: Work, plan: TilePlan, name: str) -> str:
    target = Target({"kind": "llvm", **TARGETS[name][0]})
    return library_of(work, plan, target).mod.inspect_source("asm")


def counted_loop(source: str) -> Counter[str]:
    """Return the instructions of the first loop that multiplies."""
    products = re.compile(r"\b(vfmadd\w+ps|fmla)\b")
    found = next(loop for loop in loops(source) if products.search(" ".join(loop)))
    return Counter(line.split()[0] for line in found if line.strip())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_fields_are_looked_up_where_a_vector_is_a_table(bits: int) -> None:
    form = Packed(bits, 32 // bits * 4, 1)
    weight = projection(64, form=form)
    work = NormMatmul(1, form.fields * 512, (weight,), None, "float32", "float32")
    counted = counted_loop(assembly(work, words(work, (1, 2), 16, 16), "skylake-avx512"))
    assert counted["vpermps"] + counted["vpermd"] == 2 * form.fields
    assert counted["vpsrld"] == 2 * (form.fields - 1)
    assert not {"vaddps", "vsubps", "vpandd", "vpternlogd"} & set(counted)


@pytest.mark.parametrize(
    ("form", "lanes", "target", "expected"),
    [
        (Q4, 16, "skylake-avx512", True),
        (Q4, 8, "skylake-avx512", False),
        (Packed(8, 32, 127), 16, "skylake-avx512", False),
        (Q4, 16, "haswell", False),
        (Q4, 16, "aarch64", False),
    ],
)
def test_what_is_looked_up(form: Packed, lanes: int, target: str, expected: bool) -> None:
    vectors = WordVectors(form, lanes, 512)
    assert looks_up(vectors, Target({"kind": "llvm", **TARGETS[target][0]})) is expected


@pytest.mark.parametrize("scale", ["float16", "float32"])
@pytest.mark.parametrize("name", ["haswell", "aarch64"])
def test_a_field_takes_two_instructions_and_a_product(name: str, scale: str) -> None:
    lanes = TARGETS[name][1]
    form = replace(Q4, scale_dtype=scale)
    work = NormMatmul(1, 512, (projection(64, form=form),), None, "float32", "float32")
    plan = words(work, (1, 2), 16, lanes)
    counted = counted_loop(assembly(work, plan, name))
    subtracted = sum(counted[op] for op in ("vaddps", "vsubps", "fadd", "fsub"))
    assert 2 * form.fields - 2 <= subtracted <= 2 * form.fields + 2
    assert not any(re.search("gather|cvtdq|ucvtf|scvtf", op) for op in counted)
    # Two columns: for each field a mask, an exponent, a subtraction and a product, and copies.
    assert sum(counted.values()) < 2 * form.fields * 6 + 40


PREFETCHES = {"haswell": "prefetcht0", "skylake-avx512": "prefetcht0", "aarch64": "prfm"}


@pytest.mark.parametrize("name", TARGETS)
def test_words_and_scales_are_requested_ahead(name: str) -> None:
    """Each column of a tile, of either part, in the loop that multiplies: words, and scales."""
    work = replace(GATED, norm=None, rows=1, n=64, k=4096, merged=False)
    counted = counted_loop(assembly(work, words(work, (1, 2), 16, TARGETS[name][1]), name))
    assert counted[PREFETCHES[name]] == 2 * 2 * 2


@pytest.mark.parametrize(
    ("k", "column", "chunk"), [(2048, 4 * 2, 0), (5632, 2, 64 - 44), (16384, 0, 64)]
)
def test_requests_are_for_the_next_in_the_order_of_tiles(k: int, column: int, chunk: int) -> None:
    """Two columns, 64 chunks of each ahead: 16, 44 and 128 chunks are a column."""
    work = NormMatmul(1, k, (projection(64),), None, "float32", "float32")
    target = Target({"kind": "llvm", **TARGETS["skylake-avx512"][0]})
    kernel = scheduled(work, words(work, (1, 2), 16, 16), target)["main"]
    calls = [c for c in found_in(kernel.body, ir.Call) if c.op.name == "tirx.prefetch"]
    loads = [call.args[0].args[0] for call in calls]
    start = {var: tirx.IntImm("int64", 0) for load in loads for var in variables_of(load)}
    found = [
        [int(Analyzer().simplify(substitute(index, start))) for index in load.indices]
        for load in loads
    ]
    assert [load.source.name for load in loads] == ["w0", "w0_scale"]
    assert found == [[column, chunk * 16], [column, chunk * 4]]


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_panels_are_unpacked_by_vectors(layout: str) -> None:
    form = replace(Q4, axis=-1 if layout == "nk" else -2)
    weight = Projection(128, layout, packed=form)
    work = NormMatmul(ROWS, 256, (weight,), None, "float16", "float16")
    plan = CpuPlan(6, 32, 256, reg_m=6, reg_n=32, lanes=16, family="panels")
    source = assembly(work, plan, "skylake-avx512")
    assert not re.search(r"v(p?gather|p?scatter|cvtdq2ps|cvtudq2ps)", source)
