"""FuseAttentionChain: the operators, the written-out forms, refusals, numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relax_fusion import Attention, DynamicDim, Reason

from ..support.chain_reference import evaluate
from ..support.chains import (
    HEADER,
    Chain,
    Rewrite,
    assert_declined,
    assert_numbers,
    assert_untouched,
    calls,
    compiled,
    module,
    outputs,
    run_pass,
)

PASS = "FuseAttentionChain"
BASE = Attention(
    batch=2,
    q_len=5,
    kv_len=7,
    q_heads=4,
    kv_heads=4,
    head_dim=8,
    v_dim=8,
    scale=8**-0.5,
    causal="none",
    bias_dims=None,
    dtype="float32",
    out_dtype="float32",
)
HEADS_FIRST = replace(BASE, scale=1.0, q_layout="bnsh", kv_layout="bnsh", out_layout="bnsh")
QKV = "q[2,5,4,8] k[2,7,4,8] v[2,7,4,8]"
BNSH = "q[2,4,5,8] k[2,4,7,8] v[2,4,7,8]"
SCORES = "t = R.permute_dims(k, axes=[0, 1, 3, 2]); s = R.matmul(q, t)\n"
MIX = "p = R.nn.softmax(s, axis=-1); o = R.matmul(p, v)"
C = 'R.const(0.25, "float32")'


def scored(steps: str) -> str:
    return SCORES.replace("s = R.matmul", "s0 = R.matmul") + steps + "\n" + MIX


REWRITES = [
    Rewrite(Chain("operator", QKV, "o = R.nn.attention(q, k, v)", "o"), BASE, "q k v"),
    *(
        Rewrite(
            Chain(
                f"operator_{kind}",
                QKV,
                f'o = R.nn.attention(q, k, v, causal_mask="{word}", '
                'scale=T.FloatImm("float32", 0.5))',
                "o",
            ),
            replace(BASE, causal=kind, scale=0.5),
            "q k v",
        )
        for kind, word in (("top_left", "TopLeft"), ("bottom_right", "BottomRight"))
    ),
    *(
        Rewrite(
            Chain(
                "operator_bias_" + mask.replace(",", "_"),
                f"{QKV} m[{mask}]",
                "o = R.nn.attention_bias(q, k, v, m)",
                "o",
            ),
            replace(BASE, bias_dims=tuple(d != "1" for d in mask.split(","))),
            "q k v m",
        )
        for mask in ("2,4,5,7", "2,1,1,7", "1,1,5,7")
    ),
    Rewrite(
        Chain(
            "symbolic_float16",
            "q[b,s,4,8] k[b,n,4,8] v[b,n,4,6]",
            'o = R.nn.attention(q, k, v, causal_mask="BottomRight")',
            "o",
            {"b": 3, "s": 5, "n": 9},
            "float16",
        ),
        replace(
            BASE,
            batch=DynamicDim("b"),
            q_len=DynamicDim("s"),
            kv_len=DynamicDim("n"),
            v_dim=6,
            causal="bottom_right",
            dtype="float16",
            out_dtype="float16",
        ),
        "q k v",
    ),
    Rewrite(
        Chain(
            "grouped_queries_by_repeat",
            "q[2,5,4,8] k[2,7,2,8] v[2,7,2,8]",
            "k2 = R.repeat(k, 2, axis=2); v2 = R.repeat(v, 2, axis=-2)\n"
            "o = R.nn.attention(q, k2, v2)",
            "o",
        ),
        replace(BASE, kv_heads=2),
        "q k v",
    ),
    Rewrite(
        Chain(
            "prefix_of_a_cache",
            "q[2,5,4,8] k[2,12,2,8] v[2,12,2,8]",
            "k1 = R.strided_slice(k, axes=[1], begin=[0], end=[7])\n"
            "v1 = R.strided_slice(v, axes=[1], begin=[0], end=[7])\n"
            "k2 = R.repeat(k1, 2, axis=2); v2 = R.repeat(v1, 2, axis=2)\n"
            'o = R.nn.attention(q, k2, v2, causal_mask="BottomRight")',
            "o",
        ),
        replace(BASE, kv_heads=2, kv_prefix=True, causal="bottom_right"),
        "q k v T.int64(7)",
    ),
    Rewrite(
        Chain(
            "prefix_without_repeat_symbolic",
            "q[1,s,4,8] k[1,12,4,8] v[1,12,4,8] l[n]",
            "k1 = R.strided_slice(k, axes=[1], begin=[0], end=[n])\n"
            "v1 = R.strided_slice(v, axes=[1], begin=[0], end=[n])\n"
            "o = R.nn.attention(q, k1, v1)",
            "o",
            {"s": 3, "n": 9},
        ),
        replace(
            BASE,
            batch=1,
            q_len=DynamicDim("s"),
            kv_len=DynamicDim("T.min(n, T.int64(12))"),
            kv_prefix=True,
        ),
        "q k v T.min(n, T.int64(12))",
    ),
    Rewrite(Chain("written_out", BNSH, SCORES + MIX, "o"), HEADS_FIRST, "q k v"),
    Rewrite(
        Chain("scale_by_multiply", BNSH, scored(f"s = R.multiply({C}, s0)"), "o"),
        replace(HEADS_FIRST, scale=0.25),
        "q k v",
    ),
    Rewrite(
        Chain("scale_by_divide", BNSH, scored(f"s = R.divide(s0, {C})"), "o"),
        replace(HEADS_FIRST, scale=4.0),
        "q k v",
    ),
    Rewrite(
        Chain(
            "scale_of_the_query",
            BNSH,
            f"r = R.multiply(q, {C})\n" + SCORES.replace("(q, t)", "(r, t)") + MIX,
            "o",
        ),
        replace(HEADS_FIRST, scale=0.25),
        "q k v",
    ),
    Rewrite(
        Chain(
            "mask_after_scale",
            BNSH + " m[2,1,5,7]",
            scored(f"s1 = R.divide(s0, {C}); s = R.add(m, s1)"),
            "o",
        ),
        replace(HEADS_FIRST, scale=4.0, bias_dims=(True, False, True, True)),
        "q k v m",
    ),
    Rewrite(
        Chain("mask_of_two_dimensions", BNSH + " m[5,7]", scored("s = R.add(s0, m)"), "o"),
        replace(HEADS_FIRST, bias_dims=(False, False, True, True)),
        "q k v m",
    ),
    Rewrite(
        Chain(
            "mask_of_three_dimensions_is_by_head",
            "q[2,2,5,8] k[2,2,7,8] v[2,2,7,8] m[2,5,7]",
            scored("s = R.add(s0, m)"),
            "o",
        ),
        replace(HEADS_FIRST, q_heads=2, kv_heads=2, bias_dims=(False, True, True, True)),
        "q k v m",
    ),
    Rewrite(
        Chain(
            "casts",
            BNSH + " m[2,1,1,7]:float32",
            scored(
                's1 = R.astype(s0, "float32"); s2 = R.multiply(s1, R.const(0.5, "float32"))\n'
                "s = R.add(s2, m)"
            ).replace("o = R.matmul(p, v)", 'c = R.astype(p, "float16"); o = R.matmul(c, v)'),
            "o",
            dtype="float16",
        ),
        replace(
            HEADS_FIRST,
            scale=0.5,
            bias_dims=(True, False, False, True),
            dtype="float16",
            out_dtype="float16",
        ),
        "q k v m",
    ),
    Rewrite(
        Chain(
            "transposes_absorbed",
            QKV,
            "a = R.permute_dims(q, axes=[0, 2, 1, 3]); b = R.permute_dims(k, axes=[0, 2, 3, 1])\n"
            "c = R.permute_dims(v, axes=[0, 2, 1, 3]); s = R.matmul(a, b)\n"
            "p = R.nn.softmax(s, axis=-1); w = R.matmul(p, c)\n"
            "o = R.permute_dims(w, axes=[0, 2, 1, 3])",
            "o",
        ),
        replace(BASE, scale=1.0),
        "q k v",
    ),
    Rewrite(
        Chain(
            "transposes_one_by_one",
            QKV,
            "a = R.permute_dims(q, axes=[0, 2, 1, 3]); b = R.permute_dims(k, axes=[0, 2, 1, 3])\n"
            "c = R.permute_dims(v, axes=[0, 2, 1, 3]); d = R.permute_dims(b, axes=[0, 1, 3, 2])\n"
            "s = R.matmul(a, d); p = R.nn.softmax(s, axis=3); o = R.matmul(p, c)",
            "o",
        ),
        replace(BASE, scale=1.0, out_layout="bnsh"),
        "q k v",
    ),
    Rewrite(
        Chain(
            "three_dimensions",
            "q[2,5,8] k[2,7,8] v[2,7,6] m[5,7]",
            "t = R.permute_dims(k, axes=[0, 2, 1]); s0 = R.matmul(q, t); s = R.add(s0, m)\n" + MIX,
            "o",
        ),
        replace(HEADS_FIRST, q_heads=1, kv_heads=1, v_dim=6, bias_dims=(False, False, True, True)),
        "q k v m",
    ),
    Rewrite(
        Chain(
            "key_transposed_elsewhere",
            BNSH,
            SCORES + MIX + "; z = R.nn.relu(t)",
            "(o, z)",
        ),
        HEADS_FIRST,
        "q k v",
        ("nn.relu", "permute_dims"),
    ),
    Rewrite(
        Chain("keys_of_one_head", "q[2,4,5,8] k[2,1,7,8] v[2,1,7,8]", SCORES + MIX, "o"),
        replace(HEADS_FIRST, kv_heads=1),
        "q k v",
    ),
    Rewrite(
        Chain(
            "self_attention_of_one_tensor",
            "x[2,5,4,8]",
            "o = R.nn.attention(x, x, x)",
            "o",
        ),
        replace(BASE, kv_len=5),
        "x x x",
    ),
]


@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check(PASS)


# --- declines --------------------------------------------------------------------------------

DECLINES = [
    (
        "softmax_over_queries",
        BNSH,
        SCORES + MIX.replace("-1", "-2"),
        "o",
        Reason.AXIS,
        "axis 2",
    ),
    ("scores_returned", BNSH, SCORES + MIX, "(o, s)", Reason.LEAKED, "s is a result"),
    ("weights_returned", BNSH, SCORES + MIX, "(o, p)", Reason.LEAKED, "p is a result"),
    (
        "scores_read_elsewhere",
        BNSH,
        SCORES + MIX + "; z = R.nn.relu(s)",
        "(o, z)",
        Reason.MULTI_USE,
        "s is also read by z",
    ),
    (
        "mask_made_of_scores",
        "q[2,4,5,8] k[2,4,7,8] v[2,4,7,8]",
        scored("m = R.nn.relu(s0); s = R.add(s0, m)"),
        "o",
        Reason.MULTI_USE,
        "s0 is also read by m",
    ),
    (
        "mask_too_large",
        "q[1,4,5,8] k[1,4,7,8] v[1,4,7,8] m[2,1,5,7]",
        scored("s = R.add(s0, m)"),
        "o",
        Reason.SHAPE,
        "the mask",
    ),
    (
        "values_of_one_head",
        "q[2,4,5,8] k[2,4,7,8] v[2,1,7,8]",
        SCORES + MIX,
        "o",
        Reason.SHAPE,
        "key and value",
    ),
    (
        "keys_of_one_batch",
        "q[2,4,5,8] k[1,4,7,8] v[1,4,7,8]",
        SCORES + MIX,
        "o",
        Reason.SHAPE,
        "the key is broadcast",
    ),
    (
        "key_of_three_dimensions",
        "q[2,4,5,8] k[4,7,8] v[2,4,7,8]",
        SCORES.replace("[0, 1, 3, 2]", "[0, 2, 1]") + MIX,
        "o",
        Reason.SHAPE,
        "rank 3",
    ),
    (
        "key_not_transposed",
        "q[2,4,5,8] k[2,4,8,7] v[2,4,7,8]",
        "s = R.matmul(q, k)\n" + MIX,
        "o",
        Reason.LAYOUT,
        "the key comes in another order",
    ),
    (
        "key_transposed_oddly",
        "q[2,4,5,8] k[4,2,7,8] v[2,4,7,8]",
        SCORES.replace("[0, 1, 3, 2]", "[1, 0, 3, 2]") + MIX,
        "o",
        Reason.LAYOUT,
        "the key comes in another order",
    ),
    (
        "dynamic_heads",
        "q[2,h,5,8] k[2,h,7,8] v[2,h,7,8]",
        SCORES + MIX,
        "o",
        Reason.SHAPE,
        "dynamic (h)",
    ),
    (
        "fewer_keys_than_queries",
        "q[2,7,4,8] k[2,5,4,8] v[2,5,4,8]",
        'o = R.nn.attention(q, k, v, causal_mask="BottomRight")',
        "o",
        Reason.SHAPE,
        "7 queries over 5 keys",
    ),
    (
        "window_without_a_causal_mask",
        QKV,
        "o = R.nn.attention(q, k, v, window_size=4)",
        "o",
        Reason.ATTRIBUTE,
        "a window of 4 keys",
    ),
    (
        "slice_of_features_is_no_cache_prefix",
        "q[2,5,4] k[2,7,8] v[2,7,8]",
        "k1 = R.strided_slice(k, axes=[2], begin=[0], end=[4])\n"
        "v1 = R.strided_slice(v, axes=[2], begin=[0], end=[4]); u = R.nn.relu(k1)\n"
        "t = R.permute_dims(u, axes=[0, 2, 1]); s = R.matmul(q, t)\n"
        + MIX.replace("p, v", "p, v1"),
        "(o, s)",
        Reason.LEAKED,
        "s is a result",
    ),
]


@pytest.mark.parametrize("case", DECLINES, ids=lambda c: c[0])
def test_declines(case: tuple[str, str, str, str, Reason, str]) -> None:
    name, inputs, body, result, reason, words = case
    assert_declined(module([Chain(name, inputs, body, result)]), PASS, reason, words)


def test_declines_dtype() -> None:
    chain = Chain("main", BNSH, SCORES + MIX, "o", dtype="float64")
    assert_declined(module([chain]), PASS, Reason.DTYPE, "float64")


def test_scores_of_unknown_size_are_left() -> None:
    chain = Chain(
        "main", BNSH.replace("[2,", "[b,") + " m[c,1,5,7]", scored("s = R.add(s0, m)"), "o"
    )
    assert_untouched(module([chain]), PASS)


def test_declines_mixed_virtual_devices() -> None:
    text = HEADER + Chain("main", QKV, "o = R.nn.attention(q, k, v)", "o").script()
    info = 'I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("cuda", 0)]})'
    text = text.replace("class Module:", f"class Module:\n    {info}\n")
    text = text.replace('(2, 5, 4, 8), "float32"', '(2, 5, 4, 8), "float32", "cuda:0"')
    text = text.replace('(2, 7, 4, 8), "float32"', '(2, 7, 4, 8), "float32", "llvm:0"')
    assert_declined(tvm.script.from_source(text), PASS, Reason.VDEVICE, "cuda")


# --- sizes and neighbours --------------------------------------------------------------------


def test_a_transpose_between_two_attentions_goes_to_one_of_them() -> None:
    body = "t = R.permute_dims(k, axes=[0, 1, 3, 2]); s = R.matmul(q, t)\n"
    body += "p = R.nn.softmax(s, axis=-1); m = R.matmul(p, v)\n"
    body += "u = R.permute_dims(m, axes=[0, 2, 1, 3]); o = R.nn.attention(u, k2, v2)"
    inputs = "q[2,4,5,8] k[2,4,7,8] v[2,4,7,8] k2[2,9,4,8] v2[2,9,4,8]"
    chain = Chain("main", inputs, body, "o")
    mod = module([chain])
    out, decisions = run_pass(mod, PASS)
    assert [d.workload.out_layout for d in decisions] == ["bnsh", "bsnh"]
    assert calls(out["main"]) == ["call_tir", "call_tir"]
    assert_numbers(compiled(mod), mod, chain)


def test_a_bias_made_by_another_attention_is_read_where_that_leaves_it() -> None:
    body = "t = R.permute_dims(k, axes=[0, 1, 3, 2]); s = R.matmul(q, t)\n"
    body += "p = R.nn.softmax(s, axis=-1); m = R.matmul(p, v)\n"
    body += "w = R.permute_dims(m, axes=[0, 2, 1, 3]); u = R.permute_dims(w, axes=[0, 2, 1, 3])\n"
    body += "t2 = R.permute_dims(k2, axes=[0, 1, 3, 2]); s2 = R.matmul(q2, t2); b = R.add(s2, u)\n"
    body += "p2 = R.nn.softmax(b, axis=-1); o = R.matmul(p2, k2)"
    inputs = "q[2,4,5,8] k[2,4,9,8] v[2,4,9,7] q2[2,4,5,8] k2[2,4,7,8]"
    chain = Chain("main", inputs, body, "o")
    mod = module([chain])
    out, decisions = run_pass(mod, PASS)
    assert [d.workload.bias_dims for d in decisions] == [None, (True,) * 4]
    assert calls(out["main"]) == ["call_tir", "call_tir"]
    assert_numbers(compiled(mod), mod, chain)


def test_two_sizes_of_one_name_stay_two() -> None:
    rows, positions = tirx.Var("n", "int64"), tirx.Var("n", "int64")
    q, k, v = (
        relax.Var(name, relax.TensorType((1, length, 2, 8), "float32"))
        for name, length in (("q", rows), ("k", positions), ("v", positions))
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [q, k, v]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.attention(q, k, v))
        builder.emit_func_output(out)
    mod = builder.get()
    _, (decision,) = run_pass(mod, PASS)
    work = decision.workload
    assert (work.q_len, work.kv_len) == (DynamicDim("n"), DynamicDim("n_2"))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, s, 2, 8)).astype("float32") for s in (3, 7, 7)]
    (got,) = outputs(compiled(mod), "main", arrays)
    (exact,) = evaluate(mod["main"], arrays)
    np.testing.assert_allclose(got, exact, rtol=0, atol=8 * np.finfo("float32").eps)


@pytest.mark.parametrize(
    ("rows", "name"), [("s", "s"), ("kv_len", "kv_len_2"), ("kv_capacity", "kv_capacity_2")]
)
def test_sizes_called_like_those_of_the_kernel(rows: str, name: str) -> None:
    body = "k1 = R.strided_slice(k, axes=[1], begin=[0], end=[9])\n"
    body += "v1 = R.strided_slice(v, axes=[1], begin=[0], end=[9])\n"
    body += "o = R.nn.attention(q, k1, v1)"
    chain = Chain("main", f"q[1,{rows},4,8] k[1,12,4,8] v[1,12,4,8]", body, "o", {rows: 3})
    mod = module([chain])
    _, (decision,) = run_pass(mod, PASS)
    assert decision.workload.kv_prefix and decision.workload.q_len == DynamicDim(name)
    assert_numbers(compiled(mod), mod, chain)


# --- numbers ---------------------------------------------------------------------------------

CHAINS = [r.chain for r in REWRITES]
CHAINS += [
    Chain(
        "slices_of_features",
        "q[2,5,4] k[2,7,8] v[2,7,8]",
        "k1 = R.strided_slice(k, axes=[2], begin=[0], end=[4])\n"
        "v1 = R.strided_slice(v, axes=[2], begin=[0], end=[4])\n"
        "t = R.permute_dims(k1, axes=[0, 2, 1]); s = R.matmul(q, t)\n"
        + MIX.replace("p, v", "p, v1"),
        "o",
    ),
    Chain(
        "repeat_of_positions",
        "q[2,5,8] k[2,4,8] v[2,4,8]",
        "k1 = R.repeat(k, 2, axis=1); v1 = R.repeat(v, 2, axis=1)\n"
        "t = R.permute_dims(k1, axes=[0, 2, 1]); s = R.matmul(q, t)\n"
        + MIX.replace("p, v", "p, v1"),
        "o",
    ),
    Chain(
        "repeat_of_features",
        "q[2,4,5,8] k[2,4,7,4] v[2,4,7,4]",
        "k1 = R.repeat(k, 2, axis=3); v1 = R.repeat(v, 2, axis=3)\n"
        "t = R.permute_dims(k1, axes=[0, 1, 3, 2]); s = R.matmul(q, t)\n"
        + MIX.replace("p, v", "p, v1"),
        "o",
    ),
    Chain(
        "slice_from_the_middle",
        "q[2,5,4,8] k[2,12,4,8] v[2,12,4,8]",
        "k1 = R.strided_slice(k, axes=[1], begin=[2], end=[9])\n"
        "v1 = R.strided_slice(v, axes=[1], begin=[2], end=[9])\n"
        "o = R.nn.attention(q, k1, v1)",
        "o",
    ),
    Chain(
        "caches_of_two_sizes",
        "q[2,5,4,8] k[2,12,4,8] v[2,10,4,8]",
        "k1 = R.strided_slice(k, axes=[1], begin=[0], end=[7])\n"
        "v1 = R.strided_slice(v, axes=[1], begin=[0], end=[7])\n"
        "o = R.nn.attention(q, k1, v1)",
        "o",
    ),
    Chain(
        "only_the_key_is_sliced",
        "q[2,5,4,8] k[2,12,4,8] v[2,7,4,8]",
        "k1 = R.strided_slice(k, axes=[1], begin=[0], end=[7]); o = R.nn.attention(q, k1, v)",
        "o",
    ),
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
