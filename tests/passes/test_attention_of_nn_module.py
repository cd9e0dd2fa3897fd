"""FuseAttentionChain on models of `relax.frontend.nn`, and on the paged cache, which it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import tvm
from tvm import relax, te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.relax.frontend.nn.llm import kv_cache

from relax_fusion import Attention, DynamicDim, host_target
from relax_fusion.options import make_options
from relax_fusion.pipeline import phase0_annotate, phase1_fuse
from relax_fusion.workload import Heads

from ..support.attention_chains import PASS, fused
from ..support.chains import calls, run_pass

BATCH, HEADS, DIM, LENGTH = 2, 4, 16, 6
BASE = Attention(
    batch=BATCH,
    q_len=DynamicDim("s"),
    kv_len=DynamicDim("n"),
    q_heads=HEADS,
    kv_heads=HEADS,
    head_dim=DIM,
    v_dim=DIM,
    scale=0.25,
    causal="none",
    bias_dims=None,
    dtype="float16",
    out_dtype="float16",
)


def by_head(x: Tensor) -> Tensor:
    return op.permute_dims(x, [0, 2, 1, 3])


def product(q: Tensor, k: Tensor) -> Tensor:
    scores = op.matmul(by_head(q), op.permute_dims(k, [0, 2, 3, 1]))
    return scores / math.sqrt(DIM)


def mixed(scores: Tensor, v: Tensor) -> Tensor:
    """Softmax in float32, as MLC-LLM writes it."""
    weights = op.softmax(scores.astype("float32"), axis=-1).astype(scores.dtype)
    out = by_head(op.matmul(weights, by_head(v)))
    return op.reshape(out, (BATCH, out.shape[1], HEADS * DIM))


def clamped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Clamp to the lowest number, and then to a mask of the lowest and the highest."""
    lowest = tirx.min_value(q.dtype).value
    scores = op.maximum(product(q, k), Tensor.from_scalar(lowest, q.dtype))
    return mixed(op.minimum(scores, mask), v)


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return mixed(product(q, k) + mask, v)


