"""FuseMatmulEpilogue: what a matmul takes along, what it leaves, numbers."""

from __future__ import annotations

import itertools

import pytest
import tvm
from tvm import relax

from relax_fusion import DynamicDim, NormMatmul, Projection, Reason
from relax_fusion.workload import Step

from ..support.chains import (
    Chain,
    Rewrite,
    assert_declined,
    assert_numbers,
    assert_untouched,
    compiled,
    module,
    run_pass,
)

PASS = "FuseMatmulEpilogue"


def work(
    *steps: Step,
    rows: int | DynamicDim = 6,
    layout: str = "kn",
    n: int = 48,
    dtype: str = "float32",
    out: str | None = None,
) -> NormMatmul:
    return NormMatmul(rows, 32, (Projection(n, layout, steps),), None, dtype, out or dtype)


M = "m = R.matmul(x, W)\n"
STEPS = {
    "bias": "{0} = R.add({1}, b)",
    "residual": "{0} = R.add(r, {1})",
    "gelu": "{0} = R.nn.gelu({1})",
    "scale": "{0} = R.multiply(g, {1})",
    0.5: '{0} = R.multiply({1}, R.const(0.5, "float32"))',
    0.25: '{0} = R.divide({1}, R.const(4.0, "float32"))',
}
OPERANDS = {"bias": "b", "residual": "r", "scale": "g"}


def in_order(steps: tuple[Step, ...]) -> Rewrite:
    names = ["m", *(f"v{i}" for i in range(1, len(steps))), "y"]
    lines = [STEPS[s].format(names[i + 1], names[i]) for i, s in enumerate(steps)]
    args = [OPERANDS[s] for s in steps if s in OPERANDS]
    name = "_".join(f"by{100 * s:.0f}" if isinstance(s, float) else s for s in steps)
    chain = Chain(name, "x[6,32] W[32,48] b[48] g[48] r[6,48]", M + "; ".join(lines), "y")
    return Rewrite(chain, work(*steps), " ".join(["x W", *args]))


def alone(name: str, body: str, left: str, others: str = "", result: str = "y") -> Rewrite:
    """Return a case of a matmul that takes along nothing of `body`."""
    chain = Chain(name, "x[6,32] W[32,48]" + others, M + body, result)
    return Rewrite(chain, work(), "x W", tuple(left.split()))


OF_MODELS: tuple[tuple[Step, ...], ...] = (
    ("bias", 0.5, "residual"),
    (0.25,),
    ("bias", "scale", "residual"),
    ("scale", "bias", "gelu"),
    ("bias", "residual", "residual"),
    (0.5, "residual", "bias", "residual", "scale"),
)
"""Granite's factor, Cohere's logits, LayerScale, a norm in inference, parallel blocks, and more."""

