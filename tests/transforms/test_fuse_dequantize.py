"""Which readers of a decoded weight take the decoding along, and what other passes say."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import ir, relax

from relax_fusion import FuseDequantize, Reason

from ..support.chains import Chain, calls, module, run_pass
from ..support.quantised_functions import (
    Layer,
    add_function,
    called,
    compiled,
    lowered,
    run_by_pipeline,
)

op = relax.op


W = "w = R.astype(q, 'float16')\n"
FROM_A = "w = R.astype(a, 'float16')\n"
Y = "y = R.matmul(x, w)\n"


def chain(body: str, result: str = "y", inputs: str = "x[n,32] q[32,48]:int8") -> ir.IRModule:
    return module([Chain("main", inputs, body, result, dtype="float16")])


def fused(mod: ir.IRModule) -> relax.Function:
    out = FuseDequantize()(mod)
    tvm.ir.assert_structural_equal(FuseDequantize()(out), out, map_free_vars=True)
    relax.analysis.well_formed(out)  # raises
    return out["main"]


KERNELS = {
    "one reader": (W + Y, "y", ["matmul"]),
    "two readers": (W + Y + "z = R.matmul(y, R.permute_dims(w))", "z", ["matmul", "matmul"]),
    "a weight that is a result": (W + Y, "(y, w)", ["astype", "matmul"]),
    "an alias": ("a = q\n" + FROM_A + Y, "y", ["matmul"]),
    "a matched shape": (
        "a = R.match_cast(q, R.Tensor((32, 48), 'int8'))\n" + FROM_A + Y,
        "y",
        ["matmul"],
    ),
    "both operands": (
        "w = R.astype(q, 'float16')\nz = R.matmul(w, R.permute_dims(w))",
        "z",
        ["matmul"],
    ),
    "a sum of products by subscripts": (W + "z = R.einsum((x, w), 'ij,jk->ik')", "z", ["einsum"]),
    "the left operand": (
        W + "z = R.matmul(R.permute_dims(w), R.permute_dims(x))",
        "z",
        ["permute_dims", "permute_dims", "astype", "matmul"],
    ),
    "an activation": ("a = R.nn.relu(q)\n" + FROM_A + Y, "y", ["nn.relu", "astype", "matmul"]),
    "a matched activation": (
        "r = R.nn.relu(q)\na = R.match_cast(r, R.Tensor((32, 48), 'int8'))\n" + FROM_A + Y,
        "y",
        ["nn.relu", "astype", "matmul"],
    ),
    "an element-wise reader": (W + "z = R.add(w, w)", "z", ["astype", "add"]),
    "a tensor of computed sizes": (
        W + "e = R.strided_slice(x, [0], [n - 1], [n])\nz = R.matmul(e, w)",
        "z",
        ["astype", "matmul", "strided_slice"],
    ),
    "a slice of computed sizes": (
        W + "z = R.strided_slice(w, [0], [n - 1], [n])",
        "z",
        ["astype", "strided_slice"],
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_readers(name: str) -> None:
    body, result, wanted = KERNELS[name]
    func = fused(chain(body, result))
    kernels = [c.args[0].name_hint.removeprefix("dequantize_").rstrip("1") for c in called(func)]
    left = [c for c in calls(func) if c != "call_tir"]
    assert sorted([*kernels, *left]) == sorted(wanted)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("u = R.match_cast(x, R.Tensor(ndim=2, dtype='float16'))\n" + W + "y = R.matmul(u, w)", ""),
        ("s = (x, x); a = R.concat(s, axis=0)\n" + W + "y = R.matmul(a, w)", ""),
        ("s = (q, q); a = R.concat(s, axis=0)\n" + FROM_A + "y = R.matmul(x, w)", "x[n,64]"),
    ],
)
def test_tensors_of_unknown_shape_and_tuples(body: str, inputs: str) -> None:
    fused(chain(body, inputs=f"{inputs or 'x[n,32]'} q[32,48]:int8"))


@pytest.mark.parametrize(
    "steps",
    [
        ("match_cast(q, R.Tensor(ndim=2, dtype='int8'))", "astype(a, 'float16')"),
        ("astype(q, 'float16')", "match_cast(a, R.Tensor(ndim=2, dtype='float16'))"),
    ],
)
def test_what_is_decoded_at_an_unknown_shape_is_left(steps: tuple[str, str]) -> None:
    body = "a = R.{}\nb = R.{}\nc = R.multiply(b, R.const(2.0, 'float16'))\n"
    body += "w = R.match_cast(c, R.Tensor((32, 48), 'float16'))\n"
    mod = chain(body.format(*steps) + Y + "z = R.nn.silu(y)", "z")
    tvm.ir.assert_structural_equal(FuseDequantize()(mod), mod)
    _, decisions = run_pass(mod, "FuseMatmulEpilogue")
    assert [d.fused for d in decisions] == [True]


OVERWRITING = """
    @T.prim_func(s_tir=True, private=True)
    def zero(q: T.Buffer((T.int64(32), T.int64(48)), "int8")):
        for i, j in T.grid(T.int64(32), T.int64(48)):
            with T.sblock("zero"):
                vi, vj = T.axis.remap("SS", [i, j])
                q[vi, vj] = T.int8(0)
