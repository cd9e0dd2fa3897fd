"""Kernels that read operands where they were moved from: numbers, launches, and what stays."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import ir, relax, tirx

from relax_fusion import Report, relax_fusion_pipeline
from relax_fusion.equivalence.interpreter import evaluate
from relax_fusion.transforms import moved_formula
from relax_fusion.transforms.moved_formula import Formula, with_moved

from ..support.chains import Chain, module
from ..support.quick import machine, quick_host, quickly

READ = {
    "rows": (
        "x[40,12] w[12,16]",
        "a = R.strided_slice(x, axes=[0], begin=[5], end=[40])\n"
        "b = R.strided_slice(x, axes=[0], begin=[0], end=[5])\n"
        "t = R.concat((a, b), axis=0)",
    ),
    "runs": (
        "x[8,3,16,16] w[192,16]",
        "r = R.reshape(x, R.shape([8, 3, 2, 8, 2, 8]))\n"
        "p = R.permute_dims(r, axes=[0, 2, 4, 1, 3, 5]); t = R.reshape(p, R.shape([32, 192]))",
    ),
    "short runs": (
        "x[2,3,8,8] w[12,16]",
        "r = R.reshape(x, R.shape([2, 3, 4, 2, 4, 2]))\n"
        "p = R.permute_dims(r, axes=[0, 2, 4, 1, 3, 5]); t = R.reshape(p, R.shape([32, 12]))",
    ),
    "columns": ("x[24,40] w[24,16]", "t = R.permute_dims(x, axes=[1, 0])"),
    "zeros": ("x[15,12] w[16,16]", "t = R.nn.pad(x, (1, 0, 3, 1))"),
    "features": (
        "x[16,24] w[24,16]",
        "a = R.strided_slice(x, axes=[1], begin=[8], end=[24])\n"
        "b = R.strided_slice(x, axes=[1], begin=[0], end=[8])\n"
        "t = R.concat((a, b), axis=1)",
    ),
}
TAIL = "; m = R.matmul(t, w); y = R.nn.relu(m)"
ROWS, MOVED = READ["rows"]
ROLLED = (
    ROWS,
    "; ".join(
        f"c{n} = R.concat((R.strided_slice(c{n - 1}, axes=[0], begin=[{n}], end=[40]), "
        f"R.strided_slice(c{n - 1}, axes=[0], begin=[0], end=[{n}])), axis=0)"
        for n in range(1, 5)
    ).replace("c0", "x"),
)
KEPT = {
    "an element is one of 16": (ROLLED[0], f"{ROLLED[1]}; t = R.flip(c4, axis=1){TAIL}", "y"),
    "it is a result": (ROWS, MOVED + TAIL, "(y, t)"),
    "others read it": (ROWS, MOVED + TAIL + "; z = R.sum(R.exp(t), axis=[1])", "(y, z)"),
    "a size is symbolic": ("x[n,12] w[n,16]", "t = R.permute_dims(x, axes=[1, 0])" + TAIL, "y"),
}


FILL = """
    @T.prim_func(private=True, s_tir=True)
    def fill(a: T.Buffer((T.int64(40), T.int64(12)), "float32")):
        for i, j in T.grid(T.int64(40), T.int64(12)):
            with T.sblock("fill"):
                vi, vj = T.axis.remap("SS", [i, j])
                a[vi, vj] = T.float32(7)

