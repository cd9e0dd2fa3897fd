"""FuseRMSNormMatmul: every spelling, every refusal, and the numbers."""

from __future__ import annotations

import numpy as np
import pytest
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

from ..support.chains import (
    Chain,
    Rewrite,
    assert_declined,
    assert_numbers,
    assert_untouched,
    calls,
    compiled,
    fused,
    module,
    run_pass,
)

PASS = "FuseRMSNormMatmul"
RMS = Norm("rms", 1e-5)
RMS_FLOAT32 = Norm("rms", float(np.float32(1e-5)))  # epsilon as a float32 constant
LAYER = Norm("layer", 1e-5, beta=True)
H = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
OF_SUM = "h = R.nn.rms_norm(s, g, axes=[-1], epsilon=1e-5)\n"


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


def decomposed(x: str = "x") -> str:
    return f"""sq = R.power({x}, R.const(2.0, "float32"))
        mean = R.mean(sq, axis=[-1], keepdims=True)
        shifted = R.add(mean, R.const(1e-5, "float32"))
        inv = R.rsqrt(shifted)
        scaled = R.multiply({x}, inv)
    """


OFFSET = Norm("rms", 1e-5, unit_offset=True)
ONE_MORE = """f = R.astype(g, "float32")
        o = R.add(R.const(1.0, "float32"), f)
"""
WIDE = """x32 = R.astype(x, "float32")
        n = R.nn.rms_norm(x32, o, axes=[-1], epsilon=1e-5)
        h = R.astype(n, "float16")
"""
WIDE_LAYER = """x32 = R.astype(x, "float32")
        n = R.nn.layer_norm(x32, o, c32, axes=[-1], epsilon=1e-5)
        h = R.astype(n, "bfloat16")
"""


