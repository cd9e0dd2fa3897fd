"""FuseChains on a CPU: numbers of its kernels by several plans, what is chosen, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion import Decision, Reason, Report
from relax_fusion.dlight_rules.cpu.generated import emit
from relax_fusion.estimator import violations
from relax_fusion.estimator.families.cpu_generated.family import CpuChainPlan, CpuGenerated
from relax_fusion.hardware.target import device_of
from relax_fusion.workload import Chain as Region
from relax_fusion.workload.roofline import size_at

from ..support.chains import Chain, assert_numbers, compiled, module, run_pass
from ..support.estimator_cases import plans_of
from ..support.generated import draw_values, wrong
from ..support.quick import loaded, quick, quickly
from ..support.region_cases import CASES
from ..support.slow import sampled

PASS = "FuseChains"
CPU = tvm.target.Target(
    {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2}
)
DEV = device_of(CPU)


def in_float32(chain: Chain) -> Chain:
    return replace(chain, dtype="float32", body=chain.body.replace("float16", "float32"))


def run(chain: Chain, **options: object) -> tuple[tvm.ir.IRModule, list[Decision]]:
    mod = relax.transform.CanonicalizeBindings()(module([chain]))
    return run_pass(mod, PASS, target=CPU, **options)


@cache
def region(name: str) -> Region:
    (case,) = (c for c in CASES if c.chain.name == name)
    _, (decision,) = run(in_float32(case.chain), always_fuse=True, validate=True)
    assert decision.fused, str(decision.decline)
    assert isinstance(decision.workload, Region)
    return decision.workload


FLOATS = [c.chain.name for c in CASES if "int" not in c.statements and "float8" not in c.statements]


@cache
def kernel_of(work: Region, plan: CpuChainPlan) -> tvm.runtime.Function:
    """Compile the kernel of a plan."""
    func = emit(work, plan, CPU).with_attr("global_symbol", "main")
    return loaded(quickly(func, target=quick(CPU)))["main"]


def check(work: Region, plan: CpuChainPlan, rows: int, first: float | None = None) -> str:
    """Run the kernel of a plan at some number of rows; return what is wrong, or nothing.

    Parameters
    ----------
    first : float, optional
        The first element of the first operand, beside numbers that are drawn.
    """
    graph = work.graph
    sizes = {name: rows if name == "rows" else 2 for name in graph.dims}
    given = draw_values(graph, 0, sizes)
    if first is not None:
        given[graph.inputs[0].name].flat[0] = first
    shapes = ([size_at(d, sizes) for d in o.shape or ()] for o in graph.outputs)
    made = [tvm.runtime.tensor(np.full(shape, np.nan, "float32")) for shape in shapes]
    operands = (
        tvm.runtime.tensor(given[o.name].astype(o.dtype)) if o.shape is not None else given[o.name]
        for o in graph.inputs
    )
    kernel_of(work, plan)(*operands, *made)
    named = zip(graph.outputs, made, strict=True)
    return wrong(graph, {o.name: each.numpy().astype("float64") for o, each in named}, given)


@pytest.mark.parametrize("name", sampled(FLOATS, 2))
def test_numbers(name: str) -> None:
    """The plans that are offered, for fewer rows than a register tile has and for more."""
    work = region(name)
    found = plans_of(CpuGenerated(), work, DEV)
    assert found and not any(violations(p, work, DEV) for p in found)
    for plan in {found[0], found[-1]}:
        assert isinstance(plan, CpuChainPlan)
        for rows in (1, 3, 21, 64):
            assert check(work, plan, rows) == "", f"{plan.text} at {rows} rows"


@pytest.mark.parametrize("first", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name", ["softmax_between", "norm_between", "mlp", "token_mixer", "batched"]
)
def test_what_is_not_finite_stays_in_its_row(name: str, first: float) -> None:
    work = region(name)
    plan = plans_of(CpuGenerated(), work, DEV)[0]
    assert isinstance(plan, CpuChainPlan)
    assert check(work, plan, 21, first) == ""


MEMORY = Chain(
    "memory",
    "x[4096,512] K[512,64] V[64,512]",
    "y = R.add(R.matmul(R.nn.softmax(R.matmul(x, K)), V), x)",
    *("y", {}, "float32"),
)


def test_a_softmax_between_two_matmuls_is_chosen() -> None:
    """What was measured is in 2026-11-24-bench_cpu_chains.md."""
    _, (decision,) = run(MEMORY)
    assert decision.fused, str(decision.decline)
    assert decision.plans.entries[0][1].family == "cpu_generated"


def test_few_rows_stay_apart() -> None:
    few = replace(MEMORY, inputs=MEMORY.inputs.replace("4096", "16"))
    _, (decision,) = run(few)
    assert decision.decline is not None and decision.decline.reason is Reason.NOT_PROFITABLE


def test_a_softmax_in_half_precision_is_refused() -> None:
    chain = replace(MEMORY, dtype="float16")
    _, (decision,) = run(chain, always_fuse=True)
    assert decision.decline is not None and decision.decline.reason is Reason.NO_PLAN
    said = "tensors are of float16, generated kernels of a CPU have float32"
    assert said in str(decision.decline)


def test_a_wide_intermediate_is_not_fused() -> None:
    body = "h = R.nn.gelu(R.matmul(x, A)); y = R.matmul(h, B)"
    _, (decision,) = run(Chain("mlp", "x[512,768] A[768,3072] B[3072,768]", body, "y"))
    assert decision.decline is not None and decision.decline.reason is Reason.NOT_PROFITABLE
    assert decision.decline.fused_s > decision.decline.unfused_s


NT = "a = R.permute_dims(A); b = R.permute_dims(B); "
TWO = [
    Chain(
        "lora",
        "x[b,s,32] A[8,32] B[48,8] base[b,s,48]",
        NT + "m = R.matmul(R.matmul(x, a), b); y = R.add(base, R.multiply(m, R.const(2.0)))",
        *("y", {"b": 2, "s": 9}),
    ),
    Chain(
        "bottleneck",
        "x[b,32] A[8,32] p[8] B[48,8] q[48] r[b,48]",
        NT + "g = R.nn.gelu(R.add(R.matmul(x, a), p))\ny = R.add(R.add(R.matmul(g, b), q), r)",
        *("y", {"b": 21}),
    ),
    Chain(
        "rounded_between",
        "x[6,32] A[32,8] B[8,48]",
        'h = R.matmul(x, A, out_dtype="float32"); c = R.astype(h, "bfloat16")\n'
        'm = R.matmul(c, B); y = R.astype(m, "float32")',
        *("y", {}, "bfloat16"),
    ),
    Chain(
        "batch_of_heads",
        "x[b,3,m,32] A[b,3,8,32] B[b,3,8,48] r[b,3,m,48]",
        "h = R.matmul(x, R.permute_dims(A, [0, 1, 3, 2])); y = R.add(R.matmul(h, B), r)",
        *("y", {"b": 2, "m": 7}),
    ),
    Chain(
        "regrouped_rows",
        "x[2,3,32] A[32,8] B[8,48]",
        "h = R.matmul(R.reshape(x, [6, 32]), A); g = R.reshape(h, [2, 3, 8])\n"
        "y = R.matmul(R.reshape(g, [6, 8]), B)",
        "y",
    ),
    Chain(
        "scaled_inside",
        "x[6,32] A[32,8] B[48,8]",
        "h = R.matmul(x, A); f = R.nn.relu(R.divide(h, R.const(4.0, 'float16')))\n"
        "y = R.matmul(f, R.permute_dims(B))",
        *("y", {}, "float16"),
    ),
]


@pytest.fixture(scope="module")
def machine() -> tuple[relax.VirtualMachine, tvm.ir.IRModule]:
    mod, report = module(TWO), Report()
    vm = compiled(mod, TWO, always_fuse=True, report=report)
    assert sum(d.fused and d.pattern == PASS for d in report.decisions) == len(TWO)
    return vm, mod


@pytest.mark.parametrize("chain", TWO, ids=lambda c: c.name)
def test_two_matmuls(machine: tuple[relax.VirtualMachine, tvm.ir.IRModule], chain: Chain) -> None:
    assert_numbers(*machine, chain)


def test_a_plan_of_more_than_a_core_holds_is_refused() -> None:
    _, (decision,) = run(MEMORY)
    plan = decision.plans.entries[0][1]
    assert isinstance(plan, CpuChainPlan)
    tiles = " ".join(f"{n}={t * (16 if n == 'm' else 1)}" for n, t in plan.tile.items())
    (said,) = violations(replace(plan, tiles=tiles), decision.workload, DEV)
    assert "of cache for tiles, half of what a core of the" in said
    (said,) = violations(replace(plan, tiles="m=16"), decision.workload, DEV)
    assert "has no tile" in said
