"""Legalisation of attention whose scores underflow, and the transposes of matmuls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from tvm import relax, tirx

from relax_fusion import PATTERNS, make_target
from relax_fusion.mend.legalize import LEGALIZE_MAP
from relax_fusion.mend.transposed_matmul import FuseTransposeMatmul

from ..support.accuracy import assert_accurate, nudged
from ..support.chains import HEADER, Chain, calls, compiled, module, outputs, run_pass
from ..support.quick import machine, quickly


def attention_module(dtype: str, dim: int) -> tvm.IRModule:
    """Causal attention with symbolic lengths."""
    seq_len, context = tirx.Var("seq_len", "int64"), tirx.Var("context", "int64")
    q, k, v = (
        relax.Var(name, relax.TensorType((1, length, 2, dim), dtype))
        for name, length in (("q", seq_len), ("k", context), ("v", context))
    )
    bb = relax.BlockBuilder()
    with bb.function("main", [q, k, v]):
        with bb.dataflow():
            scale = tirx.FloatImm(dtype, dim**-0.5)
            call = relax.op.nn.attention(q, k, v, scale=scale, causal_mask="BottomRight")
            out = bb.emit_output(call)
        bb.emit_func_output(out)
    return relax.transform.LegalizeOps(LEGALIZE_MAP)(bb.get())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shift", [0.0, 48.0])
def test_attention_matches_torch(dtype, shift):
    dim = 16
    vm = machine(quickly(attention_module(dtype, dim)))
    rng = np.random.default_rng(0)
    for seq_len, context in ((1, 1), (5, 5), (1, 9), (3, 9)):
        q = rng.standard_normal((1, seq_len, 2, dim)).astype(dtype)
        k = rng.standard_normal((1, context, 2, dim)).astype(dtype)
        # Opposite shifts of one lane move every score by -576, far below underflow.
        q[..., 0] += shift
        k[..., 0] -= shift
        v = rng.standard_normal((1, context, 2, dim)).astype(dtype)
        got = vm["main"](*(tvm.runtime.tensor(x) for x in (q, k, v))).numpy()
        exact = torch_attention(q, k, v)
        moved = [
            torch_attention(*(nudged(x, "float32", 3 * i + j) for i, x in enumerate((q, k, v))))
            for j in range(3)
        ]
        assert_accurate(got.astype("float64"), exact, np.stack(moved), dtype, max(dim, context))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("number", [float("-inf"), float("nan"), 2.5])
def test_a_tensor_is_full_of_any_number(dtype: str, number: float) -> None:
    x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 3), dtype))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        like = bb.emit(relax.op.full_like(x, relax.const(number, "float32")))
        made = bb.emit(relax.op.full((2, 3), relax.const(number, dtype), dtype))
        bb.emit_func_output(relax.Tuple([like, made]))
    vm = machine(quickly(relax.transform.LegalizeOps(LEGALIZE_MAP)(bb.get())))
    for out, rows in zip(vm["main"](tvm.runtime.empty((4, 3), dtype)), (4, 2), strict=True):
        assert np.array_equal(out.numpy().astype("float32"), np.full((rows, 3), number), True)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("shape", [(3, 1, 8192), (4, 8209), (2, 9009)], ids=str)
def test_the_place_in_a_long_row(shape: tuple[int, ...], largest: bool) -> None:
    """It is searched in 512 parts, one (8209 is a prime) and 429; the first of equals is found."""
    find = relax.op.argmax if largest else relax.op.argmin
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(find(x, axis=-1, keepdims=True))
        bb.emit_func_output(out)
    mod = relax.transform.LegalizeOps(LEGALIZE_MAP)(bb.get())
    assert len(calls(mod["main"])) == (1 if shape[-1] == 8209 else 2)
    array = np.random.default_rng(0).standard_normal(shape, "float32").round(1)
    array.reshape(-1, shape[-1])[0, [7000, 5000]] = np.nan
    array.reshape(-1, shape[-1])[1] = -np.inf
    got = machine(quickly(mod))["main"](tvm.runtime.tensor(array)).numpy()
    expected = (np.argmax if largest else np.argmin)(array, axis=-1, keepdims=True)
    np.testing.assert_array_equal(got, expected)
    if largest and len(shape) == 3:  # TVM refuses some searches only as it makes CUDA of them
        target = make_target("h200")
        pipeline = relax.get_pipeline("relax_fusion", target=target)
        assert tvm.compile(bb.get(), target, relax_pipeline=pipeline).mod.imports


def torch_attention(*arrays: np.ndarray) -> np.ndarray:
    q, k, v = (torch.from_numpy(x).double().transpose(1, 2) for x in arrays)
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = visible.tril(k.shape[2] - q.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return out.transpose(1, 2).numpy()


HIDING = {
    "bias": "R.nn.attention_bias(q, k, v, m)",
    "bias_and_causal": 'R.nn.attention_bias(q, k, v, m, causal_mask="BottomRight")',
    "window": 'R.nn.attention(q, k, v, causal_mask="BottomRight", window_size=2)',
    "window_from_the_left": 'R.nn.attention(q, k, v, causal_mask="TopLeft", window_size=3)',
}


@pytest.fixture(scope="module")
def hiding() -> relax.VirtualMachine:
    mod = module(
        Chain(
            f"{name}_{keys}", f"q[1,4,2,8] k[1,{keys},2,8] v[1,{keys},2,8] m[1,1,4,{keys}]", *rest
        )
        for keys in (3, 6)
        for name, rest in ((n, (f"y = {call}", "y")) for n, call in HIDING.items())
    )
    return machine(quickly(relax.transform.LegalizeOps(LEGALIZE_MAP)(mod)))


@pytest.mark.parametrize("keys", [3, 6])
@pytest.mark.parametrize("name", HIDING)
def test_attention_reads_no_hidden_key(hiding, name: str, keys: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 8)).astype("float32") for n in (4, keys, keys))
    q[..., 0] += 48  # every score is far below zero, and its exponential underflows
    k[..., 0] -= 48
    bias = np.where(rng.random((4, keys)) < 0.4, -np.inf, 0).astype("float32")
    bias[1], bias[2] = -np.inf, 0
    i, j = np.arange(4)[:, None], np.arange(keys)[None]
    seen = {
        "bias": bias == 0,
        "bias_and_causal": (bias == 0) & (j <= i + keys - 4),
        "window": (j <= i + keys - 4) & (j > i + keys - 6),
        "window_from_the_left": (j <= i) & (j > i - 3),
    }[name]
    scores = np.einsum("bihd,bjhd->bhij", q.astype("float64"), k) / np.sqrt(8)
    scores = np.where(seen, scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e9))
    weights = powers / np.maximum(powers.sum(-1, keepdims=True), 1e-300)
    want = np.einsum("bhij,bjhd->bihd", weights, v)
    arrays = (q, k, v, bias[None, None])
    got = hiding[f"{name}_{keys}"](*map(tvm.runtime.tensor, arrays)).numpy()
    np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_layer_norm_matches_torch(dtype):
    chain = Chain(
        "main",
        "x[n,48] g[48] b[48]",
        "y = R.nn.layer_norm(x, g, b, axes=[-1])",
        "y",
        {"n": 5},
        dtype,
    )
    mod = relax.transform.LegalizeOps(LEGALIZE_MAP)(module([chain]))
    vm = machine(quickly(mod))
    got = vm["main"](*map(tvm.runtime.tensor, chain.arrays())).numpy().astype("float64")
    exact, moved = (
        torch.nn.functional.layer_norm(x, [48], g, b).numpy()
        for x, g, b in (
            (torch.from_numpy(nudge(a)) for a in chain.arrays())
            for nudge in (lambda a: a.astype("float64"), lambda a: nudged(a, "float32"))
        )
    )
    assert_accurate(got, exact, moved, dtype, 48)


# --- transposes ------------------------------------------------------------------------------

OVERWRITTEN = """
    @T.prim_func(s_tir=True, private=True)
    def zero(w: T.Buffer((T.int64(5), T.int64(8)), "float32")):
        for i, j in T.grid(T.int64(5), T.int64(8)):
            with T.sblock("zero"):
                vi, vj = T.axis.remap("SS", [i, j])
                w[vi, vj] = T.float32(0)

    @R.function
    def main(x: R.Tensor((3, 8), "float32"), y: R.Tensor((4, 8), "float32"),
             w: R.Tensor((5, 8), "float32")):
        cls = Module
        with R.dataflow():
            t = R.permute_dims(w)
            new = R.call_tir_inplace(cls.zero, (w,), out_ty=R.Tensor((5, 8), "float32"),
                                     inplace_indices=[0])
            a = R.matmul(x, t)
            b = R.matmul(y, t)
            R.output(a, b, new)
        return (a, b, new)
