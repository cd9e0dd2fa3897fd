"""Panels of packed weights on CPUs: numbers, and the machine code of several instruction sets."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relax_fusion.dlight_rules.cpu.vector_math import with_vector_math
from relax_fusion.estimator.families.cpu_tiles import CpuPlan
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.hardware.target import host_target
from relax_fusion.workload import GatedFFN, Norm, NormMatmul, Projection, Rope, WeightLayout

from ..support.chains import Chain, module
from ..support.contraction_cases import DYNAMIC_ROWS, ROWS, Case, cases, dynamic_works, head_cases
from ..support.slow import sampled
from .compiled import scheduled
from .test_contraction import Work, built, check

BY_NAME = {case.name: case for case in [*cases(), *head_cases()]}
NAMES = [
    name
    for name in BY_NAME
    if re.search(r"three|rope|merged|mixed|residual|silu|_kn_4|_nk_4|layer|odd|heads", name)
]


def panels(
    work: Work, reg: tuple[int, int], lanes: int, split_m: int = 1, family: str = "panels"
) -> CpuPlan:
    return CpuPlan(
        *(*reg, work.k), reg_m=reg[0], reg_n=reg[1], lanes=lanes, family=family, split_m=split_m
    )


@pytest.mark.parametrize("name", sampled(NAMES, 3))
def test_numbers(name: str) -> None:
    """Rows and columns are no multiples of the tile in most cases."""
    case = BY_NAME[name]
    check(case, built(case.work, PlanTable.single(panels(case.work, (3, 8), 4))))


PAIRS = [name for name in NAMES if BY_NAME[name].work.k % 2 == 0]


@pytest.mark.parametrize(
    ("name", "lanes"), [*sampled([(n, 16) for n in PAIRS]), *sampled([(n, 8) for n in PAIRS], 10)]
)
def test_numbers_of_pairs(name: str, lanes: int) -> None:
    """Vectors of 16 pairs take the instruction where there is one; of 8, no processor has one."""
    case = BY_NAME[name]
    work = replace(case.work, dtype="bfloat16", out_dtype="bfloat16")
    plan = panels(work, (3, 16), lanes, family="dots")
    check(replace(case, work=work), built(work, PlanTable.single(plan)))


def test_pairs_of_two_weights_that_are_no_whole_squares() -> None:
    work = GatedFFN(5, 30, 33, "nk", False, True, "silu", None, "bfloat16", "bfloat16")
    plan = panels(work, (3, 16), 16, family="dots")
    check(Case("two weights", work), built(work, PlanTable.single(plan)))


@pytest.mark.parametrize("work", dynamic_works().values(), ids=dynamic_works())
def test_dynamic_rows_in_parts(work: Work) -> None:
    library = built(work, PlanTable.single(panels(work, (4, 16), 8, split_m=3)))
    for rows in DYNAMIC_ROWS:
        check(Case(f"{rows} rows", work, rows), library)


@pytest.mark.parametrize("heads", [(16, 8), (16, 4), (64, 32)])
def test_parts_of_heads_are_rotated_by_optimised_code(heads: tuple[int, int]) -> None:
    """Only optimised, a branch of LLVM 22 for each lane read other angles."""
    size, turned = heads
    rope = Rope(size, 2 * size, "float32", 24, turned)
    work = NormMatmul(24, 64, (Projection(2 * size, "nk", (), rope),), None, "float32", "float32")
    kernel = scheduled(work, panels(work, (3, 16), 16), host_target())["main"]
    library = tvm.compile(tvm.IRModule({"main": kernel}), target=host_target()).jit()
    check(Case("part", work, 24), library)


TARGETS = {
    "haswell": ({"mcpu": "haswell"}, 8, (6, 16)),
    "skylake-avx512": ({"mcpu": "skylake-avx512"}, 16, (12, 32)),
    "znver4": ({"mcpu": "znver4"}, 16, (14, 32)),
    "aarch64": ({"mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}, 4, (8, 12)),
}
MULTIPLY_ADD = {"vfmadd231ps", "vfmadd213ps", "vfmadd132ps", "fmla"}
WIDE = re.compile(r"[yz]mm|\bq\d|\bv\d")


def assembly(work: Work, name: str, plan: CpuPlan | None = None) -> str:
    options, lanes, reg = TARGETS[name]
    target = Target({"kind": "llvm", **options})
    kernel = scheduled(work, plan or panels(work, reg, lanes), target)["main"]
    library = tvm.compile(tvm.IRModule({"main": with_vector_math(kernel)}), target=target)
    return library.mod.inspect_source("asm")


def loops(source: str) -> list[list[str]]:
    """Return the lines of every loop, from its label to the jump back, inner ones first."""
    lines, found = source.splitlines(), []
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L\w+):", line))}
    for i, line in enumerate(lines):
        jump = re.match(r"\s+(?:j\w+|b\.\w+|cbn?z\s+\w+,|tbn?z.*,)\s+(\.L\w+)", line)
        if jump and labels.get(jump[1], i) < i:
            found.append(lines[labels[jump[1]] : i + 1])
    return sorted(found, key=len)


def multiply_adds(loop: list[str]) -> int:
    words = (line.split() for line in loop)
    return sum(w[0] in MULTIPLY_ADD for w in words if w)


@pytest.mark.parametrize(
    ("name", "dtype"), sampled(product(TARGETS, ["float32", "float16", "bfloat16"]), 2)
)
def test_the_inner_loop_keeps_its_tile_in_registers(name: str, dtype: str) -> None:
    _, lanes, (reg_m, reg_n) = TARGETS[name]
    work = NormMatmul(ROWS, 256, (Projection(4 * reg_n, "nk"),), None, dtype, dtype)
    source = assembly(work, name)
    tile = reg_m * reg_n // lanes
    loop = next(loop for loop in loops(source) if multiply_adds(loop) >= tile)
    steps, rest = divmod(multiply_adds(loop), tile)
    assert rest == 0 and steps <= 4
    on_stack = [line for line in loop if re.search(r"\[?\b[re]?sp\b", line) and WIDE.search(line)]
    assert not on_stack
    words = Counter(line.split()[0] for line in loop if line.strip())
    assert not any("cvt" in word for word in words)  # weights were converted when they were packed
    assert sum(words.values()) <= steps * (tile + reg_m + reg_n // lanes + 8)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("norm", [None, Norm("rms", 1e-5)])
def test_pairs_are_multiplied_by_their_instruction(layout: WeightLayout, norm: Norm | None) -> None:
    work = NormMatmul(ROWS, 256, (Projection(96, layout),), norm, "bfloat16", "bfloat16")
    plan = panels(work, (8, 48), 16, family="dots")
    source = assembly(work, "znver4", plan)
    dots = re.compile(r"vdpbf16ps.*zmm")
    loop = next(loop for loop in loops(source) if any(map(dots.search, loop)))
    steps, rest = divmod(sum(bool(dots.search(line)) for line in loop), 8 * 3)
    assert rest == 0 and steps > 0
    assert not [line for line in loop if re.search(r"\[?\b[re]?sp\b", line) and WIDE.search(line)]
    assert not re.search(r"v(p?gather|p?scatter|pinsrw.*\()|call.*relax_fusion_v", source)


@pytest.mark.parametrize("name", ["haswell", "znver4"])
def test_weights_are_transposed_in_registers(name: str) -> None:
    work = NormMatmul(ROWS, 256, (Projection(128, "nk"),), None, "float16", "float16")
    source = assembly(work, name)
    assert "vcvtph2ps" in source and "vshufps" in source
    assert not re.search(r"v(p?gather|p?scatter)", source)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_call_no_library(activation: str) -> None:
    gated = GatedFFN(ROWS, 64, 128, "nk", True, True, activation, None, "float32", "float32")
    assert not re.search(r"\bexpf\b", assembly(gated, "znver4"))


@pytest.mark.parametrize("step", ["silu", "gelu_tanh"])
def test_activations_read_bfloat16_as_numbers(step: str) -> None:
    """TVM 0.27 takes the bits for an integer in a value that is bound to a name."""
    work = NormMatmul(4, 8, (Projection(8, "kn", ("bias", step)),), None, "bfloat16", "float32")
    check(Case("bits", work), built(work, PlanTable.single(panels(work, (2, 4), 4))))


def test_the_check_notices_an_error_in_the_panels() -> None:
    case = replace(BY_NAME[NAMES[0]])
    plan = panels(case.work, (3, 8), 4)
    library = built(case.work, PlanTable.single(plan))
    arrays = case.inputs()
    first = next(name for name in arrays if name.startswith("w"))
    wrong = {**arrays, first: np.roll(arrays[first], 1)}
    outs = [tvm.runtime.empty(shape, dtype) for shape, dtype in case.out_shapes()]
    library["main"](*(tvm.runtime.tensor(a) for a in wrong.values()), *outs)
    with pytest.raises(AssertionError):
        case.check(arrays, [o.numpy() for o in outs])


def test_sums_stay_in_registers_beside_functions_of_tvm() -> None:
    """The shapes of a symbolic result are computed by a PrimFunc that TVM adds to the module."""
    target = Target({"kind": "llvm", "mcpu": "znver4"})
    chain = Chain("main", "x[rows,256] w[256,512]", "y = R.matmul(x, w)", "y", "float32")
    pipeline = relax.get_pipeline("relax_fusion", target=target)
    library = tvm.compile(module([chain]), target=target, relax_pipeline=pipeline)
    (kernels,) = (m for m in library.mod.imports if m.kind == "llvm")
    inner = [loop for loop in loops(kernels.inspect_source("asm")) if multiply_adds(loop) > 12]
    assert inner
    stores = re.compile(r"vmov\w*\s+%zmm\d+, [^%]*\(")
    assert not [line for line in inner[0] if stores.search(line)]