REWRITES = [
    Rewrite(
        Chain("plain", "x[6,32] g[32] W[32,48]", H + "y = R.matmul(h, W)", "y"), work(), "x g W"
    ),
    Rewrite(
        Chain(
            "transposed_weight",
            "x[6,32] g[32] W[48,32]",
            H + "t = R.permute_dims(W); y = R.matmul(h, t)",
            "y",
        ),
        work(layout="nk"),
        "x g W",
    ),
    Rewrite(
        Chain(
            "symbolic_float16",
            "x[b,s,32] g[32] W[48,32]",
            H + "t = R.permute_dims(W, axes=[1, 0]); y = R.matmul(h, t)",
            "y",
            {"b": 3, "s": 7},
            "float16",
        ),
        work(layout="nk", rows=DynamicDim("b * s"), dtype="float16"),
        "x g W",
    ),
    Rewrite(
        Chain(
            "float32_result",
            "x[6,32] g[32] W[32,48]",
            H + 'y = R.matmul(h, W, out_dtype="float32")',
            "y",
            dtype="float16",
        ),
        work(dtype="float16", out="float32"),
        "x g W",
    ),
    Rewrite(
        Chain(
            "unit_offset",
            "x[6,32] g[32] W[32,48]",
            'o = R.add(g, R.const(1.0, "float32"))\n'
            + H.replace("x, g", "x, o")
            + "y = R.matmul(h, W)",
            "y",
        ),
        work(norm=OFFSET),
        "x g W",
    ),
    Rewrite(
        Chain(
            "unit_offset_between_casts",
            "x[6,32] g[32] W[32,48]",
            ONE_MORE + WIDE + "y = R.matmul(h, W)",
            "y",
            dtype="float16",
        ),
        work(norm=OFFSET, dtype="float16"),
        "x g W",
    ),
    Rewrite(
        Chain(
            "layer_norm_between_casts",
            "x[6,32] g[32] c[32] W[32,48]",
            ONE_MORE
            + 'c32 = R.astype(c, "float32")\n'
            + WIDE.replace("rms_norm(x32, o", "layer_norm(x32, o, c32").replace(
                "float16", "bfloat16"
            )
            + "y = R.matmul(h, W)",
            "y",
            dtype="bfloat16",
        ),
        work(norm=Norm("layer", 1e-5, beta=True, unit_offset=True), dtype="bfloat16"),
        "x g c W",
    ),
    Rewrite(
        Chain(
            "casts_that_others_read",
            "x[6,32] g[32] W[32,48]",
            ONE_MORE + WIDE + "y = R.matmul(h, W); z = R.multiply(x32, o)",
            "(y, z)",
            dtype="float16",
        ),
        work(norm=OFFSET, dtype="float16"),
        "x g W",
        left=("astype", "add", "astype", "multiply"),
    ),
    Rewrite(
        Chain(
            "decomposed",
            "x[6,32] g[32] W[32,48]",
            decomposed() + "h = R.multiply(scaled, g); y = R.matmul(h, W)",
            "y",
        ),
        work(norm=RMS_FLOAT32),
        "x g W",
    ),
    Rewrite(
        Chain(
            "decomposed_with_casts",
            "x[6,32] g[32] W[32,48]",
            'wide = R.astype(x, "float32")\n'
            + decomposed("wide")
            + 'half = R.astype(scaled, "float16"); h = R.multiply(g, half); y = R.matmul(h, W)',
            "y",
            dtype="float16",
        ),
        work(dtype="float16", norm=RMS_FLOAT32),
        "x g W",
    ),
    Rewrite(
        Chain(
            "square_by_multiply",
            "x[6,32] g[32] W[32,48]",
            decomposed().replace('R.power(x, R.const(2.0, "float32"))', "R.multiply(x, x)")
            + "h = R.multiply(g, scaled); y = R.matmul(h, W)",
            "y",
        ),
        work(norm=RMS_FLOAT32),
        "x g W",
    ),
    Rewrite(
        Chain(
            "square_operator",
            "x[6,32] g[32] W[32,48]",
            decomposed().replace('R.power(x, R.const(2.0, "float32"))', "R.square(x)")
            + "h = R.multiply(g, scaled); y = R.matmul(h, W)",
            "y",
        ),
        work(norm=RMS_FLOAT32),
        "x g W",
    ),
    Rewrite(
        Chain(
            "layer_norm",
            "x[2,3,32] g[32] c[32] W[32,48]",
            "h = R.nn.layer_norm(x, g, c, axes=[-1], epsilon=1e-5); y = R.matmul(h, W)",
            "y",
        ),
        work(norm=LAYER),
        "x g c W",
    ),
    Rewrite(
        Chain(
            "residual_before",
            "x[6,32] r[6,32] g[32] W[32,48]",
            "s = R.add(x, r)\n" + OF_SUM + "y = R.matmul(h, W)",
            "y",
        ),
        work(norm=Norm("rms", 1e-5, residual=True)),
        "x r g W",
    ),
    Rewrite(
        Chain(
            "sum_with_a_broadcast_tensor_stays_out",
            "x[6,32] r[1,32] g[32] W[32,48]",
            "s = R.add(x, r)\n" + OF_SUM + "y = R.matmul(h, W)",
            "y",
        ),
        work(),
        "s g W",
        ("add",),
    ),
    Rewrite(
        Chain(
            "sum_returned",
            "x[6,32] r[6,32] g[32] W[32,48]",
            "s = R.add(x, r)\n" + OF_SUM + "y = R.matmul(h, W)",
            "(s, y)",
        ),
        work(norm=Norm("rms", 1e-5, residual=True, returns_sum=True)),
        "x r g W",
    ),
    Rewrite(
        Chain("norm_returned", "x[6,32] g[32] W[32,48]", H + "y = R.matmul(h, W)", "(y, h)"),
        work(norm=Norm("rms", 1e-5, returns_norm=True)),
        "x g W",
    ),
    Rewrite(
        Chain(
            "sum_and_norm_returned",
            "x[6,32] r[6,32] g[32] W[32,48]",
            "s = R.add(x, r)\n" + OF_SUM + "y = R.matmul(h, W)",
            "(y, h, s)",
        ),
        work(norm=Norm("rms", 1e-5, residual=True, returns_sum=True, returns_norm=True)),
        "x r g W",
    ),
    Rewrite(
        Chain(
            "bias_gelu_residual",
            "x[2,3,32] g[32] W[32,48] b[48] t[2,3,48]",
            H + "m = R.matmul(h, W); p = R.add(m, b); a = R.nn.gelu(p); y = R.add(t, a)",
            "y",
        ),
        work("bias", "gelu", "residual"),
        "x g W b t",
    ),
    Rewrite(
        Chain(
            "separate_qkv",
            "x[b,1,32] g[32] Wq[32,32] Wk[16,32] Wv[16,32] c[16]",
            H
            + "tk = R.permute_dims(Wk); tv = R.permute_dims(Wv); q = R.matmul(h, Wq)\n"
            + "k = R.matmul(h, tk); m = R.matmul(h, tv); v = R.add(m, c)",
            "(q, k, v)",
            {"b": 5},
        ),
        NormMatmul(
            DynamicDim("b"),
            32,
            (Projection(32, "kn"), Projection(16, "nk"), Projection(16, "nk", ("bias",))),
            RMS,
            "float32",
            "float32",
        ),
        "x g Wq Wk Wv c",
    ),
    Rewrite(
        Chain(
            "sum_of_projections",
            "x[6,32] g[32] Wa[32,48] Wb[32,48]",
            H + "p = R.matmul(h, Wa); q = R.matmul(h, Wb); y = R.add(p, q)",
            "(y, p)",
        ),
        NormMatmul(6, 32, (Projection(48, "kn"), Projection(48, "kn")), RMS, *["float32"] * 2),
        "x g Wa Wb",
        ("add",),
    ),
    Rewrite(
        Chain(
            "one_weight_twice",
            "x[6,32] g[32] W[48,32]",
            H + "t = R.permute_dims(W); p = R.matmul(h, t); q = R.matmul(h, t); y = R.nn.silu(q)",
            "(p, y)",
        ),
        NormMatmul(
            6, 32, (Projection(48, "nk"), Projection(48, "nk", ("silu",))), RMS, *["float32"] * 2
        ),
        "x g W W",
    ),
    Rewrite(
        Chain(
            "same_tensor_twice",
            "x[6,32] g[32] W[32,32]",
            "s = R.add(x, x)\n" + OF_SUM + "m = R.matmul(h, W); y = R.add(m, x)",
            "(y, s)",
        ),
        work("residual", n=32, norm=Norm("rms", 1e-5, residual=True, returns_sum=True)),
        "x x g W x",
    ),
    Rewrite(
        Chain(
            "residual_made_by_the_kernel",  # the sum is an output: it cannot be an input too
            "x[6,32] r[6,32] g[32] W[32,32]",
            "s = R.add(x, r)\n" + OF_SUM + "m = R.matmul(h, W); y = R.add(m, s)",
            "y",
        ),
        work(n=32, norm=Norm("rms", 1e-5, residual=True, returns_sum=True)),
        "x r g W",
        ("add",),
    ),
    Rewrite(
        Chain(
            "residual_is_the_norm",
            "x[6,32] g[32] W[32,32]",
            H + "m = R.matmul(h, W); y = R.add(m, h)",
            "y",
        ),
        work(n=32, norm=Norm("rms", 1e-5, returns_norm=True)),
        "x g W",
        ("add",),
    ),
    Rewrite(
        Chain(
            "norm_of_a_norm",
            "x[6,32] g[32] W[32,48]",
            H + "i = R.nn.rms_norm(h, g, axes=[-1], epsilon=1e-5); y = R.matmul(i, W)",
            "y",
        ),
        work(),
        "h g W",
        ("nn.rms_norm",),
    ),
    Rewrite(
        Chain(
            "step_that_depends_on_the_kernel",
            "x[6,32] g[32] W[32,48]",
            H + "m = R.matmul(h, W); e = R.mean(h, axis=[-1], keepdims=True); y = R.add(m, e)",
            "y",
        ),
        work(norm=Norm("rms", 1e-5, returns_norm=True)),
        "x g W",
        ("add", "mean"),
    ),
    Rewrite(
        Chain(
            "wide_residual_stays_out",
            "x[6,32]:float16 g[32]:float16 W[32,48]:float16 t[6,48]",
            H + 'm = R.matmul(h, W); w = R.astype(m, "float32"); y = R.add(w, t)',
            "y",
        ),
        work(dtype="float16", out="float32"),
        "x g W",
        ("add",),
    ),
]


