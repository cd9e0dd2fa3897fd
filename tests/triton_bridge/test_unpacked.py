"""Packed weights in the matmul kernel in CUDA C++: its arguments, and copies in front of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_fusion.estimator import violations
from relax_fusion.launch.nvrtc import require_nvrtc
from relax_fusion.workload.reference import evaluate

from ..cuda_kernels import cases
from ..cuda_kernels.cases import Case, gated, matmul
from ..cuda_kernels.packed_cases import HALF_GATED, INT8, Q4, Q8, bfloat16, packed, plan
from ..support.emulated import H200, emulated, needs_compiler
from ..support.interpreted import Interpreter
from .fake_driver import Job, Worker, build_driver, build_launcher
from .test_cuda import arguments, needs_nvrtc, steps

COPIES = {
    "q4": packed(matmul("bias")),
    "q4_bytes": packed(matmul(), replace(Q4, word="uint8", group=64)),
    "q8_bfloat16": packed(matmul(dtype="bfloat16"), bfloat16(Q8)),
    "int8": packed(matmul(), INT8, 208),
    "not_whole_groups": packed(matmul(), Q4, 136),
    "merged": packed(gated(gate_first=False)),
    "apart": packed(gated(merged=False, **HALF_GATED), bfloat16(Q4)),
}


@needs_compiler
@pytest.mark.parametrize("work", COPIES.values(), ids=COPIES)
def test_a_matmul_of_copies(work: Any, interpreter: Interpreter) -> None:
    chosen = replace(cases.plan(16, 64), copied=1)
    case = Case(work, chosen)
    assert case.is_allowed
    got = emulated(work, chosen, case.inputs(), dev=case.dev, interpreter=interpreter)["out0"]
    exact = evaluate(work.graph, case.inputs())["out0"]
    error = np.abs(got.astype("float64") - exact).max() / np.abs(exact).max()
    assert error <= float(2**-8 if got.dtype != "float16" else 2**-11)


def test_copies_are_made_in_front() -> None:
    one, two = (
        steps(COPIES[name], replace(cases.plan(16, 64), copied=1)) for name in ("merged", "apart")
    )
    assert [s.function.__name__ for s in one[:-1]] == ["unpack_weights"]
    assert [s.function.__name__ for s in two[:-1]] == ["unpack_weights"] * 2
    gate, up = one[-1].args[:2]
    assert up.of is one[0].args["out_ptr"] and gate.of.of is up.of
    assert gate.of.start == 136 * 192
    assert [m.of for m in two[-1].args[:2]] == [s.args["out_ptr"] for s in two[:-1]]
    assert "EARLY = 0;" in one[-1].source.text and "REGISTERS 0" in one[-1].source.text


def test_arguments_of_packed_weights() -> None:
    (plain,) = steps(packed(matmul("bias")), plan(16, 64))
    words = "64 lines of w0 as [136, 24]"
    found = arguments(plain)
    assert found["weight0"] == found["up_weight0"] == words
    assert found["scales0"] == "w0_scale" and found["vector0_0"] == "bias0_0"
    (both,) = steps(packed(gated()), plan(16, 64))
    found = arguments(both)
    assert found["weight0"] == "32 lines of w0 as [136, 24]"  # of both in turn, in one tile
    assert found["up_weight0"] == f"32 lines of w0 from {136 * 24} as [136, 24]"
    assert found["up_scales0"] == f"w0_scale from {136 * 6}"
    (apart,) = steps(packed(gated(merged=False)), plan(16, 64))
    assert arguments(apart)["up_scales0"] == "w1_scale"
    assert "EARLY = 1;" in apart.source.text


@needs_nvrtc
def test_what_the_driver_sees_of_words(tmp_path: Path) -> None:
    (step,) = steps(packed(matmul(), k=256), plan(16, 128, 128, groups_n=2))
    kernel = step.source.compile("key", require_nvrtc())
    words, x, out, scales = (0x7F0000000000 + 0x100000 * i for i in range(4))
    maps = [words, 136, 32, 32, 1, words, 136, 32, 32, 1, x, 43, 256, 256, 1]
    call = [*maps, out, scales, 43, 136, 256, 6, 1, 1]
    sizes = (128, 128, 128, 8, 8, 4, 4, 4)
    with Worker() as worker:
        library = build_launcher(kernel, tmp_path)
        answer = worker.do(Job(build_driver(tmp_path), library, [call], sizes=sizes))
    assert answer.errors == []
    assert kernel.shared_bytes == 2 * (16 * 256 + 128 * 64) + 2 * 4096 + 32
    encoded = answer.of("cuTensorMapEncodeTiled")
    assert [e["box"] for e in encoded] == [[16, 128], [16, 128], [64, 16]]
    assert [e["dims"] for e in encoded] == [[32, 136], [32, 136], [256, 43]]
    found = [(e["type"], e["swizzle"], e["strides"][0]) for e in encoded]
    assert found == [(2, 2, 128), (2, 2, 128), (6, 3, 512)]


def test_only_packed_weights_are_copied() -> None:
    chosen = replace(cases.plan(16, 64), copied=1)
    wrong = "copied is 1, but weights are not packed"
    assert [*violations(chosen, matmul(), H200)] == [wrong]