"""


def test_a_transpose_is_read_before_its_tensor_is_overwritten() -> None:
    rng = np.random.default_rng(0)
    x, y, w = (rng.standard_normal(s).astype("float32") for s in ((3, 8), (4, 8), (5, 8)))
    mod = tvm.script.from_source(HEADER + OVERWRITTEN)
    fused, _ = run_pass(mod, "FuseMatmulEpilogue")  # its kernels read w, not the transpose
    assert calls(fused["main"])[-2:] == ["call_tir", "call_tir_inplace"]
    for off in ((), tuple(PATTERNS)):
        a, b, new = outputs(compiled(mod, disable=off), "main", [x, y, w])
        np.testing.assert_allclose(a, x @ w.T, rtol=0, atol=1e-5)
        np.testing.assert_allclose(b, y @ w.T, rtol=0, atol=1e-5)
        assert not new.any()


def test_transpose_that_is_a_result_and_read_twice() -> None:
    body = "t = R.permute_dims(w); a = R.matmul(x, t); b = R.matmul(y, t)"
    mod = module([Chain("main", "x[3,8] y[4,8] w[5,8]", body, "(a, b, t)")])
    out = FuseTransposeMatmul()(mod)
    assert calls(out["main"]) == ["permute_dims", "call_tir", "call_tir"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("exponent", [2.0, 3.0, 7.0, 9.0, 0.5, -1.0])
def test_powers(dtype, exponent):
    """Whole powers of negative numbers are products: TVM's CUDA code gives NaN for float16."""
    base = relax.Var("x", relax.TensorType((2, 33), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [base]):
        power = builder.emit(relax.op.power(base, relax.const(exponent, dtype)))
        builder.emit_func_output(power)
    mod = relax.transform.LegalizeOps(dict(LEGALIZE_MAP))(builder.get())
    assert ("pow(" in mod.script()) == (exponent not in (2.0, 3.0, 7.0) or dtype == "float64")
    values = np.random.default_rng(0).uniform(0.5, 2, (2, 33))
    if exponent > 1:
        values = values * np.random.default_rng(1).choice([-1, 1], (2, 33))
    given = values.astype(dtype)
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(given)).numpy().astype("float64")
    expected = given.astype("float64") ** exponent
    rounding = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(found, expected, rtol=rounding)


def test_the_mean_of_integers_by_a_symbolic_number() -> None:
    x = relax.Var("x", relax.TensorType([tirx.Var("n", "int64"), 4], "int32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.op.mean(x, [0])))
    legal = relax.transform.LegalizeOps(LEGALIZE_MAP)(bb.get())
    assert str(legal["main"].ret_ty.dtype) == str(legal["main"].body.body.ty.dtype) == "int32"
    values = np.arange(20, dtype="int32").reshape(5, 4)
    (made,) = outputs(machine(quickly(legal)), "main", [values])
    np.testing.assert_array_equal(made, values.sum(0) // 5)
