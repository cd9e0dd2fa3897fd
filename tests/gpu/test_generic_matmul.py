"""Matmuls of TVM's legaliser and of quantised weights, run on a GPU by our kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import tirx

from relax_fusion.dlight_rules import GenericMatmulRule

from ..dlight_rules import test_generic_matmul
from ..fuzz import rules
from ..support import generic_cases
from ..support.generic_cases import Quantised, check, compiled, fused
from ..support.gpu import call_on_gpu, gpu_target, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

CASES = {
    name: case
    for name, case in test_generic_matmul.CASES.items()
    if name not in test_generic_matmul.LEFT
}

WEIGHTS = Quantised(n=1000, k=1024, rows="s")

QUANTISED = {
    "four bits": WEIGHTS,
    "eight bits": replace(WEIGHTS, bits=8),
    "three bits": replace(WEIGHTS, bits=3, group=40),
    "words of neighbouring columns": replace(WEIGHTS, layout="kn"),
    "zeros of groups": replace(WEIGHTS, zeros=True),
    "bfloat16": replace(WEIGHTS, dtype="bfloat16"),
    "a batch": replace(WEIGHTS, batch=3),
    "an epilogue": replace(WEIGHTS, epilogue=True),
    "a long sum": replace(WEIGHTS, n=200, k=14336),
}


def run(func: tirx.PrimFunc) -> tuple[list[np.ndarray], np.ndarray]:
    """Run the kernel of a generic function; return its inputs and its result."""
    kernel = GenericMatmulRule().apply(func, gpu_target(), False).mod["main"]
    *ins, result = func.params
    arrays = [
        generic_cases.array(generic_cases.shape_of(p), str(p.ty.dtype), seed)
        for seed, p in enumerate(ins)
    ]
    shape = generic_cases.shape_of(result), str(result.ty.dtype)
    (out,) = call_on_gpu(compiled(kernel, gpu_target())["main"], arrays, [shape])
    return arrays, out


@pytest.mark.parametrize("dtype", ["", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_matmuls_of_the_legaliser(name: str, dtype: str) -> None:
    case = CASES[name]
    given = [replace(i, dtype=dtype or i.dtype) for i in case.inputs]
    func = fused(given, case.emit)
    arrays, got = run(func)
    wide = fused([replace(i, dtype="float32") for i in given], case.emit)
    exact = rules.run(wide, wide, [a.astype("float32") for a in arrays])
    rules.compare([got], rules.run(func, func, arrays), exact)


@pytest.mark.parametrize("rows", [1, 3, 16, 40, 300])
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generic_cases.SIZES, "s", rows)
    case = QUANTISED[name]
    arrays, got = run(replace(case, rows=rows).func())
    check(got, case.steps, arrays)
