"""FuseAttentionChain: heads that are a part of a merged projection are read where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion import DynamicDim
from relax_fusion.workload import Heads

from ..support.attention_chains import BASE, check, const, thirds, turns
from ..support.chains import Chain, Rewrite, assert_numbers

ROWS = replace(BASE, kv_len=5, scale=8**-0.5, q_layout="bsnh", kv_layout="bsnh", out_layout="bsnh")
ATTENTION = "o = R.nn.attention(q, k, v)"
THIRDS, TURNS = thirds(4), turns(4)
GROUPED = {"kv_heads": 2, "q_in": Heads(8, 0), "k_in": Heads(8, 4), "v_in": Heads(8, 6)}
KEYS = "[0, 1, 3, 2]"


def of(name: str, inputs: str, body: str, args: str = "x x x", **more) -> Rewrite:
    left = more.pop("left", ())
    chain = {n: more.pop(n) for n in ("sizes", "dtype") if n in more}
    work = replace(ROWS, **more)
    return Rewrite(Chain(name, inputs, body + ATTENTION, "o", **chain), work, args, left)


def cut(name: str, source: str, axis: int, begin: int, end: int) -> str:
    return f"{name} = R.strided_slice({source}, axes=[{axis}], begin=[{begin}], end=[{end}])\n"


def items(names: str, source: str, sections: int | list[int], axis: int) -> str:
    made = f"z_{source} = R.split({source}, indices_or_sections={sections}, axis={axis})\n"
    return made + "".join(f"{n} = z_{source}[{i}]\n" for i, n in enumerate(names.split()))


def shaped(shape: str, names: str = "qkv", suffix: str = "1") -> str:
    return "".join(f"{x} = R.reshape({x}{suffix}, {shape})\n" for x in names)


def written_out(q: str = "q", k: str = "k", v: str = "v") -> str:
    """Return an attention of ``[b, n, s, h]``, for the operator that follows nothing is left."""
    return (
        f"t = R.permute_dims({k}, axes={KEYS}); s = R.matmul({q}, t)\n"
        f"p = R.nn.softmax(s, axis=-1); o = R.matmul(p, {v})"
    )


HEADS = "[2, 5, 4, 8]"
GROUPS = "".join(
    f"{x}2 = R.reshape({x}1, [2, 5, 2, 8]); {x} = R.repeat({x}2, 2, axis=2)\n" for x in "kv"
)
READ = [
    of("split_in_three", "x[2,5,96]", items("q1 k1 v1", "x", 3, -1) + shaped(HEADS), **THIRDS),
    of(
        "slices_of_grouped_heads",
        "x[2,5,64]",
        cut("q1", "x", 2, 0, 32) + cut("k1", "x", -1, 32, 48) + cut("v1", "x", 2, 48, 2**63 - 1)
        + shaped(HEADS, "q") + GROUPS,
        **GROUPED,
    ),
    of(
        "five_query_heads_over_one",
        "x[2,5,7,8]",
        cut("q", "x", 2, 0, 5) + cut("k", "x", 2, 5, 6) + cut("v", "x", 2, -1, 7),
        q_heads=5,
        kv_heads=1,
        q_in=Heads(7, 0), k_in=Heads(7, 5), v_in=Heads(7, 6),
    ),
    of(
        "heads_in_turns_by_a_split",
        "x[2,5,96]",
        "y = R.reshape(x, [2, 5, 4, 24])\n" + items("q k v", "y", [8, 16], 3),
        **TURNS,
    ),
    of(
        "heads_in_turns_by_slices",
        "x[10,96]",
        "y = R.reshape(x, [2, 5, 4, 3, 8])\n"
        + "".join(cut(f"{n}1", "y", 3, i, i + 1) for i, n in enumerate("qkv"))
        + "".join(f"{n} = R.squeeze({n}1, axis=[3])\n" for n in "qkv"),
        **TURNS,
    ),
    of(
        "operands_by_number",
        "x[2,5,96]",
        "y1 = R.reshape(x, [2, 5, 3, 4, 8]); y = R.permute_dims(y1, axes=[2, 0, 1, 3, 4])\n"
        + "".join(f'{n} = R.take(y, R.const({i}, "int64"), axis=0)\n' for i, n in enumerate("qkv")),
        **THIRDS,
    ),
    of(
        "a_split_of_a_split",
        "x[2,5,96]",
        items("q1 y", "x", [32], 2) + items("k1 v1", "y", 2, 2) + shaped(HEADS),
        **THIRDS,
    ),
    of(
        "a_part_of_neighbours_of_a_part",
        "x[2,5,104]",
        cut("y", "x", 2, 8, 96) + cut("q1", "y", 2, 0, 32) + cut("k1", "y", 2, 40, 56)
        + cut("v1", "y", 2, 72, 88) + shaped(HEADS, "q") + GROUPS,
        kv_heads=2, q_in=Heads(13, 1), k_in=Heads(13, 6), v_in=Heads(13, 10),
    ),
    of(
        "keys_and_values_of_cross_attention",
        "q[2,5,4,8] x[2,7,4,16]",
        items("k v", "x", 2, -1),
        "q x x",
        kv_len=7, k_in=Heads(8, 0, 2), v_in=Heads(8, 1, 2),
    ),
    of(
        "dynamic_sizes_scaled_queries",
        "x[b,s,96]",
        items("q1 k1 v1", "x", [32, 64], 2) + shaped("[b, s, 4, 8]", "kv")
        + f"q2 = R.multiply(q1, {const(0.5)})\n" + shaped("[b, s, 4, 8]", "q", "2"),
        **{**THIRDS, "batch": DynamicDim("b"), "q_len": DynamicDim("s")},
        kv_len=DynamicDim("s"),
        scale=0.5 * 8**-0.5,
        sizes={"b": 3, "s": 6},
    ),
    of(
        "the_last_query",
        "x[2,5,96]",
        items("q1 k1 v1", "x", 3, -1) + shaped(HEADS, "kv") + cut("q2", "q1", 1, -1, 5)
        + shaped("[2, 1, 4, 8]", "q", "2"),
        **{**THIRDS, "q_len": 1, "q_in": Heads(60, 48)},
    ),
    of(
        "a_cache_of_both",
        "q[2,5,4,8] x[2,16,8,8]",
        cut("y", "x", 1, 0, 7) + cut("k", "y", 2, 0, 4) + cut("v", "y", 2, 4, 8),
        "q x x T.int64(7)",
        kv_len=7, kv_prefix=True, k_in=Heads(8, 0), v_in=Heads(8, 4),
    ),
    of(
        "values_behind_wider_keys",
        "q[2,5,4,16] x[2,5,4,24]",
        items("k v", "x", [16], 3),
        "q k x",
        head_dim=16, v_in=Heads(12, 2, 3), scale=0.25,
        left=("split",),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", READ, ids=str)
def test_parts_are_read_where_they_are(case: Rewrite) -> None:
    check(case)


NOT_READ = [
    of(
        "groups_of_queries_between_keys",
        "x[2,5,2,4,8]",
        cut("q1", "x", 3, 0, 2) + cut("k1", "x", 3, 2, 3) + cut("v1", "x", 3, 3, 4)
        + shaped(HEADS, "q") + GROUPS,
        "q1 x x",
        kv_heads=2, k_in=Heads(8, 2, 4), v_in=Heads(8, 3, 4),
        left=("strided_slice",),
    ),
    of(
        "not_at_a_whole_head",
        "x[2,5,100]",
        cut("q1", "x", 2, 4, 36) + cut("k1", "x", 2, 36, 68) + cut("v1", "x", 2, 68, 100)
        + shaped(HEADS),
        "q1 k1 v1",
        left=("strided_slice",) * 3,
    ),
    of(
        "one_tensor_after_the_other",
        "x[3,2,5,4,8]",
        "".join(cut(f"{n}1", "x", 0, i, i + 1) for i, n in enumerate("qkv")) + shaped(HEADS),
        "q1 k1 v1",
        left=("strided_slice",) * 3,
    ),
    of(
        "some_of_a_larger_batch",
        "x[4,5,4,8] k[2,5,4,8] v[2,5,4,8]",
        cut("q", "x", 0, 2, 4),
        "q k v",
        left=("strided_slice",),
    ),
    of(
        "some_positions",
        "x[2,8,4,8] k[2,5,4,8] v[2,5,4,8]",
        cut("q", "x", 1, 3, 8),
        "q k v",
        left=("strided_slice",),
    ),
    of(
        "every_other_head",
        "x[2,5,8,8] k[2,5,4,8] v[2,5,4,8]",
        "q = R.strided_slice(x, axes=[2], begin=[1], end=[8], strides=[2])\n",
        "q k v",
        left=("strided_slice",),
    ),
    of(
        "a_number_that_is_not_known",
        'x[3,2,5,4,8] i[]:int64 k[2,5,4,8] v[2,5,4,8]',
        "q = R.take(x, i, axis=0)\n",
        "q k v",
        left=("take",),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", NOT_READ, ids=str)
def test_other_parts_are_copied_first(case: Rewrite) -> None:
    check(case)


def test_heads_by_position_follow_the_layout_of_what_is_beside() -> None:
    body = cut("v0", "x", 2, 4, 8) + "v = R.permute_dims(v0, axes=[0, 2, 1, 3])\n" + written_out()
    work = replace(BASE, kv_len=5, scale=1.0)
    check(Rewrite(Chain("f", "q[2,4,5,8] k[2,4,5,8] x[2,5,8,8]", body, "o"), work, "q k v",
                  ("strided_slice", "permute_dims")))  # fmt: skip


def test_a_part_that_is_also_read_elsewhere_is_read_as_it_is() -> None:
    body = items("q1 k1 v1", "x", 3, 2) + shaped(HEADS) + ATTENTION
    work = replace(ROWS, **{**THIRDS, "k_in": None})
    check(Rewrite(Chain("f", "x[2,5,96]", body, "(o, k1)"), work, "x k1 x", ("split",)))


CHAINS = [r.chain for r in READ]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_numbers(machine, chain: Chain) -> None:
    assert_numbers(*machine, chain)
