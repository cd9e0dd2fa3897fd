"""What the compiler makes of a launch on Hopper that begins before its predecessor ends."""

from __future__ import annotations

from tvm import relax

from relax_fusion.compute import build_prim_func
from relax_fusion.estimator import violations
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import device
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.contraction import contraction_steps
from relax_fusion.triton_bridge.specialize import specialize
from relax_fusion.triton_bridge.steps import FixedWeights
from relax_fusion.workload import DynamicDim, NormMatmul, Projection

H200 = device("h200")
WORK = NormMatmul(DynamicDim("rows"), 4096, (Projection(6144, "nk"),), None, "float16", "float16")
GEMV = TilePlan(1, 2, 4096, num_warps=4, family="gemv")


def code(leads: bool) -> str:
    """Return the PTX of dot products whose weights no kernel writes, or may have written."""
    assert violations(GEMV, WORK, H200) == ()
    func = build_prim_func(WORK, PlanTable.single(GEMV))
    types = [relax.TensorType(list(p.ty.shape), str(p.ty.dtype)) for p in func.params]
    inputs = [relax.Var(f"p{i}", ty) for i, ty in enumerate(types[:-1])]
    fixed = FixedWeights() if leads else FixedWeights(inputs, leads=False)
    (step,) = contraction_steps(WORK, GEMV, inputs, 64, H200, {}, fixed)
    source, _ = specialize(step.function, step.args, step.constexprs, step.options, types[-1:], 90)
    return compile_kernels([source])[0].ptx.decode()


def test_a_gemv_requests_weights_before_the_wait_where_allowed() -> None:
    for leads, early in ((False, True), (True, False)):
        text = code(leads)
        assert ("ld.global" in text[: text.index("griddepcontrol.wait")]) == early
