"""A match that is right is found to be, and one of which anything is wrong is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tvm
from tvm import tirx

from relax_fusion import EquivalenceError, FuseMatmulEpilogue, FuseOptions, Reason, Report
from relax_fusion.equivalence import Mismatch, Unchecked, check_match
from relax_fusion.equivalence import check as check_module
from relax_fusion.equivalence.operators import OPERATORS
from relax_fusion.matching import activations, elements
from relax_fusion.matching.pattern import BlockView, Match
from relax_fusion.matching.shapes import dtype_of
from relax_fusion.workload.json import from_json, to_json

from ..support.attention_chains import QKV, attention, positions
from ..support.chains import Chain, module, run_pass
from .matches import largest_match, matched

Case = tuple[BlockView, Match]
NORM = "s = R.add(x, r); h = R.nn.rms_norm(s, g, axes=[-1], epsilon=1e-5)\n"
ROPE = (
    "m = R.matmul(x, W); h = R.reshape(m, R.shape([n, 4, 16])); p = R.split(h, 2, axis=-1)\n"
    "p0 = p[0]; p1 = p[1]; q = R.negative(p1); t = R.concat((q, p0), axis=-1)\n"
    "C1 = R.expand_dims(C, [1]); S1 = R.expand_dims(S, [1])\n"
    "a = R.multiply(h, C1); b = R.multiply(t, S1); y = R.add(a, b)"
)
ROPED = "x1 = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n" + ROPE.replace("(x, W)", "(x1, W)")
CASES: dict[str, Callable[[], Case]] = {
    "norm": lambda: matched(
        "FuseRMSNormMatmul",
        "x[n,32] r[n,32] g[32] W[32,48] c[48]",
        NORM + "m = R.matmul(h, W); k = R.add(m, c); y = R.nn.silu(k)",
        "(s, y)",
    ),
    "large": lambda: matched(
        "FuseRMSNormMatmul",
        "x[n,4096] r[n,4096] g[4096] W[6144,4096]",
        NORM + "t = R.permute_dims(W); y = R.matmul(h, t)",
    ),
    "gated": lambda: matched(
        "FuseGatedFFN",
        "x[b,s,32] Wg[32,48] Wu[32,48]",
        "p = R.matmul(x, Wg); u = R.matmul(x, Wu); a = R.nn.gelu(p); y = R.multiply(u, a)",
    ),
    "merged": lambda: matched(
        "FuseGatedFFN",
        "x[6,32] W[32,96]",
        "m = R.matmul(x, W); p = R.split(m, 2, axis=-1); a = p[0]; b = p[1]\n"
        "s = R.nn.silu(a); y = R.multiply(s, b)",
    ),
    "rope": lambda: matched("FuseRMSNormMatmul", "x[n,32] g[32] W[32,64] C[n,16] S[n,16]", ROPED),
    "chain": lambda: matched(
        "FuseChains",
        "x[n,32] A[32,8] B[8,48]",
        "h = R.matmul(x, A); c = R.multiply(h, R.const(2.0)); y = R.matmul(c, B)",
    ),
    "causal": lambda: matched(
        "FuseAttentionChain",
        "q[1,s,4,8] k[1,n,4,8] v[1,n,4,8]",
        'y = R.nn.attention(q, k, v, causal_mask="BottomRight", window_size=3)',
    ),
    "masked": lambda: matched(
        "FuseAttentionChain",
        QKV + " m[5,7]:bool c[1,4,1,7]",
        attention("s1 = R.add(s0, c); s = R.where(m, s1, R.const(-1e999))"),
        "o",
    ),
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: make() for name, make in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_is_found_to_be(cases: dict[str, Case], name: str) -> None:
    assert check_match(*cases[name]) is None


TWO_FORMS = {
    "transposed": (
        "x[32,32] W[32,32]",
        "t = R.permute_dims(W); m = R.matmul(x, t); u = R.permute_dims(t); y = R.add(m, u)",
    ),
    "both": (
        "x[32,32] W[32,32]",
        "t = R.permute_dims(W); m = R.matmul(x, t); a = R.add(m, t); y = R.add(a, W)",
    ),
    "its own input": ("x[32,32]", "t = R.permute_dims(x); m = R.matmul(x, t); y = R.add(m, t)"),
}


@pytest.mark.parametrize("name", TWO_FORMS)
def test_an_operand_may_be_another_one_in_another_form(name: str) -> None:
    view, match = matched("FuseMatmulEpilogue", *TWO_FORMS[name])
    assert len({a.expr for a in match.args}) > 1 and check_match(view, match) is None


def of_norm(**changes: Any) -> Callable[[Any], Any]:
    return lambda work: replace(work, norm=replace(work.norm, **changes))


def of_projection(**changes: Any) -> Callable[[Any], Any]:
    def change(work: Any) -> Any:
        return replace(work, outputs=(replace(work.outputs[0], **changes), *work.outputs[1:]))

    return change


def of(**changes: Any) -> Callable[[Any], Any]:
    return lambda work: replace(work, **changes)


def said(one: str, other: str) -> Callable[[Any], Any]:
    return lambda work: from_json(to_json(work).replace(one, other))


MUTANTS = [
    ("norm", of_norm(eps=1e-4)),
    ("norm", of_norm(kind="layer")),
    ("norm", of_projection(epilogue=("silu", "bias"))),
    ("norm", of_projection(epilogue=("bias",))),
    ("norm", of_projection(epilogue=("bias", "gelu"))),
    ("large", of_norm(eps=1e-6)),
    ("large", of_projection(layout="kn", n=4096)),
    ("gated", of(gate_first=False)),
    ("gated", of(activation="gelu_tanh")),
    ("merged", of(gate_first=False)),
    ("merged", of(layout="nk")),
    ("rope", of_projection(rope=None)),
    ("chain", said("multiply", "add")),
    ("chain", said("2.0", "2.001")),
    ("causal", of(causal="top_left")),
    ("causal", of(window=4)),
    ("causal", of(window=2)),
    ("causal", of(window=None)),
    ("causal", of(scale=0.35355)),
    ("causal", of(out_layout="bnsh")),
    ("masked", of(mask_dims=(False, False, True, False))),
    ("masked", of(bias_op="min")),
    ("masked", of(causal="top_left")),
    ("masked", of(softcap=30.0)),
]


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_another_workload_is_a_mismatch(cases: dict[str, Case], number: int) -> None:
    name, change = MUTANTS[number]
    view, match = cases[name]
    found = check_match(view, replace(match, workload=change(match.workload)))
    assert isinstance(found, Mismatch), found


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("norm", 0, 2), ("gated", 1, 2), ("rope", 3, 4), ("masked", 1, 2), ("causal", 0, 1)],
)
def test_operands_in_another_order_are_a_mismatch(
    cases: dict[str, Case], name: str, first: int, second: int
) -> None:
    view, match = cases[name]
    args = list(match.args)
    args[first], args[second] = args[second], args[first]
    assert isinstance(check_match(view, replace(match, args=tuple(args))), Mismatch)


def test_an_operand_too_few_is_a_mismatch(cases: dict[str, Case]) -> None:
    view, match = cases["norm"]
    found = check_match(view, replace(match, args=match.args[:-1]))
    assert found == Mismatch("4 operands and 2 results; the workload has 5 and 2")


def test_the_detail_says_where_how_far_off_and_on_what(cases: dict[str, Case]) -> None:
    view, match = cases["causal"]
    found = check_match(view, replace(match, workload=replace(match.workload, window=None)))
    assert isinstance(found, Mismatch)
    for word in ("y[", "differs by", "where the largest is", "s = ", "n = ", "inputs: ordinary"):
        assert word in found.detail


# --- roundings -------------------------------------------------------------------------------


def test_a_narrowing_that_the_kernel_drops_is_a_mismatch() -> None:
    body = 'm = R.matmul(x, W); c = R.astype(m, "float16"); d = R.astype(c, "float32")\n'
    view, match = matched("FuseMatmulEpilogue", "x[6,32] W[32,48] b[48]", body + "y = R.add(d, b)")
    late = {b.var.name: b.var for b in view.bindings}
    out = replace(match.outs[0], var=late["d"], dtype="float32")
    covers = (*match.covers, late["c"], late["d"])
    work = replace(match.workload, out_dtype="float32")
    wrong = replace(match, outs=(out,), covers=covers, workload=work)
    found = check_match(view, wrong)
    assert isinstance(found, Mismatch) and "coarse roundings" in found.detail


def test_a_narrow_result_may_keep_more_bits() -> None:
    chain = Chain(
        "main", "x[6,32] W[32,48]", "m = R.matmul(x, W); y = R.nn.silu(m)", "y", dtype="float16"
    )
    view, match = largest_match(module([chain]), "FuseMatmulEpilogue")
    assert len(match.covers) == 2 and check_match(view, match) is None


# --- masks by position -----------------------------------------------------------------------

MASKS = {
    "not_of_integers": (
        9,
        'a = R.astype(R.greater(j, i), "int32"); m = R.astype(R.bitwise_not(a), "bool")',
    ),
    "float16": (
        2104,
        'f = R.astype(i, "float16"); e = R.astype(j, "float16"); m = R.less_equal(e, f)',
    ),
    "bfloat16": (
        272,
        'f = R.astype(i, "bfloat16"); e = R.astype(j, "bfloat16"); m = R.less_equal(e, f)',
    ),
    "int8": (
        9,
        'f = R.astype(R.full(R.shape([8, 9]), R.const(256, "int32"), "int32"), "int8")\n'
        'm = R.logical_or(R.not_equal(f, R.const(0, "int8")), R.less_equal(j, i))',
    ),
}
"""Keys, and the mask of the last eight queries."""


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_is_read_wrongly_is_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read = elements.Elements._read

    def gullible(self: Any, expr: Any, index: Any) -> Any:
        call = self.view.call(expr, "relax.bitwise_not")
        if call is not None and dtype_of(expr) != "bool":
            return tirx.Not(self.condition(self.read(call.args[0], index)))
        return read(self, expr, index)

    monkeypatch.setattr(elements.Elements, "held", lambda self, value, dtype: value)
    monkeypatch.setattr(elements.Elements, "_read", gullible)
    n, mask = MASKS[name]
    inputs = f"q[1,1,8,8] k[1,1,{n},8] v[1,1,{n},8]"
    steps = f"{positions('8', str(n), n - 8)}{mask}\ns = R.where(m, s0, R.const(-1e999))"
    view, match = matched("FuseAttentionChain", inputs, attention(steps), "o")
    assert len(match.args) == 3, "the guard was not taken out"
    assert isinstance(check_match(view, match), Mismatch)


# --- what becomes of it ----------------------------------------------------------------------

SILU = Chain("main", "x[n,32] W[32,48]", "m = R.matmul(x, W); y = R.nn.silu(m)", "y")


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the matcher find another activation than there is."""
    monkeypatch.setitem(activations._ACTIVATION_OPS, "relax.nn.silu", "gelu")


