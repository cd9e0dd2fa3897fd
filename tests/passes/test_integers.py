"""FuseMatmulEpilogue: products of integers, their scales, and which kernel computes them."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax

from relax_fusion import NormMatmul, Projection, Reason
from relax_fusion.hardware.target import make_target
from relax_fusion.launch.nvrtc import NEEDED, find_nvrtc
from relax_fusion.report import Report
from relax_fusion.workload import Step

from ..support.chains import Chain, assert_declined, calls, kernel_args, module, run_pass

PASS = "FuseMatmulEpilogue"
H200 = make_target("h200")
ON_GPU = {"target": H200, "backend": "triton"}
INPUTS = "x[48,64]:int8 W[32,64]:int8 g[32] b[32] r[48,32] c[48,1]"
SUMS = 'm = R.matmul(x, R.permute_dims(W), out_dtype="int32")\n'
FLOATS = SUMS + 'f = R.astype(m, "float32")\n'


def work(*steps: Step, out: str = "float32", dtype: str = "int8") -> NormMatmul:
    return NormMatmul(48, 64, (Projection(32, "nk", steps),), None, dtype, out)


FUSED = {
    "sums": (SUMS.replace("m", "y", 1), work(out="int32"), "x W"),
    "floats": (FLOATS.replace("f =", "y ="), work(), "x W"),
    "scaled": (FLOATS + "y = R.multiply(f, g)", work("scale"), "x W g"),
    "every_step": (
        FLOATS + "s = R.multiply(g, f); a = R.add(s, b); t = R.add(a, r)\n"
        'y = R.astype(R.multiply(t, R.const(0.5, "float32")), "float16")',
        work("scale", "bias", "residual", 0.5, out="float16"),
        "x W g b r",
    ),
    "activated": (FLOATS + "y = R.nn.gelu(R.multiply(f, g))", work("scale", "gelu"), "x W g"),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_cast_and_steps_of_float32_are_taken_along(name: str) -> None:
    body, expected, args = FUSED[name]
    mod, decisions = run_pass(module([Chain(name, INPUTS, body, "y")]), PASS, **ON_GPU)
    (decision,) = decisions
    assert decision.workload == expected
    assert " ".join(kernel_args(mod[name])) == args and calls(mod[name]) == ["call_tir"]


def test_unsigned_integers() -> None:
    chain = Chain("unsigned", INPUTS.replace("int8", "uint8"), FLOATS.replace("f =", "y ="), "y")
    (decision,) = run_pass(module([chain]), PASS, **ON_GPU)[1]
    assert decision.workload == work(dtype="uint8")


LEFT = {
    "scales_of_rows": (FLOATS + "y = R.multiply(R.multiply(f, g), c)", "relax.multiply follows"),
    "rounded_anew": (
        FLOATS + 'y = R.astype(R.round(R.multiply(f, g)), "int8")',
        "relax.round follows",
    ),
    "steps_of_integers": (SUMS + "y = R.nn.relu(m)", "relax.nn.relu follows"),
    "numbers_of_integers": (
        SUMS + 'y = R.multiply(m, R.const(2, "int32"))',
        "relax.multiply follows",
    ),
    "sums_that_overflow": (
        'm = R.matmul(x, R.permute_dims(W)); y = R.astype(m, "float32")',
        "sums of integers are int8; needs int32",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_the_rule_computes_is_left_to_it(name: str) -> None:
    body, words = LEFT[name]
    mod = module([Chain(name, INPUTS, body, "y")])
    out, decisions = run_pass(mod, PASS, **ON_GPU)
    tvm.ir.assert_structural_equal(out, mod)
    assert [d.decline.reason for d in decisions] == [Reason.DTYPE]
    assert words in decisions[0].decline.detail


def test_two_kinds_of_integers_are_no_product_of_ours() -> None:
    mixed = INPUTS.replace("W[32,64]:int8", "W[32,64]:uint8")
    mod = module([Chain("mixed", mixed, SUMS.replace("m", "y", 1), "y")])
    _, (decision,) = run_pass(mod, PASS, **ON_GPU)
    assert "an operand is uint8, the chain int8" in decision.decline.detail


def test_other_back_ends_leave_integers_to_the_rule() -> None:
    mod = module([Chain("sums", INPUTS, SUMS.replace("m", "y", 1), "y")])
    assert_declined(mod, PASS, Reason.DTYPE, "the input is int8; needs float32")


BIG = "x[777,4096]:{0} W[6144,4096]:{0} g[6144]:float32"
WHOLE = {
    "int8": (BIG.format("int8"), FLOATS + "y = R.multiply(f, g)", {}),
    "tf32": (BIG.format("float32"), "y = R.matmul(x, R.permute_dims(W))", {"allow_tf32": True}),
}


@pytest.mark.skipif(find_nvrtc() is None, reason=f"needs {NEEDED}")
@pytest.mark.parametrize("name", WHOLE)
def test_a_module_has_the_kernel_of_wgmma_where_its_price_is_best(name: str) -> None:
    inputs, body, options = WHOLE[name]
    mod, report = module([Chain("main", inputs, body, "y")]), Report()
    pipeline = relax.get_pipeline("relax_fusion", target=H200, report=report, **options)
    tvm.compile(mod, H200, relax_pipeline=pipeline)
    (decision,) = report.fused
    assert {plan.family for _, plan in decision.plans.boxes} == {"cuda"}
