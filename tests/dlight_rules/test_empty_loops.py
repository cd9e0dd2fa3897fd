"""Loops of no iterations: what they would have initialised is, and all else of them goes."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx

from relax_fusion import PATTERNS, host_target, make_target
from relax_fusion.dlight_rules import SingleThreadRule
from relax_fusion.dlight_rules.empty_loops import without_empty_loops
from relax_fusion.dlight_rules.host_code import host_accesses
from relax_fusion.dlight_rules.safe_rule import without_single_sums
from relax_fusion.dlight_rules.verbs import blocks_of

from ..support.chains import Chain, module
from ..support.generic_cases import prim_funcs
from ..support.quick import machine, quick_host, quickly

EMPTY = module(
    [
        Chain("concat", "x[2,24,64] e[2,24,0]", "y = R.concat((x, e), axis=-1)", "y"),
        Chain("product", "x[2,0] w[0,3]", "h = R.matmul(x, w); y = R.nn.relu(h)", "y"),
        Chain("greatest", "x[2,0]", "y = R.max(x, axis=[1])", "y"),
        Chain("norm", "x[0,64] g[64]", "y = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)", "y"),
        Chain("several", "x[2,0,4]", "y = R.sum(x, axis=[1, 2])", "y"),
        Chain("no_rows", "x[0,0,4]", "y = R.max(x, axis=[1])", "y"),
        Chain("no_queries", "q[1,0,2,4] k[1,0,2,4] v[1,0,2,0]", "y = R.nn.attention(q, k, v)", "y"),
    ]
)


def legalised(name: str) -> tvm.tirx.PrimFunc:
    return prim_funcs(relax.transform.LegalizeOps()(tvm.IRModule({name: EMPTY[name]})))[0]


def test_a_function_without_empty_loops_is_itself() -> None:
    func = prim_funcs(
        relax.transform.LegalizeOps()(module([Chain("f", "x[4]", "y = R.exp(x)", "y")]))
    )
    assert without_empty_loops(func[0]).same_as(func[0])


def test_nothing_is_left_of_a_norm_of_no_rows() -> None:
    before = legalised("norm")
    after = without_empty_loops(before)
    assert host_accesses(before.body) and not host_accesses(after.body)
    assert len(after.body.block.alloc_buffers) == 0


def test_empty_tensors_compile_for_a_gpu() -> None:
    target = make_target("h200")
    tvm.compile(EMPTY, target, relax_pipeline=relax.get_pipeline("relax_fusion", target=target))


def test_reductions_of_nothing_have_their_start() -> None:
    pipeline = relax.get_pipeline("relax_fusion", target=host_target(), disable=tuple(PATTERNS))
    vm = machine(quickly(EMPTY, pipeline))

    def result(name: str, *shapes: tuple[int, ...]) -> np.ndarray:
        dirty = [tvm.runtime.tensor(np.full(6, 7, "float32")) for _ in range(8)]
        del dirty
        return vm[name](*(tvm.runtime.tensor(np.ones(s, "float32")) for s in shapes)).numpy()

    assert (result("product", (2, 0), (0, 3)) == np.zeros((2, 3))).all()
    assert (result("greatest", (2, 0)) == -np.inf).all()
    assert (result("several", (2, 0, 4)) == np.zeros(2)).all()
    assert (result("concat", (2, 24, 64), (2, 24, 0)) == np.ones((2, 24, 64))).all()


SINGLE = module(
    [
        Chain("total", "x[7,1]", "s = R.sum(x, axis=[-1], keepdims=True); y = R.divide(x, s)", "y"),
        Chain("most", "x[7,1]", "s = R.max(x, axis=[-1], keepdims=True); y = R.add(x, s)", "y"),
        Chain("place", "x[7,1]", "s = R.argmax(x, axis=-1); y = R.add(s, s)", "y"),
        Chain("share", "x[7,1]", "s = R.nn.softmax(x, axis=-1); y = R.multiply(x, s)", "y"),
        Chain("one", "x[1,1]", "s = R.sum(x); y = R.divide(x, s)", "y"),
    ]
)


def test_reductions_of_one_element_compile_for_a_gpu() -> None:
    """TVM's rules ended the process."""
    fused = relax.transform.FuseTIR()(
        relax.transform.FuseOps()(
            relax.transform.AnnotateTIROpPattern()(relax.transform.LegalizeOps()(SINGLE))
        )
    )
    for func in prim_funcs(fused):
        kinds = [v.iter_type for b in blocks_of(without_single_sums(func)) for v in b.iter_vars]
        assert kinds and tirx.IterVar.CommReduce not in kinds
    target = make_target("h200")
    tvm.compile(SINGLE, target, relax_pipeline=relax.get_pipeline("relax_fusion", target=target))


SYMBOLIC = module(
    [
        Chain("product", "x[2,n] w[n,3]", "y = R.matmul(x, w)", "y"),
        Chain("rows", "x[2,n]", "y = R.sum(x, axis=[1])", "y"),
        Chain("columns", "x[n,2]", "y = R.sum(x, axis=[0])", "y"),
    ]
)


def reductions(mod: tvm.IRModule) -> list[str]:
    """Return the reductions of symbolic length that start in their first iteration."""
    return [
        block.name_hint
        for func in prim_funcs(mod)
        for block in blocks_of(func)
        if block.init is not None
        and not all(isinstance(v.dom.extent, tvm.tirx.IntImm) for v in block.iter_vars)
    ]


def test_reductions_of_symbolic_length_start_in_front_of_their_loops() -> None:
    lowered = relax.transform.LegalizeOps()(SYMBOLIC)
    assert len(reductions(lowered)) == 3
    scheduled = relax.get_pipeline("relax_fusion", target=quick_host())(SYMBOLIC)
    assert reductions(scheduled) == []
    target = make_target("h200")
    one_thread = [SingleThreadRule().attempt(f, target).mod["main"] for f in prim_funcs(lowered)]
    assert not any("T.init" in func.script() for func in one_thread)
