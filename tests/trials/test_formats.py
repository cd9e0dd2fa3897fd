"""A format that the library was never told of needs no entry: it is known by what it computes."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import ir, relax

from relax_fusion import PATTERNS, Report, make_target
from relax_fusion.dlight_rules import GenericMatmulRule
from relax_fusion.estimator.families.few_rows import tiles as few_rows
from relax_fusion.estimator.families.matmuls import SCALAR_FAMILIES
from relax_fusion.estimator.registry import table_of
from relax_fusion.estimator.tile_plan import PLAN_ATTR

from ..dlight_rules.generic_on_cpu import run_generic
from ..support.quantised_functions import (
    K,
    Layer,
    N,
    add_function,
    add_projection,
    called,
    check_numbers,
    lowered,
    projected,
    run_by_pipeline,
)
from ..transforms.test_quantised_formats import written_weights
from .formats import UNNAMED

H200 = make_target("h200")
ROWS = (1, 40)


@pytest.fixture(scope="module")
def layers() -> ir.IRModule:
    bb = relax.BlockBuilder()
    for name, format in UNNAMED.items():
        for rows in ROWS:
            add_projection(bb, f"{name} {rows}", format, rows)
    return bb.get()


def test_decoding_is_fused_with_what_reads_the_weight(layers: ir.IRModule) -> None:
    report = Report()
    mod = lowered(layers, phases=5, report=report, disable=tuple(PATTERNS))
    assert written_weights(mod) == [] and report.fused == []
    for name in UNNAMED:
        for rows in ROWS:
            kernels = [c.args[0].name_hint for c in called(mod[f"{name} {rows}"])]
            assert ["dequantize_matmul" in k for k in kernels] == [True, False]
            assert "dequantize_take" in kernels[1]
    rules = [s.rule for s in report.schedules]
    different = len(UNNAMED) - 1  # one is another, written anew, and has its kernels
    assert rules.count("GenericMatmulRule") == different * len(ROWS)


@pytest.fixture(scope="module")
def machine(layers: ir.IRModule) -> relax.VirtualMachine:
    return run_by_pipeline(layers)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", UNNAMED)
def test_numbers(machine: relax.VirtualMachine, name: str, rows: int) -> None:
    check_numbers(machine, f"{name} {rows}", np.eye(K)[-rows:], formats=UNNAMED)


@pytest.mark.parametrize("name", UNNAMED)
def test_numbers_of_the_kernel_for_tensor_cores(name: str) -> None:
    bb, format = relax.BlockBuilder(), UNNAMED[name]
    layer = Layer(bb, format)
    x, packed = layer.param((1, K), "float16"), layer.packed(N, K)
    add_function(bb, "main", layer, lambda: [projected(layer, x, packed, N, K)])
    main = (mod := lowered(bb.get(), H200, disable=tuple(PATTERNS)))["main"]
    (call,) = called(main)
    func = mod[call.args[0]]
    kernel = GenericMatmulRule().apply(func, H200, False).mod["main"]
    ((_, plan),) = table_of(kernel.attrs[PLAN_ATTR]).entries
    if name == "Table":  # whose loads depend on loads
        assert plan.family in SCALAR_FAMILIES
        return
    assert plan.family == few_rows.FAMILY
    arrays, got = run_generic(kernel, func)
    given = dict(zip(call.args[1].fields, arrays, strict=True))
    weight = format.decoded([given[p] for p in main.params[1:]], K).astype("float64")
    exact = given[main.params[0]].astype("float64") @ weight.T
    assert np.abs(got - exact).max() < 2e-3 * np.abs(exact).max()
