"""Attention of a new token that writes its key and value into the caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from relax_fusion import PipelineOptions, models
from relax_fusion.compute.reference import build_prim_func
from relax_fusion.estimator.families.triton_attention.tiles import AttentionPlan, padded
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.hardware.target import make_target
from relax_fusion.matching.pattern import is_call
from relax_fusion.models.kv_cache import Heads, kv_append, kv_write
from relax_fusion.pipeline import PHASES
from relax_fusion.transforms.modules import APPEND_ATTR
from relax_fusion.triton_bridge.append import AppendInAttention
from relax_fusion.triton_bridge.attention import attention_cases
from relax_fusion.triton_bridge.attention_call import APPENDS_ATTR, Appended
from relax_fusion.workload import Attention, DynamicDim
from relax_fusion.workload.attention import Heads as HeadsIn
from relax_fusion.workload.attention import Lengths

from ..support.attention_cases import BASE
from ..support.interpreted import Interpreter
from ..support.launches import H200, Values, launch_of, parameters
from ..support.tiny_llama import TWO_LAYERS

HEADS, ROWS = Heads(4, 2, 16), 96
STEP = replace(
    BASE,
    batch=2,
    q_len=1,
    kv_len=DynamicDim("kv_len"),
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    v_dim=16,
    dtype="float16",
    out_dtype="float16",
    kv_prefix=True,
    lengths=Lengths("int32", False, 1),
    q_in=HeadsIn(8, 0, 1),
)
PLAN = AttentionPlan(16, 32, 16, num_stages=2, num_warps=4, family="attention", split_k=4)


def softmax_of(q: Any, caches: list[Any], count: int, work: Attention) -> Any:
    """Return attention to the first keys of caches ``[batch, rows, 2, width]``, in float64."""
    k, v = (np.repeat(cache[:, :count], 2, axis=2).astype("float64") for cache in caches)
    scores = work.scale * np.einsum("bhd,bthd->bht", q.astype("float64"), k)
    if work.softcap is not None:
        scores = work.softcap * np.tanh(scores / work.softcap)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bht,bthd->bhd", weights, v)[:, None]


def run(interpreter: Interpreter, work: Attention, plan: AttentionPlan, length: int) -> Any:
    """Return a step's result and caches, and what they should be."""
    rng, total = np.random.default_rng(0), ROWS - 10
    shape = (2, ROWS, 2, work.head_dim)
    qkv = rng.standard_normal((2, 1, 8 * work.head_dim)).astype("float16")
    k, v = (rng.standard_normal(shape).astype("float16") for _ in "kv")
    heads = qkv.reshape(2, 1, 8, work.head_dim)
    filled = [cache.copy() for cache in (k, v)]
    filled[0][:, length], filled[1][:, length] = heads[:, 0, 4:6], heads[:, 0, 6:8]
    given = {"q": heads, "k": k, "v": v, "lengths": np.array([length], "int32")}
    exact = softmax_of(heads[:, 0, :4], filled, length + 1, work)

    params = parameters(work)
    merged = relax.Var("qkv", relax.TensorType(list(qkv.shape), "float16"))
    appended = Appended(merged, merged, 4, 6)
    values = Values(params, [*given.values(), total])
    tensors = {**given, "qkv": qkv, "out": np.full(exact.shape, 77.0)}
    dtypes = {name: str(a.dtype) for name, a in tensors.items()} | {"out": "float16"}
    names = {name: name for name in tensors}
    cases = attention_cases(work, plan, params, None, H200, {}, appended)
    launches = [
        launch_of(step, values, tensors, dtypes, names, ["out"]) for step in values.chosen(cases)
    ]
    floats = {name: a.astype("float64") for name, a in tensors.items()}
    made = interpreter(floats, dtypes, launches)
    return made, {"out": exact, "k": filled[0], "v": filled[1]}


@pytest.mark.parametrize("length", [0, 31, 32, 85])
@pytest.mark.parametrize("parts", [1, 4])
def test_the_last_key_is_read_where_it_is_appended_from(
    interpreter: Interpreter, parts: int, length: int
) -> None:
    made, exact = run(interpreter, STEP, replace(PLAN, split_k=parts), length)
    np.testing.assert_allclose(made["out"], exact["out"], atol=2e-3)
    for name in "kv":
        np.testing.assert_array_equal(made[name], exact[name])


@pytest.mark.parametrize("width", [40, 64])
def test_features_that_are_no_power_of_two(interpreter: Interpreter, width: int) -> None:
    work = replace(STEP, head_dim=width, v_dim=width, softcap=20.0)
    made, exact = run(interpreter, work, replace(PLAN, block_k=padded(width)), 50)
    np.testing.assert_allclose(made["out"], exact["out"], atol=2e-3)
    for name in "kv":
        np.testing.assert_array_equal(made[name], exact[name])


Edit = Callable[[relax.BlockBuilder, dict[str, Any]], Any]


def module(
    work: Attention = STEP,
    *,
    separate: bool = False,
    between: Edit | None = None,
    twice: bool = False,
    rows: int = 1,
    functions: Sequence[str] = ("main",),
) -> ir.IRModule:
    """Return functions that append `rows`, and attend to what is in the caches then."""
    builder = relax.BlockBuilder()
    for name in functions:
        add(builder, name, work, separate, between, twice, rows)
    return builder.get()