"""


def test_a_weight_that_is_overwritten_is_decoded_before() -> None:
    body = "w = R.astype(q, 'float16')\nnew = R.call_tir_inplace(Module.zero, (q,), "
    body += "inplace_indices=[0], out_ty=R.Tensor((32, 48), 'int8'))\n" + Y
    mod = module(
        [Chain("main", "x[n,32] q[32,48]:int8", body, "(y, new)", dtype="float16")], OVERWRITING
    )
    tvm.ir.assert_structural_equal(FuseDequantize()(mod), mod)


@pytest.mark.parametrize(
    "body",
    [
        "t = R.broadcast_to(R.const(3.0, 'float16'), (1, 48)); w = R.multiply(a, t)",
        "t = R.astype(q, 'bool'); w = R.where(t, R.const(1.0, 'float16'), R.const(2.0, 'float16'))",
        "w = R.multiply(R.const(2.0, 'float16'), a)",
    ],
)
def test_numbers_of_any_step(body: str) -> None:
    """TVM fuses no constants but those that it writes into formulas."""
    func = fused(chain("a = R.astype(q, 'float16')\n" + body + "\n" + Y, "y"))
    assert [c.args[0].name_hint for c in called(func)] == ["dequantize_matmul"]


def test_a_number_looked_up() -> None:
    func = fused(
        chain("w = R.astype(q, 'float16')\nz = R.take(w, R.const(5, 'int64'), axis=0)", "z")
    )
    assert [c.args[0].name_hint for c in called(func)] == ["dequantize_take"]


def test_broadcasting_decodes_nothing() -> None:
    mod = chain("w = R.broadcast_to(q, (32, 48))\n" + Y, inputs="x[n,32] q[1,48]")
    tvm.ir.assert_structural_equal(FuseDequantize()(mod), mod)


def test_functions_of_libraries_are_left() -> None:
    mod = chain(W + Y)
    mod.update_func(mod.get_global_var("main"), mod["main"].with_attr("Codegen", "other"))
    tvm.ir.assert_structural_equal(FuseDequantize()(mod), mod)


@pytest.mark.parametrize("device", ["llvm:0", "cuda:0"])
def test_tensors_on_virtual_devices(device: str) -> None:
    info = 'I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("cuda", 0)]})'
    text = f"""
@I.ir_module
class Module:
    {info}
    @R.function
    def main(x: R.Tensor((3, 32), "float16", "llvm:0"), q: R.Tensor((32, 48), "int8", "{device}")):
        with R.dataflow():
            w = R.astype(q, "float16")
            y = R.einsum((R.to_vdevice(x, "{device}"), w), "ij,jk->ik")
            R.output(y)
        return y
