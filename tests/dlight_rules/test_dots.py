"""Products of integers, and of bfloat16, by the instructions that CPUs have for them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.target import Target

from relax_fusion.dlight_rules import GenericMatmulRule
from relax_fusion.errors import Decline
from relax_fusion.estimator import choose
from relax_fusion.estimator.families.cpu_dots import FAMILIES, dot_families, word_of
from relax_fusion.hardware.target import device_of, host_target
from relax_fusion.report import Report
from relax_fusion.workload import DynamicDim, NormMatmul, Projection, WeightLayout

from ..support.chains import Chain, module
from ..support.generic_cases import Input, fused
from ..support.quick import loaded, machine, quick, quickly
from ..support.slow import sampled
from .compiled import scheduled
from .test_contraction_panels import panels

HERE = Path(__file__).parent.parent / "support" / "arm"
BYTES = ("int8", "uint8")
LAYOUTS: tuple[WeightLayout, ...] = ("nk", "kn")


def integers(dtype: str, layout: WeightLayout = "nk", k: int = 52, n: int = 33) -> NormMatmul:
    return NormMatmul(DynamicDim("rows"), k, (Projection(n, layout),), None, dtype, "int32")


def drawn(work: NormMatmul, rows: int) -> list[np.ndarray]:
    """Return x and the weight, with all extremes, and rows and columns of nothing else."""
    rng, ends = np.random.default_rng(3), np.iinfo(work.dtype)
    shape = (work.n, work.k) if work.outputs[0].layout == "nk" else (work.k, work.n)
    found = []
    for each in ((rows, work.k), shape):
        array = rng.integers(ends.min, ends.max, each, work.dtype, endpoint=True)
        array[0], array[-1] = ends.min, ends.max
        found.append(array)
    return found


def sums(work: NormMatmul, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    w = w.T if work.outputs[0].layout == "nk" else w
    return x.astype("int32") @ w.astype("int32")


def assert_exact(work: NormMatmul, library: tvm.runtime.Module, rows: int) -> None:
    x, w = drawn(work, rows)
    out = tvm.runtime.empty((rows, work.n), "int32")
    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), out)
    np.testing.assert_array_equal(out.numpy(), sums(work, x, w))


@pytest.mark.parametrize(
    ("family", "dtype", "layout", "lanes"),
    sampled([*product(FAMILIES, BYTES, LAYOUTS, (16, 4))], 5),
)
def test_sums_are_exact(family: str, dtype: str, layout: WeightLayout, lanes: int) -> None:
    """Vectors of 16 words take the instruction where there is one, of 4 not with AVX2 and more."""
    work = integers(dtype, layout)
    library = loaded(quickly(scheduled(work, panels(work, (3, 16), lanes, family=family), HOST)))
    for rows in (1, 3, 7):
        assert_exact(work, library, rows)


HOST = quick(host_target())
X86 = {"mtriple": "x86_64-linux-gnu"}
ARM = {"mtriple": "aarch64-linux-gnu"}
INSTRUCTIONS = {
    "znver4": (X86, "int8", r"vpdpbusd.*zmm"),
    "sapphirerapids": (X86, "uint8", r"vpdpbusd.*zmm"),
    "alderlake": (X86, "int8", r"vpdpbusd.*ymm"),
    "sierraforest": (X86, "int8", r"vpdpbssd.*ymm"),
    "clearwaterforest": (X86, "uint8", r"vpdpbuud.*ymm"),
    "skylake-avx512": (X86, "uint8", r"vpmaddwd.*zmm"),
    "haswell": (X86, "int8", r"vpmaddwd.*ymm"),
    "nehalem": (X86, "int8", r"\bpmaddwd.*xmm"),
    "neoverse-n1": (ARM, "int8", r"sdot\s+v\d+\.4s"),
    "apple-m1": (ARM, "uint8", r"udot\s+v\d+\.4s"),
    "neoverse-v1": (ARM, "bfloat16", r"bfdot\s+v\d+\.4s"),
}


@pytest.mark.parametrize("mcpu", INSTRUCTIONS)
def test_a_processor_takes_its_instruction(mcpu: str) -> None:
    """The plan is the estimator's; the inner loop has all of the tile in registers."""
    triple, dtype, wanted = INSTRUCTIONS[mcpu]
    target = Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2, **triple})
    work = integers(dtype, k=256, n=192)
    work = replace(work, out_dtype="float32") if dtype == "bfloat16" else work
    plan = choose(work, device_of(target), always=True).plans.plan_for(512)
    source = tvm.compile(scheduled(work, plan, target), target=target).mod.inspect_source("asm")
    found = [line for line in source.splitlines() if re.search(wanted, line)]
    assert len(found) >= plan.reg_m * plan.reg_n // plan.lanes > 1
    assert not re.search(r"(call|bl)\s+.*relax_fusion_v?[psu]|v(p?gather|p?scatter)", source)


