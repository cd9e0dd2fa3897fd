"""PrimFuncs that are written with sizes of int32: wider indices, the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion import FuseDequantize, host_target
from relax_fusion.grouping import FuseGroups
from relax_fusion.mend.wide_indices import WidenIndices

from ..support.chains import HEADER
from ..support.quantised_functions import called
from ..support.quick import loaded, machine, quickly

SOURCE = (Path(__file__).parents[1] / "data" / "passes" / "WidenIndices.txt").read_text()
NARROW = tvm.script.from_source(SOURCE.partition("# expected\n")[0])


def test_numbers() -> None:
    wide, narrow = (loaded(quickly(mod)) for mod in (WidenIndices()(NARROW), NARROW))
    rng = np.random.default_rng(5)
    words = rng.integers(-(2**31), 2**31, (24, 16), "int64").astype("int32")
    rows = rng.standard_normal((5, 8)).astype("float32")
    places = np.array([3, 0, 9, 2, 7, 1, 8, 4], "int32")
    cases = {
        "decode": (words, rng.standard_normal((24, 4)).astype("float16"), (24, 128), "float16"),
        "halves": (places, (8,), "int32"),
        "sums": (rows, places, (5,), "float32"),
    }
    for name, (*inputs, shape, dtype) in cases.items():
        found = []
        for module in (wide, narrow):
            out = tvm.runtime.tensor(np.full(shape, 77, dtype))
            module[name](*map(tvm.runtime.tensor, inputs), out)
            found.append(out.numpy())
        np.testing.assert_array_equal(*found)
        assert np.isfinite(found[0]).all() and found[0].any()


LOOP = 'for i in range(8):\n with T.sblock("a"):\n  v = T.axis.spatial(8, i)\n  '
PLAIN = LOOP + "y[v] = T.Cast('float16', x[v])"
BODIES = {
    "a let": LOOP + "c: T.let[T.int8] = x[v]\n  y[v] = T.Cast('float16', c)",
    "an evaluation": LOOP
    + "y[v] = T.Cast('float16', x[v])\nT.evaluate(T.call_extern('int32', 'f'))",
    "int64": LOOP + "y[v] = T.Cast('float16', T.Cast('int64', x[v]) + T.int64(1))",
    "a thread": PLAIN.replace("range(8)", "T.thread_binding(8, thread='threadIdx.x')"),
    "vectors": "y[T.Ramp(0, 1, 8)] = T.Cast('float16x8', x[T.Ramp(0, 1, 8)])",
}


def text(body: str) -> str:
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    types = "x: T.Buffer((8,), 'int8'), y: T.Buffer((8,), 'float16')"
    return f"    @T.prim_func(s_tir=True, private=True)\n    def f({types}):\n{lines}"


def followed_by(steps: str, body: str) -> tvm.IRModule:
    main = (
        "    @R.function\n"
        "    def main(q: R.Tensor((8,), 'int8'), x: R.Tensor((3, 8), 'float16')):\n"
        "        cls = Module\n        with R.dataflow():\n"
        "            a = R.call_tir(cls.f, (q,), out_ty=R.Tensor((8,), 'float16'))\n"
        f"            b = {steps}\n            R.output(b)\n        return b\n"
    )
    return tvm.script.from_source(HEADER + text(body) + main)


@pytest.mark.parametrize("name", BODIES)
def test_what_is_left_is_left_whole(name: str) -> None:
    mod = followed_by("R.nn.relu(a)", BODIES[name])
    assert WidenIndices()(mod).same_as(mod)
    annotated = relax.transform.AnnotateTIROpPattern()(relax.transform.LegalizeOps()(mod))
    grouped = FuseGroups(host_target())(annotated)
    relax.transform.FuseTIR()(grouped)  # raises where sizes of int32 are in a group


def test_a_weight_that_is_decoded_by_narrow_loops() -> None:
    mod = followed_by("R.matmul(x, a)", PLAIN)
    tvm.ir.assert_structural_equal(FuseDequantize()(mod), mod)
    (call,) = called(FuseDequantize()(WidenIndices()(mod))["main"])
    assert call.args[0].name_hint == "dequantize_matmul"
    pipeline = relax.get_pipeline("relax_fusion", target=host_target())
    vm = machine(quickly(mod, pipeline))
    q, x = np.arange(-4, 4, dtype="int8"), np.eye(3, 8, dtype="float16")
    got = vm["main"](*map(tvm.runtime.tensor, (q, x))).numpy()
    np.testing.assert_array_equal(got, q[:3].astype("float16"))


LOOKED_UP = {
    "take": (("b",), "R.take(y, i, axis=1)"),
    "take of rows": (("b",), "R.take(R.reshape(y, (n * 2, 8)), i, axis=0)"),
    "gather_nd": (("b", 2), 'R.gather_nd(y, R.astype(i, "int64"))'),
    "gather_elements": ((1, "b", 16), "R.gather_elements(y, i, axis=1)"),
}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", LOOKED_UP)
def test_positions_behind_a_reshape(name: str, dtype: str) -> None:
    """TVM's numbers, where the reshape is computed at the positions that a tensor holds."""
    shape, call = LOOKED_UP[name]
    source = f"""{HEADER}
    @R.function
    def main(x: R.Tensor(("n", 16), "float32"), i: R.Tensor({shape}, "{dtype}")):
        n, b = T.int64(), T.int64()
        with R.dataflow():
            y = R.reshape(x, (1, n, 16))
            z = {call}
            w = R.multiply(z, z)
            R.output(w)
        return w
"""
    mod = tvm.script.from_source(source)
    x = np.random.default_rng(3).standard_normal((5, 16)).astype("float32")
    sizes = tuple(3 if size == "b" else size for size in shape)
    places = np.arange(np.prod(sizes)).reshape(sizes) % (1 if name == "gather_nd" else 5)
    given = [tvm.runtime.tensor(a) for a in (x, places.astype(dtype))]
    target = host_target()
    pipelines = (
        relax.get_default_pipeline(target),
        relax.get_pipeline("relax_fusion", target=target),
    )
    found = [machine(quickly(mod, p))["main"](*given).numpy() for p in pipelines]
    np.testing.assert_array_equal(*found)
