"""Copies on a GPU: vectors wherever rows are made of them, and the same elements."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx

from relax_fusion import host_target, make_target
from relax_fusion.dlight_rules import CopyRule
from relax_fusion.mlc.repairs import RunThreadsInTurn
from relax_fusion.models.kv_cache import Heads, kv_append, kv_write

from ..support.generic_cases import Input, array, compiled, fused, run
from ..support.quick import loaded, quick_passes

op, H200 = relax.op, make_target("h200")
HALF = "float16"


def scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    found = CopyRule().attempt(func, H200)
    assert isinstance(found, s_tir.Schedule)
    return found.mod["main"]


def text_of(func: tirx.PrimFunc) -> str:
    """Return what the kernel does, in CUDA C++."""
    source = compiled(scheduled(func), H200).mod.imports[0].inspect_source()
    assert source.count("__global__") == 2  # declared, then defined
    return source[source.rindex("__global__") :]


def on_cpu(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the scheduled function with its threads one after the other, and its vectors."""
    return RunThreadsInTurn()(tvm.IRModule({"main": scheduled(func)}))["main"]


COPIES = {
    "rows": (Input((4, 64), HALF), lambda x: op.strided_slice(x, [0], [1], [3]), "uint4"),
    "columns": (Input(("s", 64)), lambda x: op.strided_slice(x, [1], [8], [24]), "float4"),
    "half": (Input((4, 64), HALF), lambda x: op.strided_slice(x, [1], [4], [20]), "half4"),
    "heads": (
        *(Input(("b", "s", 4, 16), "bfloat16"), lambda x: op.permute_dims(x, [0, 2, 1, 3])),
        "uint4",
    ),
    "repeated": (Input((3, 5, 2, 16), HALF), lambda x: op.repeat(x, 4, axis=2), "uint4"),
    "beside": (Input((2, 32), HALF), lambda x: op.concat([x, x], axis=0), "uint4"),
    "two steps": (
        *(Input((4, 2, 16)), lambda x: op.repeat(op.strided_slice(x, [0], [1], [3]), 2, axis=1)),
        "float4",
    ),
}
NUMPY = {
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, 8:24],
    "half": lambda x: x[:, 4:20],
    "heads": lambda x: x.transpose(0, 2, 1, 3),
    "repeated": lambda x: x.repeat(4, 2),
    "beside": lambda x: np.concatenate([x, x]),
    "two steps": lambda x: x[1:3].repeat(2, 1),
}


@pytest.mark.parametrize("name", COPIES)
def test_the_same_elements_as_vectors(name: str) -> None:
    x, emit, vector = COPIES[name]
    func = fused([x], emit)
    assert f"*({vector}*)" in text_of(func)
    arrays, got = run(on_cpu(func), host_target(), func)
    np.testing.assert_array_equal(got, NUMPY[name](arrays[0]))


LEFT = {
    "computed": ([(4, 64)], op.nn.relu),
    "places by a tensor": ([(8, 64), (4,)], lambda x, i: op.take(x, i, axis=0)),
    "an odd width": ([(4, 63)], lambda x: op.strided_slice(x, [0], [1], [3])),
    "the last axis moved": ([(8, 64)], op.permute_dims),
    "every other column": ([(8, 64)], lambda x: op.strided_slice(x, [1], [0], [64], [2])),
    "columns side by side": ([(8, 64)], lambda x: op.concat([x, x], axis=1)),
    "rows after others": ([("s", 64)], lambda x: op.concat([x, x], axis=0)),
    "one number": ([(1,)], lambda x: op.squeeze(x, [0])),
    "one number everywhere": ([()], lambda x: op.broadcast_to(x, (4, 64))),
    "an odd column": ([(8, 64)], lambda x: op.strided_slice(x, [1], [1], [33])),
}


@pytest.mark.parametrize("name", LEFT)
def test_leaves(name: str) -> None:
    shapes, emit = LEFT[name]
    inputs = [Input(s, "float32" if len(s) > 1 else "int32") for s in shapes]
    assert CopyRule().attempt(fused(inputs, emit), H200) is None


def test_leaves_a_cpu() -> None:
    func = fused([Input((4, 64))], lambda x: op.repeat(x, 2, 0))
    assert CopyRule().attempt(func, host_target()) is None


@pytest.mark.parametrize("merged", [True, False])
def test_the_append_to_a_cache(merged: bool) -> None:
    heads, rows, capacity, seen = Heads(4, 2, 16), 5, 9, 7
    func = kv_append(heads, capacity, HALF) if merged else kv_write(2, (16, 16), capacity, HALF)
    assert "*(uint4*)" in text_of(func) and "] = " not in text_of(func)
    with quick_passes():
        library = loaded(compiled(on_cpu(func), host_target()))
    shape = (2, rows, heads.query + 2 * heads.kv, heads.dim)
    qkv, keys, values = (array(s, HALF, n) for n, s in enumerate((shape, *[(2, 9, 2, 16)] * 2)))
    _, k, v = np.split(qkv, [4, 6], axis=2)
    keys_after, values_after = keys.copy(), values.copy()
    news = (qkv.reshape(2, rows, -1),) if merged else (k, v)
    given = [*map(tvm.runtime.tensor, (*news, keys, values)), seen]
    library["main"](*given)
    keys_after[:, seen - rows : seen], values_after[:, seen - rows : seen] = k, v
    first = len(news)
    np.testing.assert_array_equal(given[first].numpy(), keys_after)
    np.testing.assert_array_equal(given[first + 1].numpy(), values_after)