"""
    mod = tvm.script.from_source(text)
    out = FuseDequantize()(mod)
    (call,) = called(out["main"])
    assert call.ty.vdevice.target.kind.name == device.split(":")[0]
    assert len(out.global_infos["vdevice"]) == 2


def test_sizes_that_no_tensor_has_alone() -> None:
    body = "r = R.reshape(ids, (b * s,)); e = R.take(R.astype(q, 'float16'), r, axis=0)"
    mod = chain(body, "e", "ids[b,s]:int32 q[32,48]:int8")
    (call,) = called(fused(mod))
    assert len(call.args[1].fields) == 4  # both sizes
    ids = np.array([[3, 1], [0, 31], [8, 8]], "int32")
    q = np.arange(32 * 48).reshape(32, 48).astype("int8")
    got = compiled(mod, FuseDequantize())["main"](tvm.runtime.tensor(ids), tvm.runtime.tensor(q))
    np.testing.assert_array_equal(got.numpy(), q[ids.reshape(-1)])


@pytest.mark.parametrize(
    "begin, kernels", [("n - 1", ["dequantize_strided_slice", "add"]), ("1", 1), ("n * 0 + 2", 1)]
)
def test_slices(begin: str, kernels: list[str] | int) -> None:
    """Where FuseOps takes a slice, it takes what decodes the weight along."""
    body = f"e = R.strided_slice(w, [0], [{begin}], [n], assume_inbound=True)\nz = R.add(e, e)"
    mod = chain(W + body, "z", "x[n] q[32,48]:int8")
    names = [call.args[0].name_hint for call in called(lowered(mod, phases=3)["main"])]
    assert names == kernels or len(names) == kernels
    q = np.arange(32 * 48).reshape(32, 48).astype("int8")
    for n in (3, 7):
        args = map(tvm.runtime.tensor, (np.zeros(n, "float16"), q))
        got = run_by_pipeline(mod)["main"](*args).numpy()
        np.testing.assert_array_equal(got, 2.0 * q[eval(begin) : n])


@pytest.mark.parametrize("reader", ["R.matmul(x, R.permute_dims(w))", "R.take(w, ids, axis=0)"])
def test_readers_that_are_prim_funcs(reader: str) -> None:
    mod = chain(W + f"y = {reader}", inputs="x[n,48] q[32,48]:int8 ids[5]:int32")
    mod = relax.transform.LegalizeOps()(relax.transform.FuseTransposeMatmul()(mod))
    assert len(called(mod["main"])) == 2
    assert len(called(fused(mod))) == 1


def test_constants_stay_packed() -> None:
    packed = relax.const(np.ones((32, 48), "int8"))
    bb = relax.BlockBuilder()
    layer = Layer(bb, None)
    x = layer.param((4, 32), "float16")
    add_function(bb, "main", layer, lambda: [op.matmul(x, bb.emit(op.astype(packed, "float16")))])
    (call,) = called(lowered(bb.get())["main"])
    assert [str(arg.ty.dtype) for arg in call.args[1].fields] == ["float16", "int8"]


def test_steps_behind_are_part_of_the_kernel() -> None:
    body = W + Y + "z = R.nn.gelu(R.add(y, b))"
    mod = lowered(chain(body, "z", "x[n,32] q[32,48]:int8 b[48]"))
    assert calls(mod["main"]) == ["call_tir"]


def test_a_weight_of_one_tensor_is_packed_into_panels() -> None:
    body = "w = R.subtract(R.astype(q, 'float16'), R.const(3.0, 'float16'))\n"
    mod = chain(body + "y = R.matmul(x, R.permute_dims(w))", inputs="x[n,32] q[48,32]:int8")
    rng = np.random.default_rng(2)
    x, q = rng.integers(-2, 3, (40, 32)).astype("float16"), rng.integers(-9, 9, (48, 32), "int8")
    got = run_by_pipeline(mod)["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(q))
    np.testing.assert_array_equal(got.numpy(), x @ (q.astype("float16") - np.float16(3)).T)


def test_lookups_by_int32_among_rows_that_only_the_run_counts() -> None:
    body = "w = R.reshape(R.reshape(R.astype(q, 'float16'), (v, 4, 8)), (v, 32))\n"
    mod = chain(body + "e = R.take(w, ids, axis=0)", "e", "ids[3]:int32 q[v,32]:int8")
    ids, q = np.array([6, 0, 2], "int32"), np.arange(7 * 32).reshape(7, 32).astype("int8")
    got = run_by_pipeline(mod)["main"](tvm.runtime.tensor(ids), tvm.runtime.tensor(q))
    np.testing.assert_array_equal(got.numpy(), q[ids])


# --- what the other passes say -----------------------------------------------------------------

NORM = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
SQUARES = "c = R.astype(q, 'float16'); w = R.multiply(c, c)\n"  # no format of storage
DECLINED = {
    "FuseMatmulEpilogue": SQUARES + Y,
    "FuseRMSNormMatmul": NORM + SQUARES + "y = R.matmul(h, w)",
    "FuseGatedFFN": NORM + SQUARES + "m = R.matmul(h, w); p = R.split(m, 2, axis=-1)\n"
    "y = R.multiply(R.nn.silu(p[0]), p[1])",
}


def test_sums_of_sums_are_read_once() -> None:
    sums = "".join(f"w{i + 1} = R.add(w{i}, w{i})\n" for i in range(40))
    mod = chain(f"w0 = R.astype(q, 'float16')\n{sums}y = R.matmul(x, w40)")
    _, decisions = run_pass(mod, "FuseMatmulEpilogue")
    assert [d.decline.reason for d in decisions] == [Reason.MATERIALISED]


@pytest.mark.parametrize("name", DECLINED)
def test_decoded_weights_are_declined(name: str) -> None:
    mod = chain(DECLINED[name], inputs="x[n,32] g[32] q[32,48]:int8")
    out, decisions = run_pass(mod, name)
    tvm.ir.assert_structural_equal(out, mod)
    assert {d.decline.reason for d in decisions} == {Reason.MATERIALISED}
    said = "a weight of [32, 48] is decoded from 1.00 bytes an element to 2.00"
    assert all(said in d.decline.detail for d in decisions)


def test_a_chain_of_matmuls_takes_no_decoded_weight() -> None:
    body = W + "h = R.matmul(x, w); y = R.matmul(h, v)"
    mod = chain(body, inputs="x[2,64,32] q[2,32,16]:int8 v[2,16,32]")
    out, _ = run_pass(mod, "FuseChains", always_fuse=True)
    tvm.ir.assert_structural_equal(out, mod)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_a_weight_behind_more_steps_than_python_has_stack(dtype: str) -> None:
    steps = "".join(f"w{i + 1}=R.negative(w{i}); " for i in range(400))
    body = f"w0=R.astype(W, 'float32'); {steps}m=R.matmul(x, w400); y=R.nn.relu(m)"
    mod = module([Chain("main", f"x[4,16] W[16,16]:{dtype}", body, "y")])
    _, (decision,) = run_pass(mod, "FuseMatmulEpilogue")
    assert (decision.decline is None) == (dtype == "float32")
