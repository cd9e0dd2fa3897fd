"""Sizes, counts, operations and bytes agree with those that are counted by hand."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import tvm
from tvm import ir
from tvm.target import Target

from relax_fusion import Report, make_target
from relax_fusion.models import config_from_dict, export
from relax_fusion.options import PipelineOptions
from relax_fusion.pipeline import phase0_annotate, phase1_fuse
from relax_fusion.report import Item
from relax_fusion.report.sizes import value_of

from ..support.chains import Chain, module
from ..support.quick import quick_host

LAYERS, WIDTH, FFN, VOCAB, HEADS, KV_HEADS, HEAD = 3, 64, 112, 96, 4, 2, 16
POSITIONS, ROWS = 32, 7
SIZES = {"seq_len": ROWS, "total_len": ROWS, "batch": 1}
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH}
LONG = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "intermediate_size": FFN,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": KV_HEADS, **COMMON, **LONG},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": POSITIONS,
        "n_inner": FFN,
    },
    "bert": {"model_type": "bert", "architectures": ["BertModel"], **COMMON, **LONG},
}


def report_of(mod: ir.IRModule, target: Target) -> Report:
    report = Report()
    options = PipelineOptions(target, report=report)
    passes = [*phase0_annotate(options), *phase1_fuse(options)]
    with target:
        tvm.transform.Sequential(passes)(mod)
    return report


def reported(name: str, target: Target) -> Report:
    dtype = "float32" if target.kind.name == "llvm" else "float16"
    exported = export(config_from_dict(CONFIGS[name]), dtype=dtype, max_seq_len=POSITIONS)
    return report_of(exported.mod, target)


def work(mod: ir.IRModule, target: str = "llvm") -> list[Item]:
    return report_of(mod, quick_host() if target == "llvm" else make_target(target)).work


@cache
def model_work(name: str) -> list[Item]:
    return reported(name, quick_host()).work


def counted(items: list[Item], function: str) -> dict[tuple[int, ...], int]:
    """Return how often a function multiplies ``batch, M, N, K``, by sizes at `SIZES`."""
    found: dict[tuple[int, ...], int] = {}
    for item in items:
        for product in item.products if item.function == function else ():
            names = (product.batch, product.m, product.n, product.k)
            size = tuple(value_of(name, SIZES) or 0 for name in names)
            found[size] = found.get(size, 0) + item.count
    return found


Projections = dict[tuple[int, int], int]


def layer(rows: int, keys: int, projections: Projections, layers: int = LAYERS) -> Counter:
    """Return the matmuls of all layers: ``(N, K)`` of projections, scores and values."""
    own = Counter({(1, rows, n, k): times * layers for (n, k), times in projections.items()})
    scores, values = (HEADS, rows, keys, HEAD), (HEADS, rows, HEAD, keys)
    return own + Counter({scores: layers}) + Counter({values: layers})


def prompt(projections: Projections) -> Counter:
    """Return those of a prompt: behind the last layer's queries, keys and values, one row is left.

    Those are the first of `projections`.
    """
    first, *rest = projections
    last = layer(1, ROWS, {size: projections[size] for size in rest}, 1)
    return layer(ROWS, ROWS, projections, LAYERS - 1) + Counter({(1, ROWS, *first): 1}) + last


QKV = WIDTH + 2 * KV_HEADS * HEAD
LLAMA = {(QKV, WIDTH): 1, (WIDTH, WIDTH): 1, (FFN, WIDTH): 2, (WIDTH, FFN): 1}
GPT2 = {(3 * WIDTH, WIDTH): 1, (WIDTH, WIDTH): 1, (FFN, WIDTH): 1, (WIDTH, FFN): 1}
HEAD_ROW = Counter({(1, 1, VOCAB, WIDTH): 1})


@pytest.mark.parametrize(
    "name, function, expected",
    [
        ("llama", "prefill", prompt(LLAMA) + HEAD_ROW),
        ("llama", "decode", layer(1, ROWS, LLAMA) + HEAD_ROW),
        ("gpt2", "prefill", prompt(GPT2) + HEAD_ROW),
        ("gpt2", "decode", layer(1, ROWS, GPT2) + HEAD_ROW),
        ("bert", "encode", layer(ROWS, ROWS, GPT2)),
    ],
)
def test_models(name: str, function: str, expected: Counter) -> None:
    items = [item for item in model_work(name) if item.function == function]
    assert counted(items, function) == expected
    multiplied = sum(2 * b * m * n * k * times for (b, m, n, k), times in expected.items())
    assert sum((item.flops(SIZES) or 0) * item.count for item in items) == multiplied
    assert {item.dtype for item in items} == {"float32"}
    assert {item.storage for item in items if item.kind != "attention"} == {"float32"}


def test_bytes_of_a_projection() -> None:
    """Weights, rows in, residual and rows out, each once."""
    down, last = sorted(
        (
            item
            for item in model_work("llama")
            if item.function == "prefill" and [p.k for p in item.products] == [FFN]
        ),
        key=lambda item: -item.count,
    )
    assert (down.count, down.status, down.products[0].m) == (LAYERS - 1, "fused", "seq_len")
    assert (last.count, last.status, last.products[0].m) == (1, "fused", 1)
    elements = WIDTH * FFN + ROWS * FFN + 2 * ROWS * WIDTH
    assert down.bytes(SIZES) == 4 * elements
    assert down.bytes({}) is None and down.flops({}) is None


EXPERTS, TOKENS, TALL = 4, 8, 48
MIXTURE = f"""
    @T.prim_func(private=True, s_tir=True)
    def grouped(
        x: T.Buffer(({TOKENS}, {WIDTH}), "float16"),
        w: T.Buffer(({EXPERTS}, {TALL}, {WIDTH}), "float16"),
        which: T.Buffer(({TOKENS},), "int32"),
        y: T.Buffer(({TOKENS}, {TALL}), "float16"),
    ):
        for i, j, k in T.grid({TOKENS}, {TALL}, {WIDTH}):
            with T.sblock("y"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    y[vi, vj] = T.float16(0)
                y[vi, vj] = y[vi, vj] + x[vi, vk] * w[which[vi], vj, vk]
"""


@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_a_mixture_of_experts(target: str) -> None:
    """The gate scores experts; each token goes by one of their matrices, or by all in a batch."""
    rows = f'R.Tensor(({TOKENS}, {{}}), "float16")'
    chain = Chain(
        "main",
        f"x[{TOKENS},{WIDTH}] G[{WIDTH},{EXPERTS}] W[{EXPERTS},{TALL},{WIDTH}] "
        f"which[{TOKENS}]:int32 a[{EXPERTS},n,{WIDTH}] B[{EXPERTS},{WIDTH},{TALL}]",
        f"""s = R.matmul(x, G)
        y = R.call_tir(Module.grouped, (x, W, which), out_ty={rows.format(TALL)})
        z = R.matmul(a, B)
        u = R.call_dps_packed("other.gemm", (x, G), out_ty={rows.format(EXPERTS)})""",
        "s, y, z, u",
        dtype="float16",
    )
    items = {item.where: item for item in work(module([chain], MIXTURE), target)}
    sizes = {n: [(p.batch, p.m, p.n, p.k) for p in item.products] for n, item in items.items()}
    assert sizes == {
        "s": [(1, TOKENS, EXPERTS, WIDTH)],
        "y": [(TOKENS, 1, TALL, WIDTH)],
        "z": [(EXPERTS, "n", TALL, WIDTH)],
        "u": [],
    }
    assert items["y"].flops({}) == 2 * TOKENS * TALL * WIDTH
    expected = TOKENS * WIDTH + EXPERTS * TALL * WIDTH + TOKENS * TALL
    assert items["y"].bytes({}) == 2 * expected + 4 * TOKENS
    assert [items[n].status for n in "yzu"] == ["left", "left", "outside"]
    assert all(items[n].reason for n in "yzu")
    assert items["z"].flops({"n": 5}) == 2 * EXPERTS * 5 * TALL * WIDTH
    assert items["u"].flops({}) is None


def test_an_encoder_and_its_decoder() -> None:
    """Keys and values of the cross-attention are as long as what was encoded."""
    heads = f"4, {WIDTH // 4}"
    encode = Chain(
        "encode",
        f"x[1,s,{WIDTH}] W[{WIDTH},{WIDTH}]",
        f"""h = R.matmul(x, W); q = R.reshape(h, (1, s, {heads}))
        a = R.nn.attention(q, q, q); f = R.reshape(a, (1, s, {WIDTH})); o = R.matmul(f, W)""",
        "o",
    )
    decode = Chain(
        "decode",
        f"y[1,t,{WIDTH}] e[1,s,{WIDTH}] Wq[{WIDTH},{WIDTH}] Wk[{WIDTH},{WIDTH}] Wf[{WIDTH},{FFN}]",
        f"""h = R.matmul(y, Wq); q = R.reshape(h, (1, t, {heads}))
        g = R.matmul(e, Wk); k = R.reshape(g, (1, s, {heads}))
        a = R.nn.attention(q, k, k); f = R.reshape(a, (1, t, {WIDTH})); o = R.matmul(f, Wf)""",
        "o",
    )
    items = work(module([encode, decode]))
    found: dict[str, list] = {"encode": [], "decode": []}
    for item in items:
        found[item.function] += [(p.batch, p.m, p.n, p.k) for p in item.products] * item.count
    scores = (4, "t", "s", WIDTH // 4), (4, "t", WIDTH // 4, "s")
    assert sorted(found["decode"], key=str) == sorted(
        [(1, "t", WIDTH, WIDTH), (1, "s", WIDTH, WIDTH), *scores, (1, "t", FFN, WIDTH)], key=str
    )
    own = (4, "s", "s", WIDTH // 4), (4, "s", WIDTH // 4, "s")
    assert sorted(found["encode"], key=str) == sorted(
        [(1, "s", WIDTH, WIDTH), (1, "s", WIDTH, WIDTH), *own], key=str
    )


def test_a_module_without_work() -> None:
    assert work(module([Chain("main", "x[4,8]", "y = R.add(x, x)", "y")])) == []


def test_items_are_read_back_as_they_were_written() -> None:
    items = model_work("llama")
    works = {item.kernel: item.work for item in items if item.work is not None}
    assert works and [Item.from_record(item.to_record(), works) for item in items] == items