@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check(PASS)


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


def test_merged_sum_of_an_o_projection_stays_with_the_projection() -> None:
    body = "o = R.matmul(a, Wo); s = R.add(o, x)\n" + OF_SUM + "y = R.matmul(h, W)"
    chain = Chain("main", "a[6,32] x[6,32] g[32] Wo[32,32] W[32,48]", body, "(y, s)")
    _, decision = fused(chain, PASS)
    assert decision.workload == work()


def test_residual_that_another_kernel_adds_is_left_to_it() -> None:
    body = H + "m = R.matmul(h, W); a = R.nn.gelu(m); s = R.add(a, x)\n"
    body += "i = R.nn.rms_norm(s, g, axes=[-1], epsilon=1e-5); y = R.matmul(i, V)"
    chain = Chain("main", "x[6,32] g[32] W[32,32] V[32,48]", body, "(y, s)")
    mod = module([chain])
    out, decisions = run_pass(mod, PASS)
    assert [d.workload.norm.residual for d in decisions] == [False, False]
    assert decisions[0].workload.outputs[0].epilogue == ("gelu", "residual")
    assert calls(out["main"]) == ["call_tir", "call_tir"]
    assert_numbers(compiled(mod), mod, chain)


def test_second_run_changes_nothing() -> None:
    mod, _ = run_pass(module([r.chain for r in REWRITES]), PASS)
    again, decisions = run_pass(mod, PASS)
    tvm.ir.assert_structural_equal(again, mod)
    # Only the norm whose other reader is a norm is looked at again.
    assert [d for d in decisions if d.fused] == []


