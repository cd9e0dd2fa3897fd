"""Constant weights in panels: what they hold, and which stay as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import ir, relax
from tvm.s_tir import dlight

from relax_fusion.dlight_rules import FusedRule
from relax_fusion.dlight_rules.generic_matmul.kernel import laid_kernel
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.pipeline import relax_fusion_pipeline
from relax_fusion.transforms.lay_out_weights import LAID_ATTR, LayOutWeights
from relax_fusion.transforms.modules import functions_of
from relax_fusion.workload import DynamicDim, NormMatmul, Projection, Workload

from ..dlight_rules.test_contraction_panels import BY_NAME, NAMES, panels
from ..support.contraction_cases import Case
from ..support.grouped import lowered
from ..support.quick import machine, quick_host, quickly
from ..support.slow import sampled
from ..support.triton_modules import module_of

SMALL = NormMatmul(5, 16, (Projection(24, "nk", ()),), None, "float32", "float32")
PLAN = PlanTable.single(panels(SMALL, (3, 8), 4))
COLUMNS = 768
VNNI = tvm.target.Target({"kind": "llvm", "mcpu": "cascadelake", "num-cores": 2})
LINES = TilePlan(3, 8, 16, reg_m=3, reg_n=8, lanes=4, family="cpu_tiles")


def bound(case: Case, *tables: PlanTable) -> tuple[ir.IRModule, list[np.ndarray]]:
    """Return a module whose weights are constants, and its other inputs."""
    arrays, operands = case.inputs(), case.work.graph.inputs
    mod = module_of(case.work, *tables, outputs=len(case.out_shapes()))
    held = case.work.graph.weights
    weights = {
        f"p{i}": tvm.runtime.tensor(arrays[o.name]) for i, o in enumerate(operands) if o in held
    }
    for gvar in functions_of(mod, relax.Function):
        mod = relax.transform.BindParams(gvar.name_hint, weights)(mod)
    return mod, [arrays[o.name] for o in operands if o not in held]


def laid(mod: ir.IRModule) -> ir.IRModule:
    return LayOutWeights(quick_host())(mod)


def is_laid(mod: ir.IRModule) -> bool:
    funcs = functions_of(mod, tvm.tirx.PrimFunc).values()
    return any(LAID_ATTR in func.attrs for func in funcs)


def results(mod: ir.IRModule, inputs: list[np.ndarray]) -> list[np.ndarray]:
    with quick_host():
        mod = dlight.ApplyDefaultSchedule(FusedRule())(mod)
    found = machine(quickly(mod))["main"](*map(tvm.runtime.tensor, inputs))
    return [o.numpy() for o in (found if isinstance(found, tvm.ir.Array | list) else [found])]


@pytest.mark.parametrize("name", sampled(NAMES, 4))
def test_the_numbers_are_the_same(name: str) -> None:
    case = BY_NAME[name]
    mod, inputs = bound(case, PlanTable.single(panels(case.work, (3, 8), 4)))
    after = laid(mod)
    assert is_laid(after) == (case.work.dtype == "float32")
    for one, other in zip(results(mod, inputs), results(after, inputs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", sampled([n for n in NAMES if BY_NAME[n].work.k % 2 == 0], 8))
def test_pairs_are_the_same(name: str) -> None:
    case = BY_NAME[name]
    case = replace(case, work=replace(case.work, dtype="bfloat16", out_dtype="bfloat16"))
    mod, inputs = bound(case, PlanTable.single(panels(case.work, (3, 8), 4, family="dots")))
    after = laid(mod)
    assert is_laid(after)
    for one, other in zip(results(mod, inputs), results(after, inputs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("work", "table"),
    [
        (SMALL, PlanTable.single(LINES)),
        (replace(SMALL, rows=DynamicDim("rows")), PlanTable(((1, LINES), *PLAN.entries))),
        (replace(SMALL, dtype="float16"), PLAN),
    ],
    ids=["read_as_it_lies", "read_both_ways", "half"],
)
def test_what_stays(work: Workload, table: PlanTable) -> None:
    mod, _ = bound(Case("small", work, 5), table)
    tvm.ir.assert_structural_equal(laid(mod), mod)


def test_a_parameter_stays() -> None:
    mod = module_of(SMALL, PLAN, outputs=1)
    tvm.ir.assert_structural_equal(laid(mod), mod)


def test_a_weight_that_is_read_elsewhere_stays() -> None:
    mod, _ = bound(Case("small", SMALL), PLAN, PLAN)  # main0 and main1 read one array
    tvm.ir.assert_structural_equal(laid(mod), mod)


def test_a_gpu_packs_nothing() -> None:
    mod, _ = bound(Case("small", SMALL), PLAN)
    assert is_laid(laid(mod))
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")
    tvm.ir.assert_structural_equal(LayOutWeights(target)(mod), mod)


def integers(rows: int | str, read: str = "") -> tuple[ir.IRModule, np.ndarray]:
    """Return a matmul of bytes that no pattern takes, its weight a constant, and a weight."""
    weight = np.random.default_rng(rows == 7).integers(-127, 128, (64, COLUMNS), "int8")
    shape = [tvm.tirx.Var(rows, "int64") if isinstance(rows, str) else rows, 64]
    x = relax.Var("x", relax.TensorType(shape, "int8"))
    zeros = relax.Var("z", relax.TensorType([1, COLUMNS], "int32"))
    builder, op = relax.BlockBuilder(), relax.op
    held = relax.const(weight)
    with builder.function("main", [x, zeros]):
        with builder.dataflow():
            product = op.subtract(op.matmul(x, held, out_dtype="int32"), zeros)
            made = op.multiply(op.astype(product, "float32"), relax.const(0.5))
            if read:
                made = op.add(made, op.sum(op.astype(held, "float32")))
            out = builder.emit_output(builder.normalize(made))
        builder.emit_func_output(out)
    return builder.get(), weight


@pytest.mark.parametrize("rows", [1, 7, "n"])
def test_a_matmul_that_no_pattern_takes(rows: int | str) -> None:
    mod, weight = integers(rows)
    assert is_laid(LayOutWeights(VNNI, laid_kernel)(lowered(mod, VNNI)[0]))
    rng = np.random.default_rng(5)
    x = rng.integers(-127, 128, (rows if isinstance(rows, int) else 9, 64), "int8")
    zeros = rng.integers(-99, 99, (1, COLUMNS), "int32")
    call = machine(quickly(mod, relax_fusion_pipeline(quick_host())))["main"]
    got = call(tvm.runtime.tensor(x), tvm.runtime.tensor(zeros)).numpy()
    exact = (x.astype("int32") @ weight.astype("int32") - zeros) * np.float32(0.5)
    np.testing.assert_array_equal(got, exact)


def test_a_matmul_that_no_pattern_takes_stays() -> None:
    shared = lowered(integers(7, "elsewhere")[0], VNNI)[0]
    bound = lowered(integers(7)[0], VNNI)[0]
    assert not is_laid(LayOutWeights(VNNI, laid_kernel)(shared))
    assert not is_laid(LayOutWeights(VNNI)(bound))
    words = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
    wide = lowered(integers(7)[0], words)[0]  # a word has two bytes there, as int16
    assert not is_laid(LayOutWeights(words, laid_kernel)(wide))