def made_here(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Make the mask as a tensor expression, whose values no pass can look into."""
    rows, columns = mask.shape[2:]

    def causal() -> te.Tensor:
        low, high = tirx.min_value("float16"), tirx.max_value("float16")
        return te.compute(
            (1, 1, rows, columns),
            lambda _b, _h, i, j: tirx.Select(j <= i + columns - rows, high, low),
            name="mask",
        )

    inner = nn.tensor_expr_op(causal, "mask", [])
    return mixed(op.minimum(product(q, k), inner), v)


def lower_triangle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Add the upper triangle of very low numbers, one beside the diagonal."""
    rows, columns = mask.shape[2:]
    hidden = op.triu(op.full((rows, columns), -65504.0, "float16"), 1)
    return mixed(product(q, k) + hidden, v)


def operator(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    out = op.scaled_dot_product_attention(q, k, v, is_causal=True)
    return op.reshape(out, (BATCH, out.shape[1], HEADS * DIM))


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Keep the first two heads of keys and values, and repeat each of them."""
    k, v = (op.repeat(op.split(x, 2, axis=2)[0], 2, axis=2) for x in (k, v))
    return mixed(op.minimum(product(q, k), mask), v)


MASK = (True, False, True, True)
FIRST_HALF = {"k_in": Heads(HEADS), "v_in": Heads(HEADS)}
CASES = [
    (clamped, replace(BASE, bias_dims=MASK, bias_op="min", bias_dtype="float16"), []),
    (added, replace(BASE, bias_dims=MASK, bias_dtype="float16"), []),
    (
        made_here,
        replace(BASE, bias_dims=(False, False, True, True), bias_op="min", bias_dtype="float16"),
        ["call_tir"],
    ),
    (lower_triangle, replace(BASE, causal="top_left"), []),
    (operator, replace(BASE, causal="top_left"), []),
    (
        grouped,
        replace(
            BASE, kv_heads=2, bias_dims=MASK, bias_op="min", bias_dtype="float16", **FIRST_HALF
        ),
        [],
    ),
]


def exported(function: Callable[..., Tensor]) -> tvm.IRModule:
    """Export a function of queries, keys, values and a mask."""

    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return function(q, k, v, mask)

    rows = {"q": "s", "k": "n", "v": "n"}
    spec = {x: nn.spec.Tensor([BATCH, n, HEADS, DIM], "float16") for x, n in rows.items()}
    spec["mask"] = nn.spec.Tensor([BATCH, 1, "s", "n"], "float16")
    mod, _ = Model().export_tvm({"forward": spec})
    return mod


@pytest.mark.parametrize(
    ("function", "work", "left"), CASES, ids=lambda c: getattr(c, "__name__", "")
)
def test_rewrites(function: Callable[..., Tensor], work: Attention, left: list[str]) -> None:
    out, (decision,) = fused(exported(function))
    assert decision.workload == work
    others = [c for c in calls(out["forward"]) if c != "reshape"]
    assert sorted(others) == sorted(["call_tir", *left])


# --- the paged cache ---------------------------------------------------------------------------


class Paged(nn.Module):
    """A layer whose attention is a call of the runtime, and the function that makes its cache."""

    def forward(self, qkv: Tensor, cache: kv_cache.PagedKVCache) -> tuple[Tensor, object]:
        return cache.attention_with_fused_qkv(0, qkv, HEADS, DIM**-0.5), cache

    def create(self, batch: tirx.Var, total: tirx.Var, chunk: tirx.Var, page: tirx.Var):
        return kv_cache.TIRPagedKVCache(
            attn_kind="mha",
            max_batch_size=batch,
            max_total_seq_len=total,
            prefill_chunk_size=chunk,
            page_size=page,
            support_sliding_window=0,
            layer_partition=relax.ShapeExpr([0, 1]),
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            qk_head_dim=DIM,
            v_head_dim=DIM,
            mla_original_qk_head_dim=0,
            mla_original_v_head_dim=0,
            rope_mode=kv_cache.RopeMode.NORMAL,
            rope_scale=1,
            rope_theta=10000,
            rope_scaling={},
            rope_ext_factors=relax.prim_value(0),
            rotary_dim=DIM,
            enable_disaggregation=False,
            dtype="float16",
            target=host_target(),
        )


@pytest.fixture(scope="module")
def paged() -> tvm.IRModule:
    qkv = nn.spec.Tensor([1, "s", HEADS + 4, DIM], "float16")
    objects = nn.spec.Object(object_type=kv_cache.PagedKVCache)
    spec = {
        "forward": {"qkv": qkv, "cache": objects, "$": {"effect_mode": "none"}},
        "create": {
            "batch": int,
            "total": int,
            "chunk": int,
            "page": int,
            "$": {"param_mode": "none", "effect_mode": "none"},
        },
    }
    mod, _ = Paged().export_tvm(spec)
    return mod


def packed(func: relax.Function) -> list[str]:
    """Return the names of the runtime's functions that are called."""
    bindings = [b.value for block in func.body.blocks for b in block.bindings]
    names = [
        v.args[0].global_symbol
        for v in bindings
        if isinstance(v, relax.Call) and isinstance(v.args[0], relax.ExternFunc)
    ]
    return [n.removeprefix("vm.builtin.") for n in names]


def test_the_paged_cache_is_left_alone(paged: tvm.IRModule) -> None:
    out, decisions = run_pass(paged, PASS)
    tvm.ir.assert_structural_equal(out, paged)
    assert decisions == []
    assert packed(out["forward"]) == ["attention_kv_cache_attention_with_fused_qkv"]


def test_the_pipeline_still_makes_the_paged_cache(paged: tvm.IRModule) -> None:
    target = host_target()
    options = make_options(target, {})
    kernels = {g.name_hint for g in paged.get_global_vars()} - {"forward", "create"}
    with target:
        out = tvm.transform.Sequential([*phase0_annotate(options), *phase1_fuse(options)])(paged)
    assert packed(out["create"]) == packed(paged["create"]) != []
    assert packed(out["forward"]) == packed(paged["forward"])
    left = {g.name_hint: f for g, f in out.functions_items() if isinstance(f, tirx.PrimFunc)}
    assert left.keys() >= kernels
    assert all("target" in left[name].attrs for name in kernels)