def test_what_no_vector_multiplies_is_left() -> None:
    target = Target({"kind": "llvm", "mcpu": "cortex-a53", **ARM})
    declined = choose(integers("int8"), device_of(target), always=True)
    assert "has no instruction that adds up its products" in declined.detail


def results(target: Target, chain: Chain, *arrays: np.ndarray) -> tuple[np.ndarray, Report]:
    report = Report()
    pipeline = relax.get_pipeline("relax_fusion", target=target, report=report)
    vm = machine(quickly(module([chain]), pipeline, target))
    return vm["main"](*map(tvm.runtime.tensor, arrays)).numpy(), report


AS_BYTES = Chain(
    "main",
    "x[5,52]:int8 W[33,52]:int8 g[33] c[5,1]",
    'm = R.matmul(x, R.permute_dims(W), out_dtype="int32")\n'
    'y = R.multiply(R.multiply(R.astype(m, "float32"), g), c)',
    "y",
)


@pytest.mark.parametrize("mcpu", ["", "haswell", "x86-64"])
def test_a_module_runs_whatever_the_processor_has(mcpu: str) -> None:
    """Scales of rows are no steps of our kernels: the rule for generic matmuls takes them along."""
    if "x86" not in str(tvm.target.codegen.llvm_get_system_triple()):
        pytest.skip("needs an x86 processor, which runs code for older ones")
    target = quick(Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})) if mcpu else HOST
    work, rng = integers("int8"), np.random.default_rng(5)
    (x, w), (g, c) = drawn(work, 5), (rng.uniform(size=s).astype("f4") for s in ((33,), (5, 1)))
    found, report = results(target, AS_BYTES, x, w, g, c)
    np.testing.assert_array_equal(found, sums(work, x, w).astype("f4") * g * c)
    plain = replace(AS_BYTES, body='y = R.matmul(x, R.permute_dims(W), out_dtype="int32")')
    found, report = results(target, plain, x, w, g, c)
    np.testing.assert_array_equal(found, sums(work, x, w))
    (decision,) = report.fused
    assert {plan.family for _, plan in decision.plans.boxes} <= {*FAMILIES}


def test_words_have_no_other_bits_than_their_elements() -> None:
    """Of bfloat16: what is neither rounded nor added up in another order."""
    work = replace(integers("bfloat16", k=2, n=16), out_dtype="float32")
    assert word_of("dots", "bfloat16") is not None
    library = loaded(quickly(scheduled(work, panels(work, (1, 16), 16, family="dots"), HOST)))
    x = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    w = np.linspace(-3, 3, 32).reshape(16, 2).astype(ml_dtypes.bfloat16)
    out = tvm.runtime.empty((1, 16), "float32")
    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), out)
    np.testing.assert_array_equal(out.numpy(), x.astype("f4") @ w.astype("f4").T)


