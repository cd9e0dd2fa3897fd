"""Products of integers, and of float32 as tf32, run on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relax_fusion.estimator import Problem, candidates
from relax_fusion.estimator.families.cuda_matmul.family import CudaMatmul
from relax_fusion.estimator.families.cuda_matmul.tiles import CudaPlan
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.hardware.target import device_of

from ..support.contraction_cases import RMS, Case
from ..support.gpu import gpu_target, needs_gpu, results_on_gpu
from ..support.operand_cases import (
    INTEGERS,
    TF32,
    TF32_ROUNDING,
    IntegerCase,
    integer_cases,
    multiplied,
    tf32,
    tf32_cases,
)
from ..support.triton_modules import build_triton, run_triton

pytestmark = [pytest.mark.gpu, needs_gpu]


def _plans(case: Case) -> list[TilePlan]:
    """Return the first and the last plan of each family; of integers, those of dot products too."""
    found = list(candidates(case.work, device_of(gpu_target()), "tir"))
    names = ("mma", "wgmma", "") if isinstance(case, IntegerCase) else ("mma", "wgmma")
    families = [[p for p in found if p.family == name] for name in names]
    return [plan for plans in families for plan in (*plans[:1], *plans[1:][-1:])]


@pytest.mark.parametrize("case", [*integer_cases(), *tf32_cases()], ids=lambda case: case.name)
def test_numbers(case: Case) -> None:
    arrays = case.inputs()
    expected = arrays if isinstance(case, IntegerCase) else multiplied(arrays)
    for plan in _plans(case):
        case.check(expected, results_on_gpu(case, plan))


H200 = device("h200")
IN_CUDA = [
    case
    for case in [*integer_cases(), *tf32_cases()]
    if CudaMatmul().refuses(Problem(case.work, H200)) is None
]


@pytest.mark.parametrize("case", IN_CUDA, ids=lambda case: case.name)
def test_numbers_of_the_kernel_in_cuda(case: Case) -> None:
    """Of plans of each kind: operands swapped, k split, copies shared, turns."""
    kinds: dict[tuple, TilePlan] = {}
    for plan in candidates(case.work, device_of(gpu_target()), "triton"):
        if isinstance(plan, CudaPlan):
            kinds[plan.swapped, plan.split_k, plan.cluster, plan.turns, plan.groups] = plan
    if not kinds:
        pytest.skip("needs wgmma: compute capability 9.0")
    arrays = case.inputs()
    expected = arrays if isinstance(case, IntegerCase) else multiplied(arrays)
    for plan in kinds.values():
        table = PlanTable.single(plan)
        executable = build_triton(
            case.work, table, outputs=len(case.out_shapes()), target=gpu_target()
        )
        case.check(expected, run_triton(executable, list(arrays.values())))


@pytest.mark.parametrize("columns", [64, 128, 192, 256])
def test_warp_groups_multiply_integers(columns: int) -> None:
    case = IntegerCase("deep", replace(INTEGERS, rows=200, k=1024))
    case = replace(
        case, work=replace(case.work, outputs=(replace(case.work.outputs[0], n=columns),))
    )
    plans = [
        p for p in candidates(case.work, device_of(gpu_target()), "tir") if p.family == "wgmma"
    ]
    for plan in [p for p in plans if p.block_n == columns]:
        case.check(case.inputs(), results_on_gpu(case, plan))


def test_rows_behind_a_norm_err_by_the_rounding_of_both_operands() -> None:
    """What float32 makes of a norm may be rounded up where the exact value is rounded down.

    So the reference is not rounded: with u for the rounding of an operand, each product errs by
    ``(1 + u)^2 - 1`` of itself, besides what float32 steps do.
    """
    case = Case("norm", replace(TF32, norm=RMS))
    arrays, wide = case.inputs(), {n: a.astype("float64") for n, a in case.inputs().items()}
    (got,) = results_on_gpu(case, _plans(case)[0])
    (exact,), (single,) = (case.reference(arrays, dtype) for dtype in ("float64", "float32"))
    products = np.abs(case.normalised(arrays, "float64")) @ np.abs(wide["w0"].T)
    steps = 2 * np.abs(single - exact).max() + np.finfo(np.float32).eps * np.abs(exact).max()
    error = np.abs(got - exact)
    assert np.all(error <= products * ((1 + TF32_ROUNDING) ** 2 - 1) + steps)
    assert error.max() > 100 * steps  # it is tf32


def _run(function: relax.Function, arrays: list[np.ndarray], **options: bool) -> np.ndarray:
    """Compile a function by the pipeline, and run it."""
    target, dev = gpu_target(), tvm.cuda(0)
    pipeline = relax.get_pipeline("relax_fusion", target=target, **options)
    vm = relax.VirtualMachine(
        tvm.compile(tvm.IRModule({"main": function}), target, relax_pipeline=pipeline), dev
    )
    return vm["main"](*(tvm.runtime.tensor(a, dev) for a in arrays)).numpy()


def _function(shapes: list[tuple], dtypes: list[str], emit) -> relax.Function:
    params = [
        relax.Var(f"a{i}", relax.TensorType(shape, dtype))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(emit(*params))
        builder.emit_func_output(out)
    return builder.get()["main"]


@pytest.mark.parametrize("rows", [1, 5, 60, 300])
def test_a_dequantised_projection_by_the_pipeline(rows: int) -> None:
    """The sums are exact, and the steps behind them those of numpy's float32."""
    batch, k, n = 2, 256, 136
    s = tvm.tirx.Var("s", "int64")
    rng = np.random.default_rng(5)
    x, w = (rng.integers(-128, 128, shape, np.int8) for shape in ((batch, rows, k), (n, k)))
    scale, bias = rng.random((1, 1, n), np.float32), rng.random(n, np.float32)
    function = _function(
        [(batch, s, k), (n, k), (1, 1, n), (n,)],
        ["int8", "int8", "float32", "float32"],
        lambda x, w, scale, bias: op.add(
            op.multiply(
                op.astype(op.matmul(x, op.permute_dims(w), out_dtype="int32"), "float32"), scale
            ),
            bias,
        ),
    )
    got = _run(function, [x, w, scale, bias])
    sums = (x.astype(np.int64) @ w.astype(np.int64).T).astype(np.float32)
    expected = sums * scale + bias
    # A multiplication and an addition may be rounded as one
    np.testing.assert_allclose(got, expected, rtol=2 * np.finfo(np.float32).eps, atol=0)


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_used_where_it_is_allowed(allowed: bool) -> None:
    rows, k, n = 300, 512, 256
    rng = np.random.default_rng(6)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((rows, k), (k, n)))
    function = _function([(rows, k), (k, n)], ["float32"] * 2, op.matmul)
    got = _run(function, [x, w], allow_tf32=allowed)
    operands = (tf32(x), tf32(w)) if allowed else (x, w)
    exact = operands[0].astype(np.float64) @ operands[1]
    other = x.astype(np.float64) @ w if allowed else tf32(x).astype(np.float64) @ tf32(w)
    error = np.abs(got - exact).max()
    bound = k * np.finfo(np.float32).eps * (np.abs(operands[0]) @ np.abs(operands[1])).max()
    assert error <= bound
    assert np.abs(got - other).max() > 10 * error
