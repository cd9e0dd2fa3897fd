"""FuseAttentionChain: movements around an attention, heads that share keys, scales, casts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion import DynamicDim

from ..support.attention_chains import BASE, QKV, attention, check, const, positions
from ..support.chains import Chain, Rewrite, assert_numbers

ROWS = replace(BASE, q_layout="bsnh", kv_layout="bsnh", out_layout="bsnh")
GROUPED = replace(BASE, kv_heads=2)
SCORES = "p = R.nn.softmax(s, axis=-1)\n"
FLAT = "q[8,5,8] k[8,7,8] v[8,7,8]"
BATCHED = (
    "t = R.permute_dims(k1, axes=[0, 2, 1]); s0 = R.matmul(q1, t)\n"
    "s = R.reshape(s0, [2, 4, 5, 7])\n" + SCORES + "p1 = R.reshape(p, [8, 5, 7])\n"
    "o1 = R.matmul(p1, v1); o2 = R.reshape(o1, [2, 4, 5, 8])\n"
)
LENGTHS = {"q": 5, "k": 7, "v": 7}
FLATTENED = "".join(f"{x}1 = R.reshape({x}, [8, {n}, 8])\n" for x, n in LENGTHS.items())
SHARED = "q[2,4,5,8] k[2,2,7,8] v[2,2,7,8]"


def expanded(x: str, axis: int, shape: str, flat: str) -> str:
    """Return the heads of x copied as transformers' repeat_kv does it."""
    return (
        f"{x}1 = R.expand_dims({x}, axis=[{axis}]); {x}2 = R.broadcast_to({x}1, {shape})\n"
        f"{x}3 = R.reshape({x}2, {flat})\n"
    )


def of(name: str, inputs: str, body: str, work, args: str = "q k v", **more) -> Rewrite:
    left = more.pop("left", ())
    return Rewrite(Chain(name, inputs, body, "o", **more), work, args, left)


def mixed(k: str = "k", v: str = "v", q: str = "q", axes: str = "[0, 1, 3, 2]") -> str:
    """Return an attention of tensors of these names."""
    return (
        f"t = R.permute_dims({k}, axes={axes}); s = R.matmul({q}, t)\n{SCORES}o = R.matmul(p, {v})"
    )