def product_of(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return relax.op.matmul(x, w, out_dtype="int32")


GENERIC = {
    "a batch": ([Input((3, 7, 52), "int8"), Input((3, 52, 33), "int8")], product_of),
    "a computed weight": (
        [Input((7, 52), "int8"), Input((52, 33))],
        lambda x, w: product_of(x, relax.op.astype(w, "int8")),
    ),
    "computed rows": (
        [Input((7, 52)), Input((33, 52), "int8")],
        lambda x, w: product_of(relax.op.astype(x, "int8"), relax.op.permute_dims(w)),
    ),
    "both computed, in a batch": (
        [Input((3, 7, 52)), Input((3, 52, 33))],
        lambda x, w: product_of(relax.op.astype(x, "uint8"), relax.op.astype(w, "uint8")),
    ),
}


@pytest.mark.parametrize("name", GENERIC)
def test_the_rule_for_generic_matmuls_computes_operands_on_the_way(name: str) -> None:
    inputs, emit = GENERIC[name]
    made = GenericMatmulRule().attempt(fused(inputs, emit), HOST)
    assert not isinstance(made, Decline)
    func = made.mod["main"].with_attr("global_symbol", "main")
    rng, library = np.random.default_rng(9), loaded(quickly(tvm.IRModule({"main": func})))
    x, w = (rng.integers(0, 127, each.shape).astype(each.dtype) for each in inputs)
    columns = w.swapaxes(-1, -2) if name == "computed rows" else w
    exact = x.astype("int32") @ columns.astype("int32")
    out = tvm.runtime.empty(exact.shape, "int32")
    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), out)
    np.testing.assert_array_equal(out.numpy(), exact)


COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
CODES = {"int8": 0, "uint8": 1, "bfloat16": 4, "int32": 0, "float32": 2}
"""Of dtypes, as DLPack has them."""


@pytest.mark.skipif(
    not all(map(shutil.which, (COMPILER, EMULATOR))), reason=f"needs {COMPILER} and {EMULATOR}"
)
@pytest.mark.parametrize("mcpu", [n for n, (triple, *_) in INSTRUCTIONS.items() if triple == ARM])
def test_kernels_for_arm_are_right_under_emulation(mcpu: str, tmp_path: Path) -> None:
    """All of a kernel: panels, tiles, edges, and the instruction itself."""
    triple, dtype, _ = INSTRUCTIONS[mcpu]
    target = Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2, **triple})
    out = "float32" if dtype == "bfloat16" else "int32"
    work = replace(integers(dtype), rows=5, out_dtype=out)
    family = next(dot_families(dtype, device_of(target)))
    plan = panels(work, (3, 8), 4, family=family)  # which divides neither rows nor columns
    library = tvm.compile(scheduled(work, plan, target), target=target)
    library.mod.write_to_file(str(tmp_path / "kernel.o"), "o")
    headers = tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()
    words = ["-static", *(f"-I{path}" for path in headers), str(HERE / "run.c"), "kernel.o"]
    subprocess.run([COMPILER, *words, "-o", "run"], check=True, cwd=tmp_path)
    x, w = drawn(work, 5) if out == "int32" else halves(work)
    sizes = map(str, (5, work.k, work.n, x.dtype.itemsize, CODES[dtype], CODES[out]))
    command, given = [EMULATOR, "-cpu", "max", "run", *sizes], x.tobytes() + w.tobytes()
    found = subprocess.run(
        command, input=given, stdout=subprocess.PIPE, check=True, cwd=tmp_path, timeout=60
    )
    got = np.frombuffer(found.stdout, out).reshape(5, work.n)
    exact = sums(work, x, w) if out == "int32" else x.astype("f8") @ w.astype("f8").T
    np.testing.assert_allclose(got, exact, rtol=0, atol=0 if out == "int32" else 1e-5)


def halves(work: NormMatmul) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    shapes = (5, work.k), (work.n, work.k)
    return [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]