LEFT_BEHIND = [
    alone("features_cut", "g = R.reshape(m, [6, 4, 12]); y = R.add(r, g)", "add", " r[6,4,12]"),
    alone("bias_of_one", "y = R.add(m, b)", "add", " b[1]"),
    alone("column_multiplied", "y = R.multiply(m, g)", "multiply", " g[6,1]"),
    alone("tensor_multiplied", "y = R.multiply(m, r)", "multiply", " r[6,48]"),
    alone("squared", "y = R.multiply(m, m)", "multiply"),
    alone("column_added", "y = R.add(m, b)", "add", " b[6,1]"),
    alone("rank_raised", "y = R.add(m, r)", "add", " r[1,6,48]"),
    alone("added_to_itself", "y = R.add(m, m)", "add"),
    alone("product_read_twice", "n = R.add(m, b); y = R.add(n, m)", "add add", " b[48]"),
    alone("product_returned", "y = R.nn.silu(m)", "nn.silu", result="(y, m)"),
    alone(
        "activation_source_read_elsewhere",
        "e = R.sigmoid(m); a = R.multiply(m, e); y = R.add(a, m)",
        "add multiply sigmoid",
    ),
    alone(
        "sigmoid_returned",
        "e = R.sigmoid(m); y = R.multiply(m, e)",
        "multiply sigmoid",
        result="(y, e)",
    ),
    Rewrite(
        Chain("added_per_sequence", "x[2,3,32] W[32,48] r[3,48]", M + "y = R.add(m, r)", "y"),
        work(),
        "x W",
        ("add",),
    ),
]
REWRITES = [
    *LEFT_BEHIND,
    Rewrite(Chain("alone", "x[6,32] W[32,48]", "y = R.matmul(x, W)", "y"), work(), "x W"),
    *(in_order(steps) for steps in itertools.permutations(("bias", "residual", "gelu"))),
    *(in_order(steps) for steps in OF_MODELS),
    Rewrite(
        Chain(
            "symbolic_float16_nt",
            "x[b,s,32] W[48,32] c[48] r[b,s,48]",
            "t = R.permute_dims(W); m = R.matmul(x, t); n = R.add(m, c); y = R.add(r, n)",
            "y",
            {"b": 2, "s": 7},
            "float16",
        ),
        work("bias", "residual", rows=DynamicDim("b * s"), layout="nk", dtype="float16"),
        "x W c r",
    ),
    Rewrite(
        Chain(
            "rows_grouped_anew",
            "x[6,32] W[32,48] b[48] r[2,3,48]",
            M + "n = R.add(m, b); g = R.reshape(n, [2, 3, 48]); y = R.add(r, g)",
            "y",
        ),
        work("bias", "residual"),
        "x W b r",
    ),
    Rewrite(
        Chain("bias_with_ones", "x[2,3,32] W[32,48] b[1,1,48]", M + "y = R.add(m, b)", "y"),
        work("bias"),
        "x W b",
    ),
    Rewrite(
        Chain("broadcast_up", "x[1,32] W[32,48] r[6,48]", M + "y = R.add(m, r)", "y"),
        work(rows=1),
        "x W",
        ("add",),
    ),
    Rewrite(
        Chain("one_row_and_bias_alike", "x[1,32] W[32,48] r[1,48]", M + "y = R.add(m, r)", "y"),
        work("residual", rows=1),
        "x W r",
    ),
    Rewrite(
        Chain("residual_is_x", "x[6,32] W[32,32]", M + "y = R.add(m, x)", "y"),
        work("residual", n=32),
        "x W x",
    ),
    Rewrite(
        Chain("residual_is_the_weight", "x[32,32] W[32,32]", M + "y = R.add(m, W)", "y"),
        work("residual", n=32, rows=32),
        "x W W",
    ),
    Rewrite(
        Chain(
            "transposed_input", "x[32,6] W[32,48]", "t = R.permute_dims(x); y = R.matmul(t, W)", "y"
        ),
        work(),
        "t W",
        ("permute_dims",),
    ),
    Rewrite(
        Chain(
            "times_its_own_transpose", "x[6,32]", "t = R.permute_dims(x); y = R.matmul(x, t)", "y"
        ),
        work(n=6, layout="nk"),
        "x x",
    ),
    Rewrite(
        Chain(
            "float16_to_float32",
            "x[6,32] W[32,48]",
            M + 'y = R.astype(m, "float32")',
            "y",
            dtype="float16",
        ),
        work(dtype="float16", out="float32"),
        "x W",
    ),
    Rewrite(
        Chain(
            "rounded_in_between",
            "x[6,32] W[32,48]",
            M + 'h = R.astype(m, "float16"); y = R.astype(h, "float32")',
            "y",
        ),
        work(out="float16"),
        "x W",
        ("astype",),
    ),
    Rewrite(
        Chain(
            "activated_behind_a_rounding",
            "x[6,32] W[32,48]",
            M + 'h = R.astype(m, "bfloat16"); y = R.nn.silu(h)',
            "y",
        ),
        work(out="bfloat16"),
        "x W",
        ("nn.silu",),
    ),
    Rewrite(
        Chain(
            "bias_after_a_cast",
            "x[6,32]:float16 W[32,48]:float16 b[48]",
            M + 'w = R.astype(m, "float32"); y = R.add(w, b)',
            "y",
        ),
        work(dtype="float16", out="float32"),
        "x W",
        ("add",),
    ),
    Rewrite(
        Chain(
            "widened_operands_after_a_cast",
            "x[6,32]:float16 W[32,48]:float16 b[48]:float16 r[6,48]:float16",
            M + 'w = R.astype(m, "float32"); c = R.astype(b, "float32"); v = R.add(c, w)\n'
            's = R.astype(r, "float32"); y = R.add(v, s)',
            "y",
        ),
        work("bias", "residual", dtype="float16", out="float32"),
        "x W b r",
    ),
    Rewrite(
        Chain(
            "bias_widened_from_another_dtype",
            "x[6,32]:float16 W[32,48]:float16 b[48]:bfloat16",
            M + 'w = R.astype(m, "float32"); c = R.astype(b, "float32"); y = R.add(w, c)',
            "y",
        ),
        work(dtype="float16", out="float32"),
        "x W",
        ("astype", "add"),
    ),
]


@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check(PASS)


def test_constant_weight() -> None:
    mod = module([Chain("main", "x[6,32] W[32,48]", M + "y = R.nn.relu(m)", "y")])
    weight = tvm.runtime.tensor(Chain("w", "W[32,48]", "", "").arrays()[0])
    bound = relax.transform.BindParams("main", {"W": weight})(mod)
    out, (decision,) = run_pass(bound, PASS)
    assert decision.workload == work("relu") and len(out["main"].params) == 1


# --- declines --------------------------------------------------------------------------------