GROUPS = [
    of(
        "repeat_kv_of_transformers",
        SHARED,
        expanded("k", 2, "[2, 2, 2, 7, 8]", "[2, 4, 7, 8]")
        + expanded("v", 2, "[2, 2, 2, 7, 8]", "[2, 4, 7, 8]")
        + mixed("k3", "v3"),
        GROUPED,
    ),
    of(
        "repeat_behind_a_transpose",
        "q[2,5,4,8] k[2,7,2,8] v[2,7,2,8]",
        expanded("k", 3, "[2, 7, 2, 2, 8]", "[2, 7, 4, 8]")
        + expanded("v", 3, "[2, 7, 2, 2, 8]", "[2, 7, 4, 8]")
        + "o = R.nn.attention(q, k3, v3)",
        replace(ROWS, kv_heads=2, scale=8**-0.5),
    ),
    of(
        "repeat_of_dynamic_sizes",
        "q[b,4,s,8] k[b,2,n,8] v[b,2,n,8]",
        "k1 = R.repeat(k, 2, axis=1); v1 = R.repeat(v, 2, axis=1)\n" + mixed("k1", "v1"),
        replace(GROUPED, batch=DynamicDim("b"), q_len=DynamicDim("s"), kv_len=DynamicDim("n")),
        sizes={"b": 2, "s": 3, "n": 7},
    ),
    of(
        "one_head_of_keys_broadcast_to_all",
        "q[2,4,5,8] k[2,1,7,8] v[2,1,7,8]",
        "k1 = R.broadcast_to(k, [2, 4, 7, 8]); v1 = R.broadcast_to(v, [2, 4, 7, 8])\n"
        + mixed("k1", "v1"),
        replace(BASE, kv_heads=1),
    ),
    of(
        "one_head_of_keys_tiled_to_all",
        "q[2,4,5,8] k[2,1,7,8] v[2,1,7,8]",
        "k1 = R.tile(k, [1, 4, 1, 1]); v1 = R.tile(v, [1, 4, 1, 1])\n" + mixed("k1", "v1"),
        replace(BASE, kv_heads=1),
    ),
    of(
        "queries_in_groups",
        "q[2,4,5,8] k[2,2,7,8] v[2,2,7,8]",
        "q1 = R.reshape(q, [2, 2, 2, 5, 8]); k1 = R.reshape(k, [2, 2, 1, 7, 8])\n"
        "v1 = R.reshape(v, [2, 2, 1, 7, 8])\n"
        + mixed("k1", "v1", "q1", "[0, 1, 2, 4, 3]").replace("o = ", "o1 = ")
        + "; o2 = R.reshape(o1, [2, 4, 5, 8]); o = R.permute_dims(o2, axes=[0, 2, 1, 3])",
        replace(GROUPED, out_layout="bsnh"),
    ),
    of(
        "queries_in_groups_with_a_mask",
        "q[2,4,5,8] k[2,2,7,8] v[2,2,7,8] m[2,1,1,5,7]",
        "q1 = R.reshape(q, [2, 2, 2, 5, 8]); k1 = R.reshape(k, [2, 2, 1, 7, 8])\n"
        "v1 = R.reshape(v, [2, 2, 1, 7, 8])\n"
        + mixed("k1", "v1", "q1", "[0, 1, 2, 4, 3]")
        .replace("s = ", "s0 = ")
        .replace("\np =", "; s = R.add(s0, m)\np ="),
        replace(GROUPED, bias_dims=(True, False, True, True)),
        "q k v m",
    ),
]
LAYOUTS = [
    of(
        "heads_folded_into_the_batch",
        QKV,
        FLATTENED + BATCHED + "o = R.permute_dims(o2, axes=[0, 2, 1, 3])",
        replace(BASE, out_layout="bsnh"),
    ),
    of(
        "heads_taken_from_features",
        "q[2,5,32] k[2,7,32] v[2,7,32]",
        "".join(
            f"{x}0 = R.reshape({x}, [2, {n}, 4, 8])\n"
            f"{x}2 = R.permute_dims({x}0, axes=[0, 2, 1, 3]); {x}1 = R.reshape({x}2, [8, {n}, 8])\n"
            for x, n in LENGTHS.items()
        )
        + BATCHED
        + "o3 = R.permute_dims(o2, axes=[0, 2, 1, 3]); o = R.reshape(o3, [2, 5, 32])",
        ROWS,
    ),
    of(
        "heads_of_one_batch_folded",
        "q[1,4,5,8] k[1,4,7,8] v[1,4,7,8]",
        FLATTENED.replace("[8,", "[4,") + mixed("k1", "v1", "q1", "[0, 2, 1]"),
        replace(BASE, batch=1),
    ),
    of(
        "heads_and_batch_as_the_softmax_has_them",
        "q1[8,5,8] k1[8,7,8] v1[8,7,8]",
        BATCHED + "o = R.nn.relu(o2)",
        BASE,
        "q1 k1 v1",
        left=("nn.relu",),
    ),
    of(
        "scores_in_another_shape_for_the_softmax",
        "q[2,5,32] k[2,7,32] v[2,7,32]",
        "".join(
            f"{x}0 = R.reshape({x}, [2, {n}, 4, 8])\n"
            f"{x}2 = R.permute_dims({x}0, axes=[0, 2, 1, 3]); {x}1 = R.reshape({x}2, [8, {n}, 8])\n"
            for x, n in LENGTHS.items()
        )
        + BATCHED.replace("R.reshape(s0, [2, 4, 5, 7])", "R.reshape(s0, [4, 2, 5, 7])")
        + "o3 = R.permute_dims(o2, axes=[0, 2, 1, 3]); o = R.reshape(o3, [2, 5, 32])",
        ROWS,
    ),
    of(
        "scores_with_one_more_axis_for_a_step",
        QKV,
        attention(
            f"s1 = R.expand_dims(s0, axis=[0]); s2 = R.multiply(s1, {const(0.5)})\n"
            "s = R.squeeze(s2, axis=[0])"
        ),
        replace(BASE, scale=0.5),
    ),
    of(
        "key_transposed_before_it_is_flattened",
        "q[2,4,5,8] k[2,7,4,8] v[2,4,7,8]",
        "k0 = R.permute_dims(k, axes=[0, 2, 3, 1]); t = R.reshape(k0, [8, 8, 7])\n"
        "q1 = R.reshape(q, [8, 5, 8]); v0 = R.permute_dims(v, axes=[0, 2, 1, 3])\n"
        "s = R.matmul(q1, t)\n" + SCORES + "v2 = R.permute_dims(v0, axes=[0, 2, 1, 3])\n"
        "v1 = R.reshape(v2, [8, 7, 8]); o = R.matmul(p, v1)",
        replace(BASE, kv_layout="bsnh"),
        "q k v0",
        left=("permute_dims",),
    ),
    of(
        "mask_of_folded_heads",
        QKV + " m[8,1,7]",
        FLATTENED
        + BATCHED.replace("s = R.reshape(s0,", "s1 = R.add(s0, m); s = R.reshape(s1,")
        + "o = R.nn.relu(o2)",
        replace(BASE, bias_dims=(True, True, False, True)),
        "q k v m",
        left=("nn.relu",),
    ),
    of(
        "copies_to_their_own_shape",
        QKV,
        "q1 = R.broadcast_to(q, [2, 4, 5, 8]); v1 = R.broadcast_to(v, [2, 4, 7, 8])\n"
        + mixed("k", "v1", "q1"),
        BASE,
    ),
    of(
        "scores_copied_to_their_own_shape",
        QKV,
        attention("s = R.broadcast_to(s0, [2, 4, 5, 7])"),
        BASE,
    ),
    of(
        "result_transposed_in_two_steps",
        QKV,
        mixed().replace("o = ", "o1 = ") + "\no2 = R.permute_dims(o1, axes=[2, 0, 1, 3])\n"
        "o3 = R.permute_dims(o2, axes=[1, 2, 0, 3])\n"
        "o = R.permute_dims(o3, axes=[0, 2, 1, 3])",
        replace(BASE, out_layout="bsnh"),
    ),
    of(
        "one_query_of_many_heads",
        "q[2,1,32] k[2,4,7,8] v[2,4,7,8]",
        "q1 = R.reshape(q, [2, 4, 1, 8])\n" + mixed(q="q1"),
        replace(BASE, q_len=1),
    ),
    of(
        "cache_of_keys_by_head",
        "q[2,4,5,8] k[2,4,16,8] v[2,4,16,8]",
        "k1 = R.strided_slice(k, axes=[2], begin=[0], end=[7])\n"
        "v1 = R.strided_slice(v, axes=[2], begin=[0], end=[7])\n" + mixed("k1", "v1"),
        replace(BASE, kv_prefix=True),
        "q k v T.int64(7)",
    ),
]
SCALES = [
    of(
        "root_of_the_scale_on_both",
        QKV,
        f"q1 = R.multiply(q, {const(0.5)}); k0 = R.permute_dims(k, axes=[0, 1, 3, 2])\n"
        f"k1 = R.multiply(k0, {const(0.5)}); s = R.matmul(q1, k1)\n{SCORES}o = R.matmul(p, v)",
        replace(BASE, scale=0.25),
    ),
    of(
        "query_scaled_twice",
        QKV,
        f"q1 = R.multiply(q, {const(0.5)}); q2 = R.divide(q1, {const(4.0)})\n" + mixed(q="q2"),
        replace(BASE, scale=0.125),
    ),
    of(
        "scale_of_the_key",
        QKV,
        f"k1 = R.divide(k, {const(4.0)})\n" + mixed("k1"),
        replace(BASE, scale=0.25),
    ),
    of(
        "scale_of_the_value_stays_apart",
        QKV,
        f"v1 = R.multiply(v, {const(0.5)})\n" + mixed(v="v1"),
        BASE,
        "q k v1",
        left=("multiply",),
    ),
    of(
        "scale_in_a_full_tensor",
        QKV,
        attention(f'c = R.full((), {const(2.0)}, "float32"); s = R.divide(s0, c)'),
        replace(BASE, scale=0.5),
    ),
    of(
        "products_in_float32",
        QKV,
        'q1 = R.astype(q, "float32"); k1 = R.astype(k, "float32")\n'
        + mixed("k1", "v", "q1").replace("o = R.matmul(p, v)", "")
        + 'p1 = R.astype(p, "float16"); o = R.matmul(p1, v)',
        replace(BASE, dtype="float16", out_dtype="float16"),
        dtype="float16",
    ),
    of(
        "all_in_float32_and_back",
        QKV,
        "".join(f'{x}1 = R.astype({x}, "float32")\n' for x in "qkv")
        + mixed("k1", "v1", "q1").replace("o = ", "o1 = ")
        + '; o = R.astype(o1, "float16")',
        replace(BASE, dtype="float16", out_dtype="float16"),
        dtype="float16",
    ),
    *(
        of(
            f"heads_of_{dim}",
            f"q[1,2,5,{dim}] k[1,2,7,{dim}] v[1,2,7,{dim}]",
            mixed(),
            replace(BASE, batch=1, q_heads=2, kv_heads=2, head_dim=dim, v_dim=dim),
        )
        for dim in (80, 96, 256)
    ),
]
PACKED = 'n = R.const([0, 5, 10], "int32"); m = R.const(5, "int32")\n'
OPERATORS = [
    of(
        "operator_with_a_window",
        "q[2,5,4,8] k[2,7,4,8] v[2,7,4,8]",
        'o = R.nn.attention(q, k, v, causal_mask="BottomRight", window_size=3)',
        replace(ROWS, scale=8**-0.5, causal="bottom_right", window=3),
    ),
    of(
        "operator_with_a_mask_of_positions",
        "q[2,5,4,8] k[2,7,4,8] v[2,7,4,8]",
        positions(offset=2)
        + f"c = R.less_equal(j, i); m0 = R.where(c, {const(0.0)}, {const(-3.4e38)})\n"
        + "m = R.reshape(m0, [1, 1, 5, 7]); o = R.nn.attention_bias(q, k, v, m)",
        replace(ROWS, scale=8**-0.5, causal="bottom_right"),
    ),
    of(
        "operator_with_a_boolean_mask",
        "q[2,5,4,8] k[2,7,4,8] v[2,7,4,8] m[2,1,5,7]:bool",
        f"b = R.where(m, {const(0.0)}, {const(-1e999)}); o = R.nn.attention_bias(q, k, v, b)",
        replace(ROWS, scale=8**-0.5, mask_dims=(True, False, True, True)),
        "q k v m",
    ),
    of(
        "operator_in_importers_transposes",
        "q[2,4,5,8] k[2,4,7,8] v[2,4,7,8]",
        "".join(f"{x}1 = R.permute_dims({x}, axes=[0, 2, 1, 3])\n" for x in "qkv")
        + 'o1 = R.nn.attention(q1, k1, v1, causal_mask="TopLeft")\n'
        + "o = R.permute_dims(o1, axes=[0, 2, 1, 3])",
        replace(BASE, scale=8**-0.5, causal="top_left"),
    ),
    of(
        "operator_of_packed_sequences",
        "q[1,10,4,8] k[1,10,4,8] v[1,10,4,8]",
        PACKED + "o = R.nn.attention_var_len(q, k, v, n, m)",
        replace(ROWS, kv_len=5, scale=8**-0.5),
    ),
]
REWRITES = [*GROUPS, *LAYOUTS, *SCALES, *OPERATORS]


@pytest.mark.parametrize("case", REWRITES, ids=str)
def test_rewrites(case: Rewrite) -> None:
    check(case)


CHAINS = [r.chain for r in (*GROUPS, *LAYOUTS[::2], *SCALES[:6:2])]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