# --- declines --------------------------------------------------------------------------------

AXIS0 = "h = R.nn.rms_norm(x, g, axes=[0], epsilon=1e-5); y = R.matmul(h, W)"
AXES2 = "h = R.nn.rms_norm(x, g, axes=[-2, -1], epsilon=1e-5); y = R.matmul(h, W)"
PLAIN = H + "y = R.matmul(h, W)"
DECLINES = [
    ("axis_0", "x[32,32] g[32] W[32,48]", AXIS0, "y", Reason.AXIS, "axes [0]"),
    ("two_axes", "x[2,6,32] g[6,32] W[32,48]", AXES2, "y", Reason.AXIS, "axes [1, 2]"),
    (
        "mean_over_axis_0",
        "x[32,32] g[32] W[32,48]",
        decomposed().replace("axis=[-1]", "axis=[0]")
        + "h = R.multiply(scaled, g); y = R.matmul(h, W)",
        "y",
        Reason.AXIS,
        "axes [0]",
    ),
    (
        "leaked_inverse",
        "x[6,32] g[32] W[32,48]",
        decomposed() + "h = R.multiply(scaled, g); y = R.matmul(h, W)",
        "(y, inv)",
        Reason.LEAKED,
        "inv",
    ),
    (
        "mean_read_elsewhere",
        "x[6,32] g[32] W[32,48]",
        decomposed() + "h = R.multiply(scaled, g); y = R.matmul(h, W); z = R.nn.relu(mean)",
        "(y, z)",
        Reason.MULTI_USE,
        "mean is also read by z",
    ),
    (
        "no_scale",
        "x[6,32] g[32] c[32] W[32,48]",
        "h = R.nn.layer_norm(x, g, c, axes=[-1], scale=False); y = R.matmul(h, W)",
        "y",
        Reason.ATTRIBUTE,
        "scale",
    ),
    (
        "no_center",
        "x[6,32] g[32] c[32] W[32,48]",
        "h = R.nn.layer_norm(x, g, c, axes=[-1], center=False); y = R.matmul(h, W)",
        "y",
        Reason.ATTRIBUTE,
        "center",
    ),
    (
        "gamma_of_one_element",
        "x[6,32] g[1] W[32,48]",
        decomposed() + "h = R.multiply(scaled, g); y = R.matmul(h, W)",
        "y",
        Reason.SHAPE,
        "norm parameter",
    ),
    (
        "gamma_of_float32",
        "x[6,32]:float16 g[32] W[32,48]:float16",
        WIDE.replace("x32, o", "x32, g") + "y = R.matmul(h, W)",
        "y",
        Reason.DTYPE,
        "float32",
    ),
    (
        "gamma_and_two",
        "x[6,32]:float16 g[32]:float16 W[32,48]:float16",
        ONE_MORE.replace("1.0", "2.0") + WIDE + "y = R.matmul(h, W)",
        "y",
        Reason.DTYPE,
        "float32",
    ),
    ("dynamic_k", "x[6,k] g[k] W[k,48]", PLAIN, "y", Reason.SHAPE, "dynamic (k)"),
    ("no_rows", "x[0,32] g[32] W[32,48]", PLAIN, "y", Reason.SHAPE, "no rows"),
    (
        "mixed_dtypes",
        "x[6,32] g[32]:float16 W[32,48]:float16",
        decomposed()
        + 'half = R.astype(scaled, "float16"); h = R.multiply(g, half); y = R.matmul(h, W)',
        "y",
        Reason.DTYPE,
        "an operand is float16, the chain float32",
    ),
    (
        "rounded_in_front_of_the_matmul",
        "x[6,32] g[32] W[32,48]:float16",
        H + 'half = R.astype(h, "float16"); y = R.matmul(half, W)',
        "y",
        Reason.DTYPE,
        "a norm of float32 rows, rounded to float16 for a matmul",
    ),
    (
        "results_of_two_dtypes",
        "x[6,32] g[32] Wa[32,48] Wb[32,48]",
        H + 'y = R.matmul(h, Wa); m = R.matmul(h, Wb); z = R.astype(m, "float16")',
        "(y, z)",
        Reason.DTYPE,
        "float16, float32",
    ),
    (
        "weight_is_the_norm",
        "x[32,32] g[32]",
        H + "y = R.matmul(h, h)",
        "y",
        Reason.CYCLE,
        "depends on its own",
    ),
    (
        "weight_is_the_norm_transposed",
        "x[32,32] g[32]",
        H + "t = R.permute_dims(h); y = R.matmul(h, t)",
        "y",
        Reason.CYCLE,
        "depends on its own",
    ),
    (
        "weight_made_of_the_norm",
        "x[32,32] g[32]",
        H + "t = R.nn.relu(h); y = R.matmul(h, t)",
        "y",
        Reason.CYCLE,
        "depends on its own",
    ),
    (
        "projection_feeds_its_own_norms_other_weight",
        "x[32,32] g[32] W[32,32]",
        H + "w = R.matmul(h, W); u = R.nn.softmax(w); y = R.matmul(h, u)",
        "y",
        Reason.CYCLE,
        "depends on its own",
    ),
]


@pytest.mark.parametrize("case", DECLINES, ids=lambda c: c[0])
def test_declines(case: tuple[str, str, str, str, Reason, str]) -> None:
    name, inputs, body, result, reason, words = case
    assert_declined(module([Chain(name, inputs, body, result)]), PASS, reason, words)


@pytest.mark.parametrize("dtype", ["float64"])
def test_declines_dtype(dtype: str) -> None:
    chain = Chain("main", "x[6,32] g[32] W[32,48]", PLAIN, "y", dtype=dtype)
    assert_declined(module([chain]), PASS, Reason.DTYPE, dtype)


def test_declines_outside_a_dataflow_block() -> None:
    chain = Chain("main", "x[6,32] g[32] W[32,48]", PLAIN, "y", dataflow=False)
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


# --- numbers ---------------------------------------------------------------------------------

NO_NUMBERS = ("no_rows", "axis_0", "two_axes")
"""Nothing to compare, and two norms that TVM 0.27 cannot legalise."""

CHAINS = [r.chain for r in REWRITES] + [
    Chain(name, inputs, body, result, {"n": 5, "k": 32})
    for name, inputs, body, result, reason, _ in DECLINES
    if name not in NO_NUMBERS
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)


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
