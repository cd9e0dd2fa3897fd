"""FuseGatedFFN: gates and plain MLPs in every spelling, refusals, numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import tvm

from relax_fusion import DynamicDim, GatedFFN, Norm, NormMatmul, Projection, Reason

from ..support.chains import (
    Chain,
    Rewrite,
    assert_declined,
    assert_numbers,
    assert_untouched,
    calls,
    fused,
    module,
    run_pass,
)

PASS = "FuseGatedFFN"
H = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
RMS = Norm("rms", 1e-5)
N = 48

ACTIVATION_SPELLINGS = {
    "silu": ("silu", "a = R.nn.silu(p)"),
    "gelu": ("gelu", "a = R.nn.gelu(p)"),
    "gelu_tanh": ("gelu_tanh", "a = R.nn.gelu_tanh(p)"),
    "relu": ("relu", "a = R.nn.relu(p)"),
    "silu_by_sigmoid": ("silu", "e = R.sigmoid(p); a = R.multiply(p, e)"),
    "relu_by_maximum": ("relu", 'a = R.maximum(R.const(0.0, "float32"), p)'),
    "quick_gelu": (
        "quick_gelu",
        'd = R.multiply(p, R.const(1.702, "float32")); e = R.sigmoid(d); a = R.multiply(p, e)',
    ),
    "sigmoid": ("sigmoid", "a = R.sigmoid(p)"),
    "tanh": ("tanh", "a = R.tanh(p)"),
    "relu2_by_power": ("relu2", 'e = R.nn.relu(p); a = R.power(e, R.const(2.0, "float32"))'),
    "relu2_by_multiply": ("relu2", "e = R.nn.relu(p); a = R.multiply(e, e)"),
    "relu2_by_square": ("relu2", 'e = R.maximum(p, R.const(0.0, "float32")); a = R.square(e)'),
    "gelu_by_erf": (
        "gelu",
        'e = R.multiply(p, R.const(0.70710678, "float32")); f = R.erf(e)\n'
        'o = R.add(R.const(1.0, "float32"), f); q = R.multiply(R.const(0.5, "float32"), p)\n'
        "a = R.multiply(q, o)",
    ),
    "gelu_by_erf_of_a_quotient": (
        "gelu",
        'e = R.divide(p, R.const(1.41421356, "float32")); f = R.erf(e)\n'
        'o = R.add(f, R.const(1.0, "float32")); q = R.multiply(p, o)\n'
        'a = R.multiply(q, R.const(0.5, "float32"))',
    ),
    "gelu_by_tanh": (
        "gelu_tanh",
        'c = R.power(p, R.const(3.0, "float32")); d = R.multiply(c, R.const(0.044715, "float32"))\n'
        'e = R.add(p, d); f = R.multiply(R.const(0.79788456, "float32"), e); t = R.tanh(f)\n'
        'o = R.add(t, R.const(1.0, "float32")); q = R.multiply(p, R.const(0.5, "float32"))\n'
        "a = R.multiply(q, o)",
    ),
    "gelu_by_tanh_of_products": (
        "gelu_tanh",
        "s = R.multiply(p, p); c = R.multiply(s, p)\n"
        'd = R.multiply(R.const(0.044715, "float32"), c); e = R.add(d, p)\n'
        'f = R.multiply(e, R.const(0.79788456, "float32")); t = R.tanh(f)\n'
        'o = R.add(t, R.const(1.0, "float32")); q = R.multiply(p, o)\n'
        'a = R.multiply(R.const(0.5, "float32"), q)',
    ),
    "gelu_by_tanh_factored": (
        "gelu_tanh",
        'q = R.multiply(p, R.const(0.5, "float32"))\n'
        'e = R.multiply(p, R.const(0.79788456, "float32"))\n'
        'c = R.multiply(p, R.const(0.044715, "float32")); d = R.multiply(c, p)\n'
        'f = R.add(d, R.const(1.0, "float32")); s = R.multiply(e, f); t = R.tanh(s)\n'
        'o = R.add(t, R.const(1.0, "float32")); a = R.multiply(q, o)',
    ),
    "gelu_by_sigmoid_of_a_cubic": (
        "gelu_tanh",
        's = R.square(p); c = R.multiply(s, R.const(0.0713548, "float32"))\n'
        'd = R.add(c, R.const(1.5957691, "float32")); e = R.multiply(d, p)\n'
        "f = R.sigmoid(e); a = R.multiply(p, f)",
    ),
}


def gated(
    activation: str = "silu",
    *,
    rows: int | DynamicDim = 6,
    merged: bool = False,
    gate_first: bool = True,
    norm: Norm | None = RMS,
    layout: str = "kn",
    bias: bool = False,
    dtype: str = "float32",
) -> GatedFFN:
    return GatedFFN(rows, 32, N, layout, merged, gate_first, activation, norm, dtype, dtype, bias)


def merged_case(gate_first: bool, swapped: bool, bias: bool, norm: bool) -> Rewrite:
    words = [w for w, on in (("swapped", swapped), ("bias", bias), ("norm", norm)) if on]
    name = "_".join(["merged", "gate_first" if gate_first else "gate_second", *words])
    gate, up = ("p[0]", "p[1]") if gate_first else ("p[1]", "p[0]")
    body = (H if norm else "") + f"t = R.permute_dims(W); m = R.matmul({'h' if norm else 'x'}, t)\n"
    body += (
        f"{'n = R.add(m, c); ' if bias else ''}p = R.split({'n' if bias else 'm'}, 2, axis=-1)\n"
    )
    body += f"a = {gate}; b = {up}; s = R.nn.silu(a)\n"
    body += "y = R.multiply(b, s)" if swapped else "y = R.multiply(s, b)"
    inputs = "x[6,32] g[32] W[96,32]" if norm else "x[6,32] W[96,32]"
    chain = Chain(name, inputs + (" c[96]" if bias else ""), body, "y")
    work = gated(
        merged=True, gate_first=gate_first, layout="nk", bias=bias, norm=RMS if norm else None
    )
    return Rewrite(chain, work, "x" + " g" * norm + " W" + " c" * bias)


SEPARATE = "x[6,32] g[32] Wg[32,48] Wu[32,48]"
TWO = H + "p = R.matmul(h, Wg); u = R.matmul(h, Wu)\n"
# Behind the exporter of PyTorch the rows of [b, s, k] are one dimension around each matmul.
FLAT = "f = R.reshape({}, R.shape([b * s, 32])); f2 = R.reshape({}, R.shape([b * s, 32]))\n"
FLAT_TWO = FLAT + "p0 = R.matmul(f, Wg); u0 = R.matmul(f2, Wu)\n"
GROUPED = "p = R.reshape({}, R.shape([b, s, 48])); u = R.reshape({}, R.shape([b, s, 48]))\n"
EXPORTED = "x[b,s,32] g[32] Wg[32,48] Wu[32,48]"
SIZES = {"b": 2, "s": 5}


def exported(
    name: str, body: str, args: str, work: GatedFFN, inputs: str = EXPORTED, **options: str
) -> Rewrite:
    """Return a case behind reshapes; its kernel is of ``b * s`` rows."""
    return Rewrite(Chain(name, inputs, body, "y", SIZES, **options), work, args)


BS = DynamicDim("b * s")
RESHAPED = [
    *(
        exported(
            f"exported_{name}",
            H + FLAT_TWO.format("h", "h") + GROUPED.format("p0", "u0") + f"{text}\n"
            "y = R.multiply(a, u)",
            "x g Wg Wu",
            gated(activation, rows=BS),
        )
        for name, (activation, text) in ACTIVATION_SPELLINGS.items()
    ),
    exported(
        "exported_without_a_norm",
        FLAT_TWO.format("x", "x") + GROUPED.format("p0", "u0") + "a = R.nn.silu(p)\n"
        "y = R.multiply(u, a)",
        "x Wg Wu",
        gated(rows=BS, norm=None),
        "x[b,s,32] Wg[32,48] Wu[32,48]",
    ),
    exported(
        "exported_biases_in_front_and_behind",
        H
        + FLAT_TWO.format("h", "h")
        + "p1 = R.add(c, p0)\n"
        + GROUPED.format("p1", "u0")
        + "u2 = R.add(u, d); a = R.nn.gelu(p); y = R.multiply(a, u2)",
        "x g Wg Wu c d",
        gated("gelu", rows=BS, bias=True),
        EXPORTED + " c[48] d[48]",
    ),
    exported(
        "exported_shared_reshape",
        H
        + "f = R.reshape(h, R.shape([b * s, 32])); p0 = R.matmul(f, Wg); u0 = R.matmul(f, Wu)\n"
        + GROUPED.format("p0", "u0")
        + "a = R.nn.silu(p); y = R.multiply(a, u)",
        "x g Wg Wu",
        gated(rows=BS),
    ),
    exported(
        "exported_merged",
        H + "f = R.reshape(h, R.shape([b * s, 32])); m = R.matmul(f, W)\n"
        "r = R.reshape(m, R.shape([b, s, 96])); p = R.split(r, [48], axis=-1)\n"
        "a = p[0]; b1 = p[1]; s1 = R.nn.silu(a); y = R.multiply(s1, b1)",
        "x g W",
        gated(rows=BS, merged=True),
        "x[b,s,32] g[32] W[32,96]",
    ),
    exported(
        "exported_merged_and_halved",
        "f = R.reshape(x, R.shape([b * s, 32])); m = R.matmul(f, W)\n"
        "p = R.split(m, 2, axis=-1); a = p[0]; u = p[1]; s1 = R.nn.silu(a); y = R.multiply(s1, u)",
        "x W",
        gated(rows=BS, merged=True, norm=None),
        "x[b,s,32] W[32,96]",
    ),
    exported(
        "exported_activation_before_the_reshape",
        FLAT_TWO.format("x", "x")
        + "a0 = R.nn.silu(p0)\n"
        + GROUPED.format("a0", "u0")
        + "y = R.multiply(p, u)",
        "x Wg Wu",
        gated(rows=BS, norm=None),
        "x[b,s,32] Wg[32,48] Wu[32,48]",
    ),
    exported(
        "exported_float16",
        H
        + FLAT.format("h", "h")
        + 'p0 = R.matmul(f, Wg, out_dtype="float32"); u0 = R.matmul(f2, Wu, out_dtype="float32")\n'
        + GROUPED.format("p0", "u0")
        + 'q = R.astype(p, "float32"); e = R.sigmoid(q); a = R.multiply(q, e)\n'
        "y = R.multiply(a, u)",
        "x g Wg Wu",
        replace(gated(rows=BS, dtype="float16"), out_dtype="float32"),
        dtype="float16",
    ),
    Rewrite(
        Chain(
            "exported_norm_read_by_another_projection",
            EXPORTED + " Wo[32,16]",
            H + FLAT_TWO.format("h", "h") + GROUPED.format("p0", "u0") + "a = R.nn.silu(p)\n"
            "y = R.multiply(a, u); k = R.reshape(h, R.shape([b * s, 32])); z = R.matmul(k, Wo)",
            "(y, z)",
            SIZES,
        ),
        gated(rows=BS, norm=None),
        "h Wg Wu",
        ("matmul", "nn.rms_norm"),
    ),
    Rewrite(
        Chain(
            "exported_reshape_read_by_another_projection",
            EXPORTED + " Wo[32,16]",
            H + FLAT_TWO.format("h", "h") + GROUPED.format("p0", "u0") + "a = R.nn.silu(p)\n"
            "y = R.multiply(a, u); z = R.matmul(f, Wo)",
            "(y, z)",
            SIZES,
        ),
        gated(rows=BS, norm=None),
        "h Wg Wu",
        ("matmul", "nn.rms_norm"),
    ),
    Rewrite(
        Chain(
            "input_of_other_features",
            "x[6,32] g[32] Wg[64,48] Wu[64,48]",
            H + "f = R.reshape(h, R.shape([3, 64])); p = R.matmul(f, Wg); u = R.matmul(f, Wu)\n"
            "a = R.nn.silu(p); y = R.multiply(a, u)",
            "y",
        ),
        replace(gated(rows=3, norm=None), k=64),
        "h Wg Wu",
        ("nn.rms_norm",),
    ),
]
REWRITES = [
    *RESHAPED,
    *(
        Rewrite(
            Chain(f"separate_{name}", SEPARATE, TWO + text + "; y = R.multiply(a, u)", "y"),
            gated(activation),
            "x g Wg Wu",
        )
        for name, (activation, text) in ACTIVATION_SPELLINGS.items()
    ),
    *(merged_case(*flags) for flags in itertools.product([True, False], repeat=4)),
    Rewrite(
        Chain(
            "separate_biases_symbolic_float16",
            "x[b,s,32] r[b,s,32] g[32] Wg[48,32] Wu[48,32] c[48] d[48]",
            "s0 = R.add(x, r); h = R.nn.rms_norm(s0, g, axes=[-1], epsilon=1e-5)\n"
            "tg = R.permute_dims(Wg); tu = R.permute_dims(Wu)\n"
            "p0 = R.matmul(h, tg); p = R.add(p0, c); u0 = R.matmul(h, tu); u = R.add(d, u0)\n"
            "a = R.nn.gelu_tanh(p); y = R.multiply(u, a)",
            "(y, s0)",
            {"b": 2, "s": 5},
            "float16",
        ),
        gated(
            "gelu_tanh",
            rows=DynamicDim("b * s"),
            layout="nk",
            bias=True,
            dtype="float16",
            norm=Norm("rms", 1e-5, residual=True, returns_sum=True),
        ),
        "x r g Wg Wu c d",
    ),
    Rewrite(
        Chain(
            "split_by_index",
            "x[6,32] W[32,96]",
            "m = R.matmul(x, W); p = R.split(m, [48], axis=1); a = p[0]; b = p[1]\n"
            "s = R.nn.relu(a); y = R.multiply(s, b)",
            "y",
        ),
        gated("relu", merged=True, norm=None),
        "x W",
    ),
    Rewrite(
        Chain(
            "gate_is_also_the_up_projection",
            "x[6,32] W[32,48]",
            "p = R.matmul(x, W); a = R.nn.gelu(p); y = R.multiply(a, p)",
            "y",
        ),
        gated("gelu", norm=None),
        "x W W",
    ),
    Rewrite(
        Chain(
            "plain_mlp",
            "x[2,3,32] g[32] c[32] W[32,48] b[48]",
            "h = R.nn.layer_norm(x, g, c, axes=[-1], epsilon=1e-5); m = R.matmul(h, W)\n"
            "n = R.add(m, b); y = R.nn.gelu_tanh(n)",
            "y",
        ),
        NormMatmul(
            6,
            32,
            (Projection(N, "kn", ("bias", "gelu_tanh")),),
            Norm("layer", 1e-5, beta=True),
            *["float32"] * 2,
        ),
        "x g c W b",
    ),
    Rewrite(
        Chain(
            "plain_mlp_whose_residual_is_the_norm",
            "x[6,32] g[32] W[32,32]",
            H + "m = R.matmul(h, W); a = R.nn.gelu(m); y = R.add(a, h)",
            "y",
        ),
        NormMatmul(
            6,
            32,
            (Projection(32, "kn", ("gelu",)),),
            Norm("rms", 1e-5, returns_norm=True),
            *["float32"] * 2,
        ),
        "x g W",
        ("add",),
    ),
    Rewrite(
        Chain(
            "norm_read_by_another_projection",
            SEPARATE + " Wo[32,16]",
            TWO + "a = R.nn.silu(p); y = R.multiply(a, u); z = R.matmul(h, Wo)",
            "(y, z)",
        ),
        gated(norm=None),
        "h Wg Wu",
        ("matmul", "nn.rms_norm"),
    ),
]


@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check(PASS)


def test_one_kernel_between_the_reshapes_of_its_input_and_its_result() -> None:
    chain = next(r.chain for r in RESHAPED if r.chain.name == "exported_silu")
    func, decision = fused(chain, PASS)
    assert calls(func) == ["reshape", "call_tir", "reshape"]
    assert decision.spelling == "rms_norm separate silu"


def test_constants_that_are_only_close_are_no_gelu() -> None:
    for wrong, right in (("0.5005", "0.5"), ("0.7069", "0.70710678"), ("1.001", "1.0")):
        text = ACTIVATION_SPELLINGS["gelu_by_erf"][1].replace(f"({right},", f"({wrong},")
        assert wrong in text
        chain = Chain("main", "x[6,32] W[32,48]", "p = R.matmul(x, W)\n" + text, "a")
        assert_untouched(module([chain]), PASS)


def test_float16_constants_are_read_as_rounded() -> None:
    name, text = ACTIVATION_SPELLINGS["gelu_by_tanh"]
    body = "p = R.matmul(x, W)\n" + text.replace("float32", "float16")
    _, decision = fused(Chain("main", "x[6,32] W[32,48]", body, "a", dtype="float16"), PASS)
    assert decision.workload.outputs[0].epilogue == (name,)


# --- declines --------------------------------------------------------------------------------

SPLIT = "m = R.matmul(x, W); p = R.split(m, {}, axis={}); a = p[0]; b = p[1]\n"
GATE = "s = R.nn.silu(a); y = R.multiply(s, b)"
TWO_RESHAPED = (
    TWO + "q = R.reshape(p, R.shape([2, 3, 48])); v = R.reshape(u, R.shape([2, 3, 48]))\n"
    "a = R.nn.silu(q); y = R.multiply(a, v)\n"
)
DECLINES = [
    (
        "gate_leaks",
        SEPARATE,
        TWO + "a = R.nn.silu(p); y = R.multiply(a, u)",
        "(y, p)",
        Reason.LEAKED,
    ),
    (
        "act_leaks",
        SEPARATE,
        TWO + "a = R.nn.silu(p); y = R.multiply(a, u)",
        "(y, a)",
        Reason.LEAKED,
    ),
    (
        "gate_read_elsewhere",
        SEPARATE,
        TWO + "a = R.nn.silu(p); y = R.multiply(a, u); z = R.nn.softmax(p)",
        "(y, z)",
        Reason.MULTI_USE,
    ),
    (
        "merged_matmul_read_elsewhere",
        "x[6,32] W[32,96]",
        SPLIT.format(2, -1) + GATE + "; z = R.nn.softmax(m)",
        "(y, z)",
        Reason.MULTI_USE,
    ),
    (
        "reshaped_gate_read_elsewhere",
        "x[6,32] g[32] Wg[32,48] Wu[32,48]",
        TWO_RESHAPED + "z = R.nn.softmax(q)",
        "(y, z)",
        Reason.MULTI_USE,
    ),
    (
        "gate_read_in_front_of_its_reshape",
        "x[6,32] g[32] Wg[32,48] Wu[32,48]",
        TWO_RESHAPED + "z = R.nn.softmax(p)",
        "(y, z)",
        Reason.MULTI_USE,
    ),
    (
        "halves_reshaped_differently",
        "x[6,32] g[32] Wg[32,48] Wu[32,48]",
        TWO_RESHAPED.replace(
            "v = R.reshape(u, R.shape([2, 3", "v = R.reshape(u, R.shape([6, 1"
        ).replace("q = R.reshape(p, R.shape([2, 3", "q = R.reshape(p, R.shape([1, 6"),
        "y",
        Reason.SHAPE,
    ),
    (
        "layouts_differ",
        "x[6,32] Wg[32,48] Wu[48,32]",
        "t = R.permute_dims(Wu); a = R.matmul(x, Wg); b = R.matmul(x, t)\n" + GATE,
        "y",
        Reason.LAYOUT,
    ),
    (
        "one_bias",
        "x[6,32] Wg[32,48] Wu[32,48] c[48]",
        "m = R.matmul(x, Wg); a = R.add(m, c); b = R.matmul(x, Wu)\n" + GATE,
        "y",
        Reason.ATTRIBUTE,
    ),
    (
        "up_of_one_feature",
        "x[6,32] Wg[32,48] Wu[32,1]",
        "a = R.matmul(x, Wg); b = R.matmul(x, Wu)\n" + GATE,
        "y",
        Reason.SHAPE,
    ),
    (
        "up_weight_depends_on_the_norm",
        "x[32,32] g[32] Wg[32,32]",
        H + "a = R.matmul(h, Wg); b = R.matmul(h, h)\n" + GATE,
        "y",
        Reason.CYCLE,
    ),
]


@pytest.mark.parametrize("case", DECLINES, ids=lambda c: c[0])
def test_declines(case: tuple[str, str, str, str, Reason]) -> None:
    name, inputs, body, result, reason = case
    out, decisions = run_pass(mod := module([Chain(name, inputs, body, result)]), PASS)
    assert [d.decline.reason for d in decisions if d.decline] == [reason]
    taken = [d for d in decisions if d.fused]
    if name in ("layouts_differ", "one_bias", "up_of_one_feature"):
        assert [d.spelling.split(":")[0] for d in taken] == ["plain MLP"]  # the gate alone
    else:
        assert taken == []
        tvm.ir.assert_structural_equal(out, mod)


def test_declines_dtype() -> None:
    body = TWO + "a = R.nn.silu(p); y = R.multiply(a, u)"
    chain = Chain("main", SEPARATE, body, "y", dtype="float64")
    assert_declined(module([chain]), PASS, Reason.DTYPE, "float64")


UNTOUCHED = [
    ("thirds", "x[6,32] W[32,96]", SPLIT.format(3, -1) + GATE, "y"),
    ("halves_of_rows", "x[6,32] W[32,96]", SPLIT.format(2, 0) + GATE, "y"),
    ("uneven", "x[6,32] W[32,2]", SPLIT.format("[1]", 0) + GATE, "y"),
    ("odd", "x[6,32] W[32,3]", SPLIT.format(2, -1) + GATE, "y"),
    (
        "the_same_half_twice",
        "x[6,32] W[32,96]",
        SPLIT.format(2, -1).replace("p[1]", "p[0]") + GATE,
        "y",
    ),
    (
        "reshapes_mix_features",
        "x[6,32] Wg[32,48] Wu[32,48]",
        "p = R.matmul(x, Wg); u = R.matmul(x, Wu); a = R.reshape(p, R.shape([12, 24]))\n"
        "b = R.reshape(u, R.shape([12, 24]))\n" + GATE,
        "y",
    ),
    (
        "narrower_than_the_input",
        "x[6,32] Wg[32,48] Wu[32,48]",
        "p = R.matmul(x, Wg); b0 = R.matmul(x, Wu); b = R.reshape(b0, R.shape([2, 3, 48]))\n"
        'q = R.reshape(p, R.shape([2, 3, 48])); k = R.astype(q, "float16")\n'
        'a = R.astype(k, "float32")\n' + GATE,
        "y",
    ),
    (
        "biases_of_one_element",
        "x[6,32] Wg[32,48] Wu[32,48] c[1] d[1]",
        "k = R.matmul(x, Wg); a = R.add(k, c); l = R.matmul(x, Wu); b = R.add(l, d)\n" + GATE,
        "y",
    ),
    (
        "gate_that_is_no_projection",
        "x[6,32] z[6,48] W[32,48]",
        "a = R.nn.softmax(z); b = R.matmul(x, W)\n" + GATE,
        "y",
    ),
    ("one_feature_and_the_rest", "x[6,32] W[32,96]", SPLIT.format("[1]", -1) + GATE, "y"),
    (
        "halves_of_two_biases",
        "x[6,32] W[32,96] c[96] d[96]",
        "m = R.matmul(x, W); k = R.add(m, c); l = R.add(m, d); p = R.split(k, 2, axis=-1)\n"
        "q = R.split(l, 2, axis=-1); a = p[0]; b = q[1]\n" + GATE,
        "y",
    ),
    (
        "halves_of_two_matmuls",
        "x[6,32] W[32,96] Wo[32,96]",
        "k = R.matmul(x, W); l = R.matmul(x, Wo); p = R.split(k, 2, axis=-1)\n"
        "q = R.split(l, 2, axis=-1); a = p[0]; b = q[1]\n" + GATE,
        "y",
    ),
]


@pytest.mark.parametrize("case", UNTOUCHED, ids=lambda c: c[0])
def test_is_no_gate(case: tuple[str, str, str, str]) -> None:
    mod = module([Chain(*case)])
    if case[0] == "odd":  # ceil(3 / 2) and 1 features, of which the second is broadcast
        assert [int(d) for d in mod["odd"].ret_ty.shape.values] == [6, 2]
    assert_untouched(mod, PASS)


HALVES = [
    (
        "inputs_of_other_features",
        "x[6,32] Wg[64,48] Wu[64,48]",
        "f = R.reshape(x, R.shape([3, 64])); k = R.reshape(x, R.shape([3, 64]))\n"
        "p = R.matmul(f, Wg); u = R.matmul(k, Wu); a = R.reshape(p, R.shape([1, 3, 48]))\n"
        "b = R.reshape(u, R.shape([1, 3, 48]))\n" + GATE,
        "y",
    ),
    (
        "reshapes_of_two_inputs",
        "x[2,3,32] z[2,3,32] Wg[32,48] Wu[32,48]",
        "f = R.reshape(x, R.shape([6, 32])); k = R.reshape(z, R.shape([6, 32]))\n"
        "p = R.matmul(f, Wg); u = R.matmul(k, Wu); a = R.reshape(p, R.shape([2, 3, 48]))\n"
        "b = R.reshape(u, R.shape([2, 3, 48]))\n" + GATE,
        "y",
    ),
]
"""Products whose halves are of two inputs: the gate's projection takes its activation alone."""


