"""Results in the memory of a residual: numbers, memory, and where a tensor is still needed."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import ir, relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_fusion import Report
from relax_fusion.options import make_options
from relax_fusion.pipeline import phase1_fuse, phase2_lower
from relax_fusion.transforms.add_in_place import AddInPlace, in_place

from ..support.quick import machine, quick_host, quickly

ROWS, WIDE = 6, 32


def module(steps: str, result: str) -> ir.IRModule:
    """Return a module of some steps: what is added is `h`, a sum of x and a product."""
    text = f"""
@R.function
def main(x: R.Tensor(({ROWS}, {WIDE}), "float32"), w: R.Tensor(({WIDE}, {WIDE}), "float32")):
    with R.dataflow():
        h = R.add(x, R.matmul(x, R.permute_dims(w)))
        {steps}
        R.output({result})
    return ({result})
"""
    return ir.IRModule({"main": tvm.script.from_source(text, {"R": R})})


ADDED = "g = R.nn.relu(R.matmul(h, R.permute_dims(w)))\n        "
ADDED += "y = R.add(h, R.matmul(g, R.permute_dims(w)))"
APART = ("FuseChains",)  # the three products would be one kernel


def in_place_calls(mod: ir.IRModule) -> int:
    """Return how many kernels store in an operand."""
    options = make_options(quick_host(), {"disable": APART})
    with quick_host():
        passes = [*phase1_fuse(options), *phase2_lower(options), AddInPlace(quick_host())]
        mod = tvm.transform.Sequential(passes)(mod)
    values = (b.value for block in mod["main"].body.blocks for b in block.bindings)
    inplace = ir.Op.get("relax.call_tir_inplace")
    return sum(isinstance(v, relax.Call) and v.op.same_as(inplace) for v in values)


def test_a_residual_is_the_result() -> None:
    mod, report = module(ADDED, "y"), Report()
    assert in_place_calls(module(ADDED + "\n        z = R.nn.gelu(y)", "z")) == 1
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), report=report, disable=APART)
    run = machine(quickly(mod, pipeline))["main"]
    (launches,) = report.launches
    assert launches.memory == 2 * 4 * ROWS * WIDE, "h, which becomes y, and g"
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype("float32") for s in ((ROWS, WIDE), (WIDE, WIDE)))
    h = x + x @ w.T
    wanted = h + np.maximum(h @ w.T, 0) @ w.T
    given = tvm.runtime.tensor(x)
    for _ in range(2):  # x is as it was
        np.testing.assert_allclose(
            run(given, tvm.runtime.tensor(w)).numpy(), wanted, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("steps", "result"),
    [
        (f"{ADDED}\n        z = R.multiply(y, h)", "z"),
        (ADDED, "h, y"),
        ("y = R.add(h, R.matmul(h, R.permute_dims(w)))\n        z = R.nn.gelu(y)", "z"),
        ("y = R.add(x, R.matmul(h, R.permute_dims(w)))\n        z = R.nn.gelu(y)", "z"),
    ],
    ids=["read_later", "returned", "read_by_the_product", "parameter"],
)
def test_what_is_needed_stays(steps: str, result: str) -> None:
    assert in_place_calls(module(steps, result)) == 0


@I.ir_module
class Kernels:
    @T.prim_func(private=True, s_tir=True)
    def same(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("y"):
                v = T.axis.spatial(8, i)
                y[v] = x[v] * x[v]

    @T.prim_func(private=True, s_tir=True)
    def neighbour(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("y"):
                v = T.axis.spatial(8, i)
                y[v] = x[v] + x[7 - v]

    @T.prim_func(private=True, s_tir=True)
    def started(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("y_start"):
                v = T.axis.spatial(8, i)
                y[v] = T.float32(0)
        for i in range(8):
            with T.sblock("y"):
                v = T.axis.spatial(8, i)
                y[v] = x[v] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def read_apart(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        z = T.sblock_alloc_buffer((8,), "float32")
        for i in range(8):
            with T.sblock("z"):
                v = T.axis.spatial(8, i)
                z[v] = x[7 - v]
        for i in range(8):
            with T.sblock("y"):
                v = T.axis.spatial(8, i)
                y[v] = x[v] + z[v]

    @T.prim_func(private=True, s_tir=True)
    def another_type(x: T.Buffer((8,), "int32"), y: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("y"):
                v = T.axis.spatial(8, i)
                y[v] = T.cast(x[v], "float32")

    @R.function
    def main(x: R.Tensor((8,), "float32")):
        cls = Kernels
        with R.dataflow():
            a = R.call_tir(cls.same, (x,), out_ty=R.Tensor((8,), "float32"))
            b = R.call_tir(cls.same, (a,), out_ty=R.Tensor((8,), "float32"))
            c = R.call_tir(cls.same, (b,), out_ty=R.Tensor((8,), "float32"))
            R.output(c)
        return c


@pytest.mark.parametrize("name", ["neighbour", "started", "read_apart", "another_type"])
def test_kernels_that_read_elsewhere(name: str) -> None:
    assert in_place(Kernels[name], 0) is None


def test_a_kernel_of_one_buffer() -> None:
    func = in_place(Kernels["same"], 0)
    assert func is not None and len(func.params) == 1
    x = tvm.runtime.tensor(np.arange(8, dtype="float32"))
    quickly(func.with_attr("global_symbol", "main"))["main"](x)
    np.testing.assert_array_equal(x.numpy(), np.arange(8, dtype="float32") ** 2)


def test_kernels_of_others_may_store_twice() -> None:
    tvm.ir.assert_structural_equal(AddInPlace(quick_host())(Kernels), Kernels)