def test_a_mismatch_declines(wrong: None) -> None:
    mod = module([SILU])
    out, decisions = run_pass(mod, "FuseMatmulEpilogue", validate=True)
    tvm.ir.assert_structural_equal(out, mod)
    assert [d.decline.reason for d in decisions if d.decline] == [Reason.MISMATCH]


def test_a_mismatch_raises_where_that_is_wanted(wrong: None) -> None:
    with pytest.raises(EquivalenceError, match="FuseMatmulEpilogue of y in main would compute"):
        FuseMatmulEpilogue(FuseOptions(validate="strict"))(module([SILU]))


def test_nothing_is_checked_unless_asked(wrong: None) -> None:
    _, decisions = run_pass(module([SILU]), "FuseMatmulEpilogue", validate=False)
    assert [(d.fused, d.validation) for d in decisions] == [(True, "")]


def test_what_is_not_interpreted_is_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPERATORS, "nn.silu")
    mod = module([SILU])
    assert check_match(*largest_match(mod, "FuseMatmulEpilogue")) == Unchecked(
        "the operator nn.silu is not interpreted"
    )
    _, decisions = run_pass(mod, "FuseMatmulEpilogue")
    assert decisions[0].validation == "not checked: the operator nn.silu is not interpreted"
    assert "1        not checked: the operator nn.silu" in Report(decisions).text()