"""
CALL = 'Module.fill, (h,), inplace_indices=[0], out_ty=[R.Tensor((40, 12), "float32")]'


def launched(mod: ir.IRModule, arrays: list[np.ndarray]) -> tuple[list[np.ndarray], list[str]]:
    """Return the results of a module, and which kernels a run launches."""
    report = Report()
    pipeline = relax_fusion_pipeline(quick_host(), report=report, always_fuse=True)
    made = machine(quickly(mod, pipeline))["main"](*map(tvm.runtime.tensor, arrays))
    results = [made] if hasattr(made, "numpy") else list(made)
    return [r.numpy() for r in results], list(report.launches[0].kernels)


@pytest.mark.parametrize("is_laid", [False, True])
@pytest.mark.parametrize("name", READ)
def test_a_kernel_reads_what_was_moved_where_it_was(name: str, is_laid: bool) -> None:
    """A kernel whose weight is a constant, laid out before, reads rows as vectors."""
    inputs, body = READ[name]
    tail = TAIL
    if is_laid:
        inputs = re.sub(r"w\[(\d+),16\]", r"w[256,\1]", inputs)
        tail = TAIL.replace("w)", "R.permute_dims(w))")
    chain = Chain("main", inputs, body + tail, "y")
    mod, arrays = module([chain]), chain.arrays()
    exact, given = evaluate(mod["main"], arrays)[0], arrays
    if is_laid:
        mod, given = relax.transform.BindParams("main", {"w": arrays[1]})(mod), arrays[:1]
    (found,), kernels = launched(mod, given)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    assert len(kernels) == 1 and "_moved" in kernels[0] and ("_laid" in kernels[0]) == is_laid


def test_a_choice_along_an_axis_of_size_1_is_made_before() -> None:
    """Loops over such an axis may be of int32, beside which a number of int64 is none."""
    body = "a = R.strided_slice(x, axes=[1], begin=[1], end=[4]); b = R.concat((a, a), axis=1)\n"
    body += "t = R.strided_slice(b, axes=[1], begin=[1], end=[2])" + TAIL
    chain = Chain("main", "x[1,5] w[1,8]", body, "y")
    x, w = chain.arrays()
    (found,), kernels = launched(module([chain]), [x, w])
    np.testing.assert_allclose(found, np.maximum(x[:, 2:3] @ w, 0), rtol=1e-5)
    assert len(kernels) == 1 and "_moved" in kernels[0]


@pytest.mark.parametrize("name", KEPT)
def test_a_moved_tensor_that_is_needed_stays(name: str) -> None:
    chain = Chain("main", *KEPT[name], sizes={"n": 5})
    mod, arrays = module([chain]), chain.arrays()
    found, kernels = launched(mod, arrays)
    for one, exact in zip(found, evaluate(mod["main"], arrays), strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-5, atol=1e-5)
    assert not any("_moved" in kernel for kernel in kernels)


def test_what_is_overwritten_meanwhile_was_moved_before() -> None:
    """The kernel needs what is read after the write, and so stands behind it."""
    body = f"h = R.exp(x); {MOVED.replace('(x', '(h')}; u = R.call_tir_inplace({CALL})\n"
    body += "v = R.strided_slice(u, axes=[0], begin=[0], end=[12])\n"
    body += "s = R.matmul(R.permute_dims(v), v); m = R.matmul(t, s); y = R.nn.relu(m)"
    chain = Chain("main", "x[40,12]", body, "y")
    mod = module([chain], FILL)
    x = chain.arrays()[0]
    (found,), _ = launched(mod, [x])
    exact = np.roll(np.exp(x), -5, 0) @ np.full((12, 12), 12 * 49.0)
    np.testing.assert_allclose(found, exact, rtol=1e-4)


BOTH = """
    @T.prim_func(private=True, s_tir=True)
    def both(a: T.Buffer((T.int64(8), T.int64(8)), "float32"),
             b: T.Buffer((T.int64(8), T.int64(8)), "float32")):
        for i, j in T.grid(T.int64(8), T.int64(8)):
            with T.sblock("mask"):
                vi, vj = T.axis.remap("SS", [i, j])
                a[vi, vj] = T.if_then_else(vi < T.int64(2), a[vi, vj], T.float32(9))
        for i, j in T.grid(T.int64(8), T.int64(8)):
            with T.sblock("turn"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = a[vj, vi]

"""


def test_a_function_that_writes_its_source_as_well_is_no_movement() -> None:
    tensors = ", ".join(['R.Tensor((8, 8), "float32")'] * 2)
    call = f"Module.both, (h, k), inplace_indices=[0, 1], out_ty=[{tensors}]"
    body = f"h = R.exp(x); k = R.exp(w); t = R.call_tir_inplace({call}); u = t[0]; v = t[1]\n"
    body += "m = R.matmul(v, w); y = R.nn.relu(m)"
    chain = Chain("main", "x[8,8] w[8,8]", body, "(y, u)")
    x, w = chain.arrays()
    (y, u), _ = launched(module([chain], BOTH), [x, w])
    exact = np.where(np.arange(8)[:, None] < 2, np.exp(x), 9)
    np.testing.assert_allclose(u, exact, rtol=1e-5)
    np.testing.assert_allclose(y, np.maximum(exact.T @ w, 0), rtol=1e-4, atol=1e-5)


def kernel(times: int) -> tirx.PrimFunc:
    """Return a function that reads each element of a transposed matrix a few times."""
    x, y = (tirx.decl_buffer([tirx.IntImm("int64", 4)] * 2, "float32", n) for n in "xy")
    i, j, n = (tirx.Var(name, "int64") for name in "ijn")
    body: tirx.Stmt = tirx.BufferStore(y, tirx.BufferLoad(x, [i, j]), [i, j])
    for var, extent in ((n, times), (j, 4), (i, 4)):
        size = tirx.IntImm("int64", extent)
        body = tirx.For(var, tirx.IntImm("int64", 0), size, tirx.ForKind.SERIAL, body)
    return tirx.PrimFunc([x, y], body)


@pytest.mark.parametrize(("times", "reads"), [(2, True), (3, False)])
def test_places_are_not_computed_again_and_again(times: int, reads: bool) -> None:
    i, j = tirx.Var("i", "int64"), tirx.Var("j", "int64")
    source = tirx.decl_buffer([tirx.IntImm("int64", 4)] * 2, "float32", "source")
    turned = Formula((i, j), (4, 4), tirx.BufferLoad(source, [j, i]), source)
    assert (with_moved(kernel(times), 0, turned) is not None) == reads
    rows = Formula((i, j), (4, 4), tirx.BufferLoad(source, [3 - i, j]), source)
    assert with_moved(kernel(times), 0, rows) is not None


def test_lanes_that_blocks_name_are_counted() -> None:
    """A vector of features of each row is read for as many columns as the kernel has."""
    kernel = tvm.script.from_source(
        """
@T.prim_func(private=True, s_tir=True)
def kernel(a: T.handle, b: T.handle):
    x = T.match_buffer(a, (T.int64(4), T.int64(4)))
    y = T.match_buffer(b, (T.int64(4), T.int64(4)))
    for i, j, n in T.grid(T.int64(4), T.int64(1), T.int64(3)):
        for k in T.vectorized(T.int64(4)):
            with T.sblock("y"):
                v_i = T.axis.spatial(T.int64(4), i)
                v_k = T.axis.spatial(T.int64(4), j * T.int64(4) + k)
                y[v_i, v_k] = x[v_i, v_k]
"""
    )
    assert moved_formula._reads(kernel.body, kernel.params[0]) == 48
