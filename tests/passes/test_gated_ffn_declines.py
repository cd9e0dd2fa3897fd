"""FuseGatedFFN: what it declines and why, what is no gate, and halves of products; numbers."""

from __future__ import annotations

import pytest
import tvm

from relax_fusion import NormMatmul, Reason

from ..support.chains import (
    Chain,
    assert_declined,
    assert_numbers,
    assert_untouched,
    calls,
    fused,
    module,
    run_pass,
)
from ..support.gated_chains import PASS, SEPARATE, TWO, H, gated

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


CHAINS = [Chain(*case[:4]) for case in (*DECLINES, *UNTOUCHED) if case[0] not in ("odd", "uneven")]


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
