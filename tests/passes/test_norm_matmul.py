"""FuseRMSNormMatmul on calls of PrimFuncs, on devices, and on what it made itself."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx

from relax_fusion import (
    Decision,
    DynamicDim,
    FuseOptions,
    FuseRMSNormMatmul,
    Norm,
    NormMatmul,
    Projection,
    Reason,
    host_target,
    make_target,
)

from ..support.cases import cases
from ..support.chains import Chain, assert_declined, assert_untouched, module, run_pass

PASS = "FuseRMSNormMatmul"
RMS = Norm("rms", 1e-5)
RMS_FLOAT32 = Norm("rms", float(np.float32(1e-5)))  # epsilon as a float32 constant
LAYER = Norm("layer", 1e-5, beta=True)
H = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"


def work(
    *steps: str,
    rows: int | DynamicDim = 6,
    norm: Norm = RMS,
    layout: str = "kn",
    dtype: str = "float32",
    n: int = 48,
    out: str | None = None,
) -> NormMatmul:
    return NormMatmul(rows, 32, (Projection(n, layout, steps),), norm, dtype, out or dtype)


def test_nt_matmul_left_by_tvm_is_read_by_its_body() -> None:
    for dtype, out in (("float32", "float32"), ("float16", "float32"), ("float16", "float16")):
        body = H + f't = R.permute_dims(W); y = R.matmul(h, t, out_dtype="{out}")'
        chain = Chain("main", "x[b,s,32] g[32] W[48,32]", body, "y", dtype=dtype)
        mod = relax.transform.FuseTransposeMatmul()(module([chain]))
        _, (decision,) = run_pass(mod, PASS)
        rows = DynamicDim("b * s")
        assert decision.workload == work(layout="nk", rows=rows, dtype=dtype, out=out)


def test_a_call_that_only_looks_like_an_nt_matmul_is_left() -> None:
    chain = Chain(
        "main", "x[6,32] g[32] W[48,32]", H + "t = R.permute_dims(W); y = R.matmul(h, t)", "y"
    )
    mod = relax.transform.FuseTransposeMatmul()(module([chain]))
    text = mod["NT_matmul"].script()
    assert text.count(" * W[") == 1
    wrong = tvm.script.from_source(text.replace(" * W[", " + W["))
    mod.update_func(mod.get_global_var("NT_matmul"), wrong.without_attr("global_symbol"))
    assert_untouched(mod, PASS)


OTHER_RANK = """
    @T.prim_func(private=True, s_tir=True)
    def first(x: T.Buffer((T.int64(6), T.int64(32)), "float32"),
              w: T.Buffer((T.int64(48), T.int64(32)), "float32"),
              y: T.Buffer((T.int64(6),), "float32")):
        for i in range(T.int64(6)):
            with T.sblock("first"):
                vi = T.axis.spatial(T.int64(6), i)
                y[vi] = x[vi, T.int64(0)] * w[vi, T.int64(0)]
"""


def test_a_call_of_another_rank_is_left() -> None:
    body = H + 'y = R.call_tir(Module.first, (h, W), out_ty=R.Tensor((6,), "float32"))'
    chain = Chain("main", "x[6,32] g[32] W[48,32]", body, "y")
    assert_untouched(module([chain], OTHER_RANK), PASS)


def test_an_nt_matmul_with_its_operands_exchanged_is_left() -> None:
    """It computes ``W @ h^T``: the body is the same, the parameters are not."""
    body = H + "t = R.permute_dims(W); y = R.matmul(h, t)"
    mod = relax.transform.FuseTransposeMatmul()(
        module([Chain("main", "x[32,32] g[32] W[32,32]", body, "y")])
    )
    gvar = mod.get_global_var("NT_matmul")
    func = mod[gvar]
    x, w, out = func.params
    exchanged = tirx.PrimFunc([w, x, out], func.body, func.ret_type).with_attrs(dict(func.attrs))
    mod.update_func(gvar, exchanged)
    assert_untouched(mod, PASS)


def test_second_run_changes_nothing() -> None:
    mod, _ = run_pass(module([case.chain for case in cases(PASS).values()]), PASS)
    again, decisions = run_pass(mod, PASS)
    tvm.ir.assert_structural_equal(again, mod)
    # Only the norm whose other reader is a norm is looked at again.
    assert [d for d in decisions if d.fused] == []


def test_declines_outside_a_dataflow_block() -> None:
    chain = Chain("main", "x[6,32] g[32] W[32,48]", H + "y = R.matmul(h, W)", "y", dataflow=False)
    assert_declined(module([chain]), PASS, Reason.SIDE_EFFECT, "not in a dataflow block")


MIXED_DEVICES = """
@I.ir_module
class Module:
    I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("cuda", 0)]})
    @R.function
    def main(x: R.Tensor((6, 32), "float32", "cuda:0"), g: R.Tensor((32,), "float32", "cuda:0"),
             W: R.Tensor((32, 48), "float32"), o: R.Tensor((6, 48), "float32", "llvm:0")):
        with R.dataflow():
            h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)
            y = R.matmul(h, W)
            z = R.add(y, PLACE)
            R.output(z)
        return z
"""


def test_fuses_on_the_virtual_devices_of_its_target() -> None:
    text = MIXED_DEVICES.replace("R.add(y, PLACE)", 'R.to_vdevice(y, "llvm:0")').replace(
        'W: R.Tensor((32, 48), "float32")', 'W: R.Tensor((32, 48), "float32", "cuda:0")'
    )
    mod = tvm.script.from_source(text)
    assert_declined(mod, PASS, Reason.VDEVICE, "are on cuda:0:global")
    out, (decision,) = run_pass(mod, PASS, target=make_target("h200"), always_fuse=True)
    assert decision.fused and len(out.global_infos["vdevice"]) == 2
    made = {b.var.name: b.var for b in out["main"].body.blocks[0].bindings}
    assert str(made["y"].ty.vdevice.target.kind) == "cuda"


def test_a_cast_that_a_kernel_made_is_the_input_of_the_next_norm() -> None:
    bb = relax.BlockBuilder()
    shapes = {"x": (5, 24), "g": (24,), "w": (24, 24), "v": (24, 72)}
    x, g, w, v = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in shapes.items())
    op = relax.op
    with bb.function("main", [x, g, w, v]):
        with bb.dataflow():
            first = bb.emit(op.matmul(bb.emit(op.nn.rms_norm(x, g, axes=[-1])), w))
            wide = bb.emit(op.astype(bb.emit(op.add(x, first)), "float32"))
            mean = bb.emit(op.mean(bb.emit(op.multiply(wide, wide)), axis=[-1], keepdims=True))
            inverse = bb.emit(op.rsqrt(bb.emit(op.add(mean, relax.const(1e-6, "float32")))))
            normed = bb.emit(op.multiply(bb.emit(op.multiply(wide, inverse)), g))
            out = bb.emit_output(op.matmul(normed, v))
        bb.emit_func_output(out)
    decisions: list[Decision] = []
    FuseRMSNormMatmul(FuseOptions(target=host_target(), decisions=decisions))(bb.get())
    assert sorted(d.spelling.split()[0] for d in decisions if d.fused) == [
        "rms_decomposed",
        "rms_norm",
    ]