@pytest.mark.parametrize(("keys", "checked"), [("n", False), ("m", True)])
def test_a_window_that_no_affordable_length_crosses_is_unchecked(keys: str, checked: bool) -> None:
    body = 'y = R.nn.attention(q, k, v, causal_mask="BottomRight", window_size=4096)'
    inputs = f"q[1,n,8,16] k[1,{keys},8,16] v[1,{keys},8,16]"
    found = check_match(*matched("FuseAttentionChain", inputs, body))
    if checked:
        assert found is None
    else:
        assert isinstance(found, Unchecked) and "too large" in found.detail


def test_an_operator_that_fails_is_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "nn.silu", lambda called, x: x.nothing)
    found = check_match(*largest_match(module([SILU]), "FuseMatmulEpilogue"))
    assert isinstance(found, Unchecked)
    assert found.detail.startswith("the checker failed: AttributeError")


def test_equal_layers_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    comparison = check_module.Comparison
    monkeypatch.setattr(
        check_module, "Comparison", lambda *given: made.append(given) or comparison(*given)
    )
    layer = "{0}1 = R.matmul({1}, W); {0} = R.nn.silu({0}1)\n"
    body = "".join(layer.format(*names) for names in ("ax", "ba", "cb", "dc")) + "y = R.exp(d)"
    _, decisions = run_pass(
        module([Chain("main", "x[n,32] W[32,32]", body, "y")]), "FuseMatmulEpilogue"
    )
    assert [d.validation for d in decisions] == ["checked"] * 4
    assert len(made) == 2  # x is a parameter, the others are variables of the block


@pytest.mark.parametrize("name", ["k = h", "t = h; k = t"])
def test_another_name_between_two_matmuls_is_rounded_alike(name: str) -> None:
    body = f"m = R.matmul(x, W); h = R.matmul(x, a); {name}; u = R.matmul(k, c); y = R.add(m, u)"
    view, match = matched("FuseAdapters", "x[6,32] W[32,48] a[32,8] c[8,48]", body)
    assert match.workload.is_adapted and check_match(view, match) is None
