"""No PrimFunc of an LLM server makes a rule raise: TVM's cache and sampling, MLC-LLM's softmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, te, tirx
from tvm.relax.backend.gpu_generic import cumsum, sampling
from tvm.relax.frontend.nn.llm import (
    _decode_kernels,
    _page_kernels,
    _prefill_kernels,
    position_embedding,
)
from tvm.script import tirx as T

from relax_fusion import host_target, make_target
from relax_fusion.dlight_rules import NormRule
from relax_fusion.options import make_options
from relax_fusion.pipeline import schedule_kernels

from ..fuzz.rules import RULES
from ..support.generic_cases import check, compiled, prim_funcs
from ..support.quick import loaded

HALF, GPU = "float16", make_target("h200")
Size = int | tirx.Expr

KERNELS: dict[str, Callable[[], object]] = {
    "paged append": lambda: _page_kernels._kv_cache_transpose_append(8, 128, HALF),
    "paged append, MLA": lambda: _page_kernels._kv_cache_transpose_append_mla(576, HALF),
    "cache read": lambda: _page_kernels._kv_cache_debug_get_kv(32, 8, 128, HALF),
    "copy of a page": lambda: _page_kernels._copy_single_page(8, 16, 128, HALF, GPU),
    "copy of a page, CPU": lambda: _page_kernels._copy_single_page_cpu(8, 16, 128, HALF),
    "compaction": lambda: _page_kernels._compact_kv_copy(8, 128, HALF, GPU),
    "compaction, CPU": lambda: _page_kernels._compact_kv_copy_cpu(8, 128, HALF),
    "paged decode": lambda: _decode_kernels._attention_decode(8, 32, 128, HALF, False, {}, GPU),
    "paged decode, CPU": lambda: _decode_kernels._attention_decode_cpu(
        8, 32, 128, HALF, False, {}
    ),
    "merge of states": lambda: _decode_kernels._merge_state_inplace(32, 128, HALF, GPU),
    "merge of states, CPU": lambda: _decode_kernels._merge_state_inplace_cpu(HALF),
    "paged prefill, CPU": lambda: _prefill_kernels._attention_prefill_cpu(
        8, 32, 128, HALF, False, {}
    ),
    "split of rotated heads": lambda: position_embedding.llama_rope_with_position_map(
        theta=10000.0, scale=1.0, head_dim=128, num_q_heads=32, num_kv_heads=8, dtype=HALF,
        rope_scaling={},
    ),
    "cumulative sum": lambda: cumsum.gpu_2d_continuous_cumsum(),
    "top-p sampling": lambda: sampling.gpu_multinomial_from_uniform(),
    "sample index": lambda: sampling.generic_get_sample_index(),
}  # fmt: skip


def functions(made: object) -> list[tirx.PrimFunc]:
    if isinstance(made, s_tir.Schedule):
        made = made.mod
    found = prim_funcs(made) if isinstance(made, tvm.IRModule) else [made]
    assert found
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_tvms_kernels(name: str) -> None:
    for func in functions(KERNELS[name]()):
        assert isinstance(func, tirx.PrimFunc)
        for target in (host_target(), GPU):
            for rule in RULES:
                rule.attempt(func, target)


def test_sorting_and_sampling_of_relax() -> None:
    x = relax.Var("x", relax.TensorType((tirx.Var("b", "int64"), 512), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        ordered = builder.emit(relax.op.sort(x, axis=-1, descending=True))
        best = builder.emit(relax.op.topk(x, k=5))
        total = builder.emit(relax.op.cumsum(ordered, axis=1))
        builder.emit_func_output(relax.Tuple([total, best]))
    for target in (host_target(), GPU):
        with target:
            mod = relax.backend.DispatchSortScan()(builder.get())
            mod = relax.transform.LegalizeOps()(mod)
        assert prim_funcs(mod)
        for func in prim_funcs(mod):
            for rule in RULES:
                rule.attempt(func, target)


def chunked(rows: Size, vocabulary: Size, chunks: Size, chunk: Size) -> tirx.PrimFunc:
    """Return the logarithm of the sum of exponentials of each chunk, as MLC-LLM samples with it."""
    x = te.placeholder((rows, vocabulary), "float32", "logits")
    warm = te.placeholder((rows,), "float32", "temperature")

    def logit(i: tirx.Expr, c: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        return tirx.if_then_else(
            c * chunk + j < vocabulary, x[i, c * chunk + j] / warm[i], tirx.min_value("float32")
        )

    a = te.compute((rows, chunks, chunk), logit, "padded")
    k = te.reduce_axis((0, chunk), "k")
    most = te.compute((rows, chunks), lambda i, c: te.max(a[i, c, k], axis=k), "most")
    k2 = te.reduce_axis((0, chunk), "k2")
    total = te.compute(
        (rows, chunks), lambda i, c: te.sum(te.exp(a[i, c, k2] - most[i, c]), axis=k2), "total"
    )
    out = te.compute((rows, chunks), lambda i, c: te.log(total[i, c]) + most[i, c], "lse")
    return te.create_prim_func([x, warm, out])


def test_softmax_in_chunks() -> None:
    func = chunked(3, 100, 4, 32)
    for rule in RULES:
        rule.attempt(func, GPU)
    schedule = NormRule().apply(func, host_target(), False)
    assert schedule is not None
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, 100), "float32"), rng.random(3, "float32") + 1]
    out = tvm.runtime.empty((3, 4), "float32")
    library = loaded(compiled(schedule.mod["main"], host_target()))
    library["main"](*map(tvm.runtime.tensor, arrays), out)

    def steps(x: np.ndarray, warm: np.ndarray) -> np.ndarray:
        padded = np.full((3, 128), np.finfo("float32").min, x.dtype)
        padded[:, :100] = x / warm[:, None]
        parts = padded.reshape(3, 4, 32)
        most = parts.max(-1, keepdims=True)
        return np.log(np.exp(parts - most).sum(-1)) + most[..., 0]

    check(out.numpy(), steps, arrays)


def test_softmax_in_chunks_of_a_symbolic_vocabulary() -> None:
    sizes = (tirx.Var(name, "int64") for name in ("rows", "vocabulary", "chunks"))
    schedule = NormRule().apply(chunked(*sizes, tirx.const(4096, "int64")), GPU, False)
    assert schedule is not None
    source = compiled(schedule.mod["main"], GPU).mod.imports[0].inspect_source()
    assert "float4" not in source  # its rows begin in the middle of vectors


@T.prim_func
def doubled(x: T.Buffer((16,), "float32")):
    for i in range(16):
        x[i] = x[i] * 2.0


@T.prim_func
def called(x: T.handle):
    T.evaluate(T.call_packed("function of a library", x))


@pytest.mark.parametrize("func", [doubled, called])
def test_functions_without_blocks(func: tirx.PrimFunc) -> None:
    for target in (host_target(), GPU, make_target("m1")):
        for rule in RULES:
            assert rule.attempt(func, target) is None


@T.prim_func(s_tir=True)
def of_experts(
    x: T.Buffer((1, 64), "float16"),
    w: T.Buffer((4, 128, 64), "int8"),
    expert: T.Buffer((2,), "int32"),
    out: T.Buffer((2, 128), "float16"),
):
    for b in T.thread_binding(2, "blockIdx.y"):
        with T.sblock("expert"):
            e = T.axis.spatial(2, b)
            decoded = T.sblock_alloc_buffer((128, 64), "float16")
            for i, k in T.grid(128, 64):
                with T.sblock("decoded"):
                    vi, vk = T.axis.remap("SS", [i, k])
                    decoded[vi, vk] = T.Cast("float16", w[expert[e], vi, vk])
            for i, k in T.grid(128, 64):
                with T.sblock("product"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    with T.init():
                        out[e, vi] = T.float16(0)
                    out[e, vi] += x[0, vk] * decoded[vi, vk]


def test_a_grid_without_threads_is_no_kernel() -> None:
    options = make_options(GPU, {})
    mod = tvm.IRModule({"main": of_experts.with_attr("global_symbol", "main")})
    scheduled = schedule_kernels(options)(mod)["main"]
    source = compiled(scheduled, GPU).mod.imports[0].inspect_source()
    assert "threadIdx.x" in source and "decoded" not in source