@pytest.mark.parametrize("case", HALVES, ids=lambda case: case[0])
def test_half_of_a_product_is_a_projection_with_an_activation(case: tuple[str, ...]) -> None:
    func, decision = fused(Chain(*case), PASS)
    assert isinstance(decision.workload, NormMatmul)
    assert decision.workload.outputs[0].epilogue == ("silu",)
    assert sorted({*calls(func)} - {"reshape"}) == ["call_tir", "matmul", "multiply"]


@pytest.mark.parametrize("up_first", [False, True])
def test_gate_and_up_without_a_norm(up_first: bool) -> None:
    """The gate's projection with its activation alone would be a plain MLP."""
    gate, up = "a = R.matmul(x, Wg)\n", "b = R.matmul(x, Wu)\n"
    body = (up + gate if up_first else gate + up) + GATE
    func, decision = fused(Chain("main", "x[6,32] Wg[32,48] Wu[32,48]", body, "y"), PASS)
    assert decision.workload == gated(norm=None) and calls(func) == ["call_tir"]


def test_gate_and_up_of_two_inputs() -> None:
    body = "a = R.matmul(x, Wg); b = R.matmul(z, Wu)\n" + GATE
    func, decision = fused(Chain("main", "x[6,32] z[6,32] Wg[32,48] Wu[32,48]", body, "y"), PASS)
    assert decision.spelling == "plain MLP: matmul NN silu" and calls(func).count("matmul") == 1


# --- numbers ---------------------------------------------------------------------------------

CHAINS = [r.chain for r in REWRITES]
CHAINS += [Chain(*case[:4]) for case in (*DECLINES, *UNTOUCHED) if case[0] not in ("odd", "uneven")]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
