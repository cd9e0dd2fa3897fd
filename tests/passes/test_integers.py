"""Products of integers: who computes them elsewhere, and by which kernel here."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relax_fusion.hardware.target import make_target
from relax_fusion.launch.nvrtc import NEEDED, find_nvrtc
from relax_fusion.report import Report

from ..support.chains import Chain, module, run_pass

PASS = "FuseMatmulEpilogue"
H200 = make_target("h200")
ON_GPU = {"target": H200, "backend": "triton"}
INPUTS = "x[48,64]:int8 W[32,64]:int8 g[32] b[32] r[48,32] c[48,1]"
SUMS = 'm = R.matmul(x, R.permute_dims(W), out_dtype="int32")\n'
FLOATS = SUMS + 'f = R.astype(m, "float32")\n'


def test_what_adds_up_no_integers_leaves_them_to_the_rule() -> None:
    mod = module([Chain("sums", INPUTS, SUMS.replace("m", "y", 1), "y")])
    plain = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a53"})
    out, (decision,) = run_pass(mod, PASS, target=plain)
    tvm.ir.assert_structural_equal(out, mod)
    assert "the input is int8; needs float32" in decision.decline.detail


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