DECLINES = [
    (
        "dynamic_k",
        "x[6,k] W[k,48]",
        "y = R.matmul(x, W)",
        Reason.SHAPE,
        "input features is dynamic",
    ),
    ("no_rows", "x[0,32] W[32,48]", "y = R.matmul(x, W)", Reason.SHAPE, "no rows"),
    ("no_features", "x[6,0] W[0,48]", "y = R.matmul(x, W)", Reason.SHAPE, "at least 1"),
    (
        "int8",
        "x[6,32]:int8 W[32,48]:int8",
        'y = R.matmul(x, W, out_dtype="int32")',
        Reason.DTYPE,
        "int8",
    ),
    (
        "float64",
        "x[6,32]:float64 W[32,48]:float64",
        "y = R.matmul(x, W)",
        Reason.DTYPE,
        "float64",
    ),
    (
        "float16_to_float64",
        "x[6,32]:float16 W[32,48]:float16",
        'y = R.matmul(x, W, out_dtype="float64")',
        Reason.DTYPE,
        "float64",
    ),
]


@pytest.mark.parametrize("case", DECLINES, ids=lambda c: c[0])
def test_declines(case: tuple[str, str, str, Reason, str]) -> None:
    name, inputs, body, reason, words = case
    assert_declined(module([Chain(name, inputs, body, "y")]), PASS, reason, words)


UNTOUCHED = [
    ("weight_of_three_dimensions", "x[2,6,32] W[2,32,48]", "y = R.matmul(x, W)"),
    ("vector_times_matrix", "x[32] W[32,48]", "y = R.matmul(x, W)"),
    ("matrix_times_vector", "x[6,32] W[32]", "y = R.matmul(x, W)"),
]


@pytest.mark.parametrize("case", UNTOUCHED, ids=lambda c: c[0])
def test_is_no_projection(case: tuple[str, str, str]) -> None:
    assert_untouched(module([Chain(*case, "y")]), PASS)


# --- chains that meet ------------------------------------------------------------------------

MEETING = {
    "two": (
        "m = R.matmul(x, W); p = R.add(m, b); n = R.matmul(x, V); q = R.add(n, c)\ny = R.add(p, q)",
        [("bias", "residual"), ("bias",)],
    ),
    "one_of_them_activated": (
        "m = R.matmul(x, W); p = R.add(m, b); n = R.matmul(x, V); q = R.nn.gelu(n)\n"
        "y = R.add(q, p)",
        [("bias", "residual"), ("gelu",)],
    ),
    "a_sum_of_three": (
        "m = R.matmul(x, W); n = R.matmul(x, V); p = R.add(m, n); o = R.matmul(x, U)\n"
        "q = R.add(o, c); y = R.add(p, q)",
        [("residual", "residual"), (), ("bias",)],
    ),
}


@pytest.mark.parametrize("name", MEETING)
def test_an_addition_goes_to_one_of_two_kernels(name: str) -> None:
    body, epilogues = MEETING[name]
    inputs = "x[6,32] W[32,48] V[32,48] U[32,48] b[48] c[48]"
    chain = Chain(name, inputs, body, "y")
    mod = module([chain])
    _, decisions = run_pass(mod, PASS)
    assert [d.workload.outputs[0].epilogue for d in decisions if d.fused] == epilogues
    assert_numbers(compiled(mod), mod, chain)


# --- numbers ---------------------------------------------------------------------------------

CHAINS = [r.chain for r in REWRITES] + [Chain(*case, "y") for case in UNTOUCHED]
CHAINS += [
    Chain(*case[:3], "y", {"n": 5, "k": 32}) for case in DECLINES if case[0].startswith("dyn")
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)


@pytest.mark.parametrize("rows", [0, 1, 2, 17, 70, 300])
def test_every_range_of_rows(ranges, rows: int) -> None:
    vm, mod, chain = ranges
    sized = Chain(chain.name, chain.inputs, chain.body, chain.result, {"n": rows})
    if rows == 0:
        arrays = sized.arrays()
        assert vm["rows"](*map(tvm.runtime.tensor, arrays)).shape == (0, 40)
    else:
        assert_numbers(vm, mod, sized)


@pytest.fixture(scope="module")
def ranges():
    body = "t = R.permute_dims(W); m = R.matmul(x, t); y = R.add(m, r)"
    chain = Chain("rows", "x[n,32] W[40,32] r[n,40]", body, "y")
    mod = module([chain])
    return compiled(mod), mod, chain


def test_an_activation_of_another_is_left_behind() -> None:
    """Each repeats what is in front of it: kernels of two took minutes to compile."""
    steps = "; ".join(f"v{i + 1} = R.nn.gelu_tanh(v{i})" for i in range(6))
    chain = Chain("six", "x[6,32] W[32,48]", f"v0 = R.matmul(x, W); {steps}", "v6")
    for name in (PASS, "FuseGatedFFN"):
        mod, _ = run_pass(module([chain]), name)
        assert mod["six"].script().count("R.nn.gelu_tanh") == 5
