"""FuseChains: which regions it takes, how they are written down, numbers of their kernels."""

from __future__ import annotations

import textwrap

import pytest
import tvm
from tvm import relax

from relax_fusion import Decision, Reason, make_target
from relax_fusion.errors import LoweringError
from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.generated.plan import GeneratedPlan
from relax_fusion.hardware.target import device_of
from relax_fusion.report.coverage import coverage_of
from relax_fusion.workload.json import from_json, to_json

from ..support.chains import Chain, calls, module, run_pass
from ..support.generated import check_plan
from ..support.interpreted import Interpreter
from ..support.region_cases import CASES, Case, half

PASS = "FuseChains"
H200 = make_target("h200")
ON_GPU = {"target": H200, "backend": "triton"}


def given(chain: Chain) -> tvm.ir.IRModule:
    return relax.transform.CanonicalizeBindings()(module([chain]))


ATTENTION = Chain(
    "attention",
    "q[8,128,64] k[8,128,64] v[8,128,64]",
    "t = R.permute_dims(k, [0, 2, 1]); s = R.multiply(R.matmul(q, t), R.const(0.125, 'float16'))\n"
    "y = R.matmul(R.nn.softmax(s), v)",
    *("y", {}, "float16"),
)


def fused(chain: Chain) -> tuple[relax.Function, Decision]:
    """Apply the pass to one chain, whether that pays or not; the match is checked."""
    mod, decisions = run_pass(given(chain), PASS, always_fuse=True, **ON_GPU)
    (decision,) = decisions
    assert decision.fused, str(decision.decline)
    return mod[chain.name], decision


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.chain.name)
def test_a_region_becomes_one_kernel(case: Case) -> None:
    func, decision = fused(case.chain)
    work = decision.workload
    assert work is not None
    assert str(work.graph) == textwrap.dedent(case.statements).strip()
    assert sorted(c for c in calls(func) if c != "reshape") == sorted(("call_tir", *case.left))
    assert from_json(to_json(work)) == work


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.chain.name)
def test_numbers_in_the_interpreter(case: Case) -> None:
    """The first and the last plan that are offered, for fewer rows than a tile has and for more."""
    work = fused(case.chain)[1].workload
    assert work is not None
    offered = candidates(work, device_of(H200), "triton")
    found = [p for p in offered if isinstance(p, GeneratedPlan)]
    for plan, rows in zip((found[0], found[-1]), (3, 21), strict=True):
        sizes = {name: rows if name == "rows" else 2 for name in work.graph.dims}
        assert Interpreter(check_plan)(work, plan, sizes) == "", plan.text


GATED = half(
    "gated",
    "x[24,32] W[32,48] V[32,48]",
    "y = R.multiply(R.nn.silu(R.matmul(x, W)), R.matmul(x, V))",
    "y",
)


@pytest.mark.parametrize(
    ("chain", "name"), [(ATTENTION, "FuseAttentionChain"), (GATED, "FuseGatedFFN")]
)
def test_a_region_inside_of_a_pattern_is_a_part_of_it(chain: Chain, name: str) -> None:
    """Of all passes together, the pattern's takes it; without that, and alone, `FuseChains`."""
    for options, taker in (({}, name), ({"disable": (name,)}, PASS)):
        decisions = run_pass(given(chain), "FusePatterns", always_fuse=True, **options, **ON_GPU)[1]
        assert [d.pattern for d in decisions if d.fused] == [taker]
    assert fused(chain)[1].workload is not None


def test_tir_has_no_such_kernels() -> None:
    mod = given(CASES[0].chain)
    out, decisions = run_pass(mod, PASS, target=H200, always_fuse=True)
    tvm.ir.assert_structural_equal(out, mod)
    assert decisions == []


TWO = "h = R.tanh(R.tanh(R.matmul(x, W))); y = R.matmul(h, V)"


def test_a_chain_that_saves_nothing_is_declined_by_its_price() -> None:
    mod = given(half("wide", "x[64,4096] W[4096,8192] V[8192,4096]", TWO, "y"))
    out, (decision,) = run_pass(mod, PASS, **ON_GPU)
    tvm.ir.assert_structural_equal(out, mod)
    assert decision.decline is not None and decision.decline.fused_s is not None
    assert decision.decline.reason is Reason.NOT_PROFITABLE and "fused" in decision.decline.detail


def test_a_number_is_not_a_part_of_a_region() -> None:
    """It has no axes that blocks could share; what is in front of it is a region."""
    chain = half("mean", "x[24,32] W[32,16] V[16,48]", f"{TWO}; z = R.mean(y)", "z")
    func, decision = fused(chain)
    assert calls(func)[-1] == "mean" and decision.where == "y"


def test_rows_of_two_axes_in_front_of_a_residual() -> None:
    """An operand's coordinate is made of both, so that they are not one axis."""
    body = "h = R.tanh(R.matmul(x, W)); m = R.reshape(R.matmul(h, V), [24, 32]); y = R.add(m, r)"
    _, decision = fused(half("merged", "x[4,6,32] W[32,48] V[48,32] r[24,32]", body, "y"))
    assert decision.workload is not None


def test_a_workload_that_is_no_graph() -> None:
    text = to_json(fused(CASES[0].chain)[1].workload)
    for wrong in (text.replace("gelu", "gilu"), text.replace('"blocks"', '"bricks"')):
        with pytest.raises(LoweringError, match="statements are no block graph"):
            from_json(wrong)


@pytest.mark.slow
def test_what_a_kernel_covers() -> None:
    """The report counts what stands in a region as it does where patterns took it."""
    (case,) = (c for c in CASES if c.chain.name == "norm_in_front")
    (covered,) = coverage_of([fused(case.chain)[1]], [], [])
    counts = {"projection": 3, "norm -> projection": 1, "projection -> activation": 2}
    assert covered.chains == {name: (count, count) for name, count in counts.items()}
