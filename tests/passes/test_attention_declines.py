"""FuseAttentionChain: attentions that are left alone, each for a reason that it names."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from relax_fusion import Reason

from ..support.attention_chains import PASS, QKV, attention, const, positions
from ..support.chains import Chain, assert_declined, assert_untouched, module
from .test_attention_masks import INF, LOW, PRODUCT, SINK

OPERANDS = "q[2,5,4,8] k[2,7,4,8] v[2,7,4,8]"


@dataclass(frozen=True)
class Refusal:
    """A graph, the class of the refusal, and words of what it says about the value at hand."""

    name: str
    inputs: str
    body: str
    reason: Reason
    words: str
    result: str = "o"
    sizes: dict[str, int] = field(default_factory=dict)
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name


def scored(name: str, steps: str, reason: Reason, words: str, inputs: str = QKV) -> Refusal:
    """Return an attention with `steps` from the product s0 to the scores s."""
    return Refusal(name, inputs, attention(steps), reason, words)


REFUSALS = [
    Refusal(
        "a_wide_result_of_narrow_values",
        "q[2,4,5,8] k[2,4,7,8] v[2,4,7,8]",
        PRODUCT
        + 's = R.astype(s0, "float32"); p = R.nn.softmax(s, axis=-1)\n'
        + 'w = R.astype(v, "float32"); o = R.matmul(p, w)',
        Reason.DTYPE,
        "the value is float16, the result float32",
        dtype="float16",
    ),
    Refusal(
        "no_queries",
        "q[2,0,4,8] k[2,7,4,8] v[2,7,4,8]",
        "o = R.nn.attention(q, k, v)",
        Reason.SHAPE,
        "there are no queries",
    ),
    scored(
        "soft_cap_after_a_mask",
        f"s1 = R.where(m, s0, {INF}); s2 = R.tanh(s1); s = R.multiply(s2, {const(30.0)})",
        Reason.ATTRIBUTE,
        "a mask is applied in front of the soft-cap 30",
        QKV + " m[5,7]:bool",
    ),
    scored(
        "bias_before_a_soft_cap",
        "s1 = R.add(s0, m); s = R.tanh(s1)",
        Reason.ATTRIBUTE,
        "a mask is added in front of the soft-cap 1",
        QKV + " m[5,7]",
    ),
    scored(
        "minimum_before_a_scale",
        f"s1 = R.minimum(s0, m); s = R.divide(s1, {const(8.0)})",
        Reason.ATTRIBUTE,
        "a mask holds scores down in front of a scale by 0.125",
        QKV + " m[5,7]",
    ),
    scored(
        "two_soft_caps",
        "s1 = R.tanh(s0); s = R.tanh(s1)",
        Reason.ATTRIBUTE,
        "two soft-caps",
    ),
    scored(
        "soft_cap_below_zero",
        f"s1 = R.tanh(s0); s = R.multiply(s1, {const(-3.0)})",
        Reason.ATTRIBUTE,
        "a soft-cap of -3",
    ),
    scored(
        "infinite_scale",
        f"s = R.multiply(s0, {INF})",
        Reason.ATTRIBUTE,
        "the scores go through multiply",
    ),
    scored(
        "scale_beyond_float32",
        f"s = R.divide(s0, {const(1e-45)})",
        Reason.ATTRIBUTE,
        "the scores go through divide",
    ),
    scored(
        "scales_beyond_float32_together",
        f"s1 = R.multiply(s0, {const(1e30)}); s = R.multiply(s1, {const(1e30)})",
        Reason.ATTRIBUTE,
        "a scale of 1e+60",
    ),
    Refusal(
        "scores_of_integers",
        "q[2,4,5,8]:int8 k[2,4,7,8]:int8 v[2,4,7,8]",
        "t = R.permute_dims(k, axes=[0, 1, 3, 2]); s0 = R.matmul(q, t, out_dtype='int32')\n"
        f"s1 = R.maximum(s0, {const(-5, 'int32')}); s = R.astype(s1, 'float32')\n"
        "p = R.nn.softmax(s, axis=-1); o = R.matmul(p, v)",
        Reason.ATTRIBUTE,
        "the scores go through maximum",
    ),
    scored(
        "masked_scores_that_are_not_hidden",
        f"s = R.where(m, s0, {const(-100.0)})",
        Reason.ATTRIBUTE,
        "masked scores become -100",
        QKV + " m[5,7]:bool",
    ),
    scored(
        "masked_scores_scaled_back",
        f"s1 = R.where(m, s0, {const(-1e4)}); s = R.divide(s1, {const(8.0)})",
        Reason.ATTRIBUTE,
        "masked scores become -1250",
        QKV + " m[5,7]:bool",
    ),
    scored(
        "scores_held_above_a_number",
        f"s = R.maximum(s0, {const(-5.0)})",
        Reason.ATTRIBUTE,
        "scores are held back at -5",
    ),
    scored(
        "scores_held_before_a_small_factor",
        f"s1 = R.clip(s0, -1e4, 1e4); s = R.multiply(s1, {const(1e-4)})",
        Reason.ATTRIBUTE,
        "scores are held back at -10000 and 10000, and may lie beyond",
    ),
    scored(
        "scores_held_below_a_number",
        "s = R.clip(s0, -1e6, 50.0)",
        Reason.ATTRIBUTE,
        "scores are held back at -1e+06 and 50, and may",
    ),
    scored(
        "scores_held_at_a_size",
        "s = R.clip(s0, n, 1e6)",
        Reason.ATTRIBUTE,
        "the scores go through clip",
        QKV + " x[n]",
    ),
    scored(
        "scores_held_above_data",
        "s = R.maximum(s0, m)",
        Reason.ATTRIBUTE,
        "the scores go through maximum",
        QKV + " m[2,4,5,7]",
    ),
    scored(
        "masks_that_leave_no_window_together",
        positions("7", "5", -2)
        + f"c = R.less_equal(j, i); s1 = R.where(c, s0, {INF})\n"
        + f"i2 = R.add(i, {const(1, 'int64')}); e = R.greater(j, i2); s = R.where(e, s1, {INF})",
        Reason.ATTRIBUTE,
        "which is no causal mask and no window",
        "q[2,4,7,8] k[2,4,5,8] v[2,4,5,8]",
    ),
    scored(
        "bias_and_minimum",
        "s1 = R.add(s0, m); s = R.minimum(s1, n)",
        Reason.ATTRIBUTE,
        "2 masks are added to the scores or bound them",
        QKV + " m[4,5,7] n[2,1,1,7]",
    ),
    scored(
        "two_masks_of_data",
        f"s1 = R.where(m, s0, {INF}); s = R.where(n, s1, {INF})",
        Reason.ATTRIBUTE,
        "2 masks hide keys by their data",
        QKV + " m[5,7]:bool n[2,1,1,7]:bool",
    ),
    scored(
        "mask_that_makes_scores_larger",
        "s = R.add(s0, m)",
        Reason.SHAPE,
        "scores of [1, 4, 5, 7] and the mask are [2, 4, 5, 7] together",
        "q[1,4,5,8] k[1,4,7,8] v[2,4,7,8] m[2,1,5,7]",
    ),
    scored(
        "scale_that_is_data",
        "s = R.multiply(s0, m)",
        Reason.ATTRIBUTE,
        "the scores go through multiply",
        QKV + " m[4,1,1]",
    ),
    scored(
        "scores_rounded_to_whole_numbers",
        's1 = R.astype(s0, "int32"); s = R.astype(s1, "float32")',
        Reason.ATTRIBUTE,
        "the scores go through astype",
    ),
    scored(
        "scores_through_another_function",
        "s = R.sigmoid(s0)",
        Reason.ATTRIBUTE,
        "the scores go through sigmoid",
    ),
    scored(
        "mask_on_rows_of_all_heads",
        "s1 = R.reshape(s0, [40, 7]); s2 = R.add(s1, m); s = R.reshape(s2, [2, 4, 5, 7])",
        Reason.LAYOUT,
        "scores as [40, 7], which are no queries by keys",
        QKV + " m[40,7]",
    ),
    scored(
        "largest_score_taken_off_before_a_soft_cap",
        "m = R.max(s0, axis=[-1], keepdims=True); s1 = R.subtract(s0, m); s = R.tanh(s1)",
        Reason.ATTRIBUTE,
        "the largest score is taken off in between",
    ),
    Refusal(
        "mask_by_head_of_keys",
        "q[2,2,2,5,8] k[2,2,1,7,8] v[2,2,1,7,8] m[2,2,1,5,7]",
        "t = R.permute_dims(k, axes=[0, 1, 2, 4, 3]); s0 = R.matmul(q, t); s = R.add(s0, m)\n"
        "p = R.nn.softmax(s, axis=-1); o = R.matmul(p, v)",
        Reason.SHAPE,
        "not the same for whole batches or heads",
    ),
    Refusal(
        "sink_after_the_largest_is_taken_off",
        QKV + " W[4]",
        PRODUCT
        + "m = R.max(s0, axis=[-1], keepdims=True); s1 = R.subtract(s0, m)\n"
        + SINK.format(shift="", scores="j").replace("(s0, c)", "(s1, c)"),
        Reason.ATTRIBUTE,
        "taken off before a sink",
    ),
    Refusal(
        "sinks_of_rows",
        QKV + " W[1,4,5,1]",
        PRODUCT
        + SINK.format(shift="", scores="j").replace(
            "c0 = R.reshape(W, [1, 4, 1, 1]); c = R.broadcast_to(c0,", "c = R.broadcast_to(W,"
        ),
        Reason.SHAPE,
        "differ within a head",
    ),
    Refusal(
        "sinks_that_are_rounded_on_the_way",
        QKV + " W[4]",
        PRODUCT
        + SINK.format(shift="", scores="j")
        .replace(
            "[2, 4, 5, 1])",
            '[2, 4, 5, 1]); n = R.astype(c, "float16"); f = R.astype(n, "float32")',
        )
        .replace("(s0, c)", "(s0, f)"),
        Reason.DTYPE,
        "n is rounded to float16, and read as more by f",
    ),
    Refusal(
        "alibi_from_the_first_key_with_sinks",
        QKV + " W[4] u[4]",
        PRODUCT
        + 'e = R.arange(0, 7, 1, "float32"); w = R.reshape(u, [4, 1, 1])\n'
        + "m = R.multiply(w, e); s1 = R.add(s0, m)\n"
        + SINK.format(shift="", scores="j").replace("(s0, c)", "(s1, c)"),
        Reason.ATTRIBUTE,
        "counts from elsewhere",
    ),
    scored(
        "two_alibis",
        'e = R.arange(0, 7, 1, "float32"); w = R.reshape(u, [4, 1, 1]); x = R.multiply(w, e)\n'
        "s1 = R.add(s0, x); s = R.add(s1, x)",
        Reason.ATTRIBUTE,
        "2 biases by position",
        QKV + " u[4]",
    ),
    Refusal(
        "causal_attribute_against_the_mask",
        OPERANDS,
        positions(offset=2)
        + f"c = R.less_equal(j, i); m0 = R.where(c, {const(0.0)}, {LOW})\n"
        + "m = R.reshape(m0, [1, 1, 5, 7])\n"
        + 'o = R.nn.attention_bias(q, k, v, m, causal_mask="TopLeft")',
        Reason.ATTRIBUTE,
        "a mask that is bottom_right beside attributes that say top_left",
    ),
    Refusal(
        "window_attribute_against_the_mask",
        OPERANDS,
        positions()
        + f"c = R.less_equal(j, i); m0 = R.where(c, {const(0.0)}, {LOW})\n"
        + "m = R.reshape(m0, [1, 1, 5, 7])\n"
        + 'o = R.nn.attention_bias(q, k, v, m, causal_mask="BottomRight", window_size=3)',
        Reason.ATTRIBUTE,
        "bottom_right, window 3",
    ),
    Refusal(
        "bias_of_a_dtype_that_no_kernel_reads",
        OPERANDS + " m[2,1,5,7]:float64",
        "o = R.nn.attention_bias(q, k, v, m)",
        Reason.DTYPE,
        "float64",
    ),
    Refusal(
        "packed_lengths_at_run_time",
        "q[1,10,4,8] n[3]:int32 m[]:int32",
        "o = R.nn.attention_var_len(q, q, q, n, m)",
        Reason.ATTRIBUTE,
        "the lengths of the queries are known at run time only",
    ),
    Refusal(
        "packed_lengths_that_differ",
        "q[1,10,4,8]",
        'n = R.const([0, 4, 10], "int32"); m = R.const(6, "int32")\n'
        "o = R.nn.attention_var_len(q, q, q, n, m)",
        Reason.SHAPE,
        "packed at [0, 4, 10]",
    ),
    Refusal(
        "packed_queries_without_keys",
        "q[1,10,4,8] k[1,15,4,8]",
        'n = R.const([0, 5, 10], "int32"); l = R.const([0, 15], "int32")\n'
        'm = R.const(15, "int32"); o = R.nn.attention_var_len(q, k, k, n, m, l, m)',
        Reason.SHAPE,
        "2 sequences of queries, 1 of keys",
    ),
    Refusal(
        "query_of_one_batch",
        "q[1,4,5,8] k[2,4,7,8] v[2,4,7,8]",
        attention("").replace("s0 =", "s ="),
        Reason.SHAPE,
        "the query is broadcast",
    ),
    Refusal(
        "values_of_more_heads",
        "q[1,1,5,8] k[1,1,7,8] v[1,4,7,8]",
        attention("").replace("s0 =", "s ="),
        Reason.SHAPE,
        "the value has",
    ),
    Refusal(
        "positions_in_front_of_the_batch",
        "q[5,2,4,8] k[7,2,4,8] v[7,2,4,8]",
        "t = R.permute_dims(k, axes=[1, 2, 3, 0]); r = R.permute_dims(q, axes=[1, 2, 0, 3])\n"
        "s = R.matmul(r, t); p = R.nn.softmax(s, axis=-1)\n"
        "w = R.permute_dims(v, axes=[1, 2, 0, 3]); o = R.matmul(p, w)",
        Reason.LAYOUT,
        "the query comes in another order",
    ),
    Refusal(
        "dynamic_features",
        "q[2,4,5,d] k[2,4,7,d] v[2,4,7,d]",
        attention("").replace("s0 =", "s ="),
        Reason.SHAPE,
        "the head dimension is dynamic",
    ),
    Refusal(
        "value_of_another_dtype",
        "q[2,4,5,8] k[2,4,7,8] v[2,4,7,8]:float16",
        attention("")
        .replace("s0 =", "s =")
        .replace("; o = R.matmul(p, v)", '; w = R.astype(p, "float16"); o = R.matmul(w, v)'),
        Reason.DTYPE,
        "the value is float16, the query float32",
    ),
    scored(
        "alibi_before_a_bound",
        'e = R.arange(0, 7, 1, "float32"); w = R.reshape(u, [4, 1, 1]); x = R.multiply(w, e)\n'
        "s1 = R.add(s0, x); s = R.minimum(s1, m)",
        Reason.ATTRIBUTE,
        "a bias by position beside a bound",
        QKV + " u[4] m[5,7]",
    ),
    Refusal(
        "softmax_over_two_rows_together",
        "q[2,4,6,8] k[2,4,7,8] v[2,4,7,8]",
        PRODUCT + "s = R.reshape(s0, [2, 4, 3, 14]); p0 = R.nn.softmax(s, axis=-1)\n"
        "p = R.reshape(p0, [2, 4, 6, 7]); o = R.matmul(p, v)",
        Reason.LAYOUT,
        "the softmax is over [14], the values are [7]",
    ),
    Refusal(
        "queries_of_two_heads_together",
        "q[2,4,5,8] k[2,4,7,8] v[2,2,7,8]",
        PRODUCT + "p0 = R.nn.softmax(s0, axis=-1); p = R.reshape(p0, [2, 2, 10, 7])\n"
        "o = R.matmul(p, v)",
        Reason.SHAPE,
        "heads of key and value differ: 4 and 2",
    ),
    Refusal(
        "queries_of_two_heads_together_over_one_head_of_keys",
        "q[2,4,5,8] k[2,1,7,8] v[2,1,7,8]",
        PRODUCT + "p0 = R.nn.softmax(s0, axis=-1); p = R.reshape(p0, [2, 2, 10, 7])\n"
        "o = R.matmul(p, v)",
        Reason.LAYOUT,
        "queries are [4, 5] heads and rows, the result is [2, 10]",
    ),
    Refusal(
        "weights_with_sinks_returned",
        QKV + " W[4]",
        PRODUCT + SINK.format(shift="", scores="j"),
        Reason.LEAKED,
        "p0 is a result",
        "(o, p0)",
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_declines(case: Refusal) -> None:
    chain = Chain("main", case.inputs, case.body, case.result, case.sizes, case.dtype)
    assert_declined(module([chain]), PASS, case.reason, case.words)


def test_an_attention_outside_a_dataflow_block() -> None:
    chain = Chain("main", QKV, attention("").replace("s0 =", "s ="), "o", dataflow=False)
    assert_declined(module([chain]), PASS, Reason.SIDE_EFFECT, "not in a dataflow block")


@pytest.mark.parametrize(
    "body",
    [
        "s = R.nn.softmax(q, axis=-1); o = R.matmul(s, k)",
        "s = R.matmul(q, k); o = R.nn.softmax(s, axis=-1)",
        "s = R.matmul(q, k); p = R.sigmoid(s); o = R.matmul(p, k)",
        f"b = R.full((3, 2, 4, 8, 8), {LOW}, 'float32'); s0 = R.matmul(q, k)\n"
        "s = R.maximum(s0, b); p = R.nn.softmax(s, axis=-1); o = R.matmul(p, k)",
    ],
    ids=["no_product", "no_values", "no_softmax", "scores_copied_by_a_bound"],
)
def test_what_is_no_attention_is_not_even_declined(body: str) -> None:
    assert_untouched(module([Chain("main", "q[2,4,8,8] k[2,4,8,8]", body, "o")]), PASS)


@pytest.mark.parametrize("over", ["axis=[-1]", "axis=[-2], keepdims=True"])
def test_rows_without_keys_that_are_told_apart_along_another_axis(over: str) -> None:
    body = (
        f"t = R.permute_dims(k, axes=[0, 2, 1]); s0 = R.matmul(q, t); s = R.where(m, s0, {INF})\n"
        f"p0 = R.nn.softmax(s, axis=-1); e = R.equal(s, {INF}); n = R.logical_not(e)\n"
        f'n8 = R.astype(n, "int8"); a8 = R.max(n8, {over}); a = R.astype(a8, "bool")\n'
        f'x = R.logical_not(a); z = R.full((4, 4, 4), {const(0.0)}, "float32")\n'
        "p = R.where(x, z, p0); o = R.matmul(p, v)"
    )
    chain = Chain("main", "q[4,4,8] k[4,4,8] v[4,4,8] m[4,4,4]:bool", body, "o")
    assert_untouched(module([chain]), PASS)