def add(
    builder: relax.BlockBuilder,
    name: str,
    work: Attention,
    separate: bool,
    between: Edit | None,
    twice: bool,
    rows: int,
) -> None:
    """Add a function."""
    n = tirx.Var("n", "int64")
    b: Any = work.batch if isinstance(work.batch, int) else tirx.Var("b", "int64")
    shapes = {"qkv": (b, rows, 128), "k": (b, ROWS, 2, 16), "v": (b, ROWS, 2, 16), "length": (1,)}
    given: dict[str, Any] = {
        name: relax.Var(name, relax.TensorType(shape, "int32" if name == "length" else "float16"))
        for name, shape in shapes.items()
    }
    with builder.function(name, [*given.values(), relax.Var("n", relax.ShapeType([n]))]):
        with builder.dataflow():
            heads = builder.emit(relax.op.reshape(given["qkv"], (b, rows, 8, 16)))
            if rows > 1:
                heads = builder.emit(relax.op.strided_slice(heads, [1], [0], [1]))
            new, func = [given["qkv"]], kv_append(HEADS, ROWS, "float16", True)
            if separate:
                split = builder.emit(relax.op.split(heads, [4, 6], axis=2))
                new = [builder.emit(relax.TupleGetItem(split, i)) for i in (1, 2)]
                func = kv_write(2, (16, 16), ROWS, "float16", True)
            args = [*new, given["k"], given["v"], given["length"]]
            types = [given[name].ty for name in "kv"]
            append = builder.add_func(func, "append")
            places = [len(new), len(new) + 1]
            call = relax.op.call_tir_inplace(append, relax.Tuple(args), places, types)
            written = builder.emit(call)
            keys, values = (builder.emit(relax.TupleGetItem(written, i)) for i in (0, 1))
            results = (
                [] if between is None else [builder.emit(between(builder, given | {"keys": keys}))]
            )
            prim = build_prim_func(work, PlanTable.single(PLAN)).without_attr("global_symbol")
            gvar = builder.add_func(prim, "attention")
            out = relax.TensorType((b, 1, 4, 16), "float16")
            for caches in [(keys, values), *([(given["k"], given["v"])] if twice else [])]:
                operands = relax.Tuple([heads, *caches, given["length"], n])
                results.append(builder.emit(relax.op.call_tir(gvar, operands, out)))
            result = builder.emit_output(relax.Tuple([*results, keys, values]))
        builder.emit_func_output(result)


def in_place(mod: ir.IRModule, name: str = "main") -> list[relax.Call]:
    """Return the calls of a function that change their arguments, in order."""
    calls = [b.value for block in mod[name].body.blocks for b in block.bindings]
    return [c for c in calls if is_call(c, "relax.call_tir_inplace")]


@pytest.mark.parametrize("separate", [False, True])
def test_an_append_becomes_a_part_of_the_attention(separate: bool) -> None:
    mod = AppendInAttention()(module(separate=separate))
    relax.analysis.well_formed(mod)
    assert [g.name_hint for g in mod.get_global_vars()] == ["attention", "main"]
    (call,) = in_place(mod)
    assert call.args[0].name_hint == "attention"
    assert [a.name for a in call.args[1].fields[1:3]] == ["k", "v"]
    assert list(call.attrs.inplace_indices) == [-1, 1, 2]


def test_functions_with_batches_of_their_own_share_an_attention() -> None:
    work = replace(STEP, batch=DynamicDim("batch"))
    mod = AppendInAttention()(module(work, functions=("main", "other")))
    assert [g.name_hint for g in mod.get_global_vars()] == ["attention", "main", "other"]


def overwritten(of: dict[str, Any]) -> relax.Call:
    """Return a call that changes what is appended."""
    return relax.op.call_inplace_packed(
        "overwrite", of["qkv"], inplace_indices=[0], ty_args=[of["qkv"].ty]
    )


DECLINED = {
    "the keys are read in between": {"between": lambda _, of: relax.op.add(of["keys"], of["keys"])},
    "something is changed in between": {"between": lambda _, of: overwritten(of)},
    "another call appends nothing": {"twice": True},
    "the last key is not the new one": {"work": replace(STEP, lengths=Lengths("int32", False, 0))},
    "more rows are appended than the queried one": {"rows": 3},
    "heads are in front of positions": {"work": replace(STEP, kv_layout="bnsh")},
    "there are several queries": {"work": replace(STEP, q_len=DynamicDim("q_len"))},
}


@pytest.mark.parametrize("why", DECLINED)
def test_it_stays_a_kernel_of_its_own_where(why: str) -> None:
    mod = module(**DECLINED[why])
    assert tvm_ffi.structural_equal(AppendInAttention()(mod), mod)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_token_of_a_model_launches_no_append(kv_heads: int) -> None:
    config = replace(TWO_LAYERS, num_kv_heads=kv_heads)
    exported = models.export(config, dtype="float16", max_seq_len=40, batch=1)
    options, mod = PipelineOptions(make_target("h200")), exported.mod
    with options.target:
        for _, phase, _ in PHASES[:4]:
            mod = tvm.transform.Sequential(phase(options))(mod)
        mod = AppendInAttention()(mod)

    def count(name: str, attr: str) -> int:
        return sum(attr in (mod[call.args[0]].attrs or {}) for call in in_place(mod, name))

    assert (count("decode", APPEND_ATTR), count("decode", APPENDS_ATTR)) == (0, 2)
    assert (count("prefill", APPEND_ATTR), count("prefill", APPENDS_ATTR)) == (2, 0)
