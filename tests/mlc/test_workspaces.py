"""Buffers that PrimFuncs allocate in global memory become tensors of the plan."""

from __future__ import annotations

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_fusion.mlc.repairs import LiftWorkspaces

from ..support.quick import machine, quickly


@I.ir_module
class Before:
    @T.prim_func(s_tir=True, private=True)
    def twice(x: T.handle, y: T.handle):
        n = T.int64()
        a = T.match_buffer(x, (n, 4))
        b = T.match_buffer(y, (n, 4))
        space = T.sblock_alloc_buffer((n, 4))
        for i, j in T.grid(n, T.int64(4)):
            with T.sblock("first"):
                vi, vj = T.axis.remap("SS", [i, j])
                space[vi, vj] = a[vi, vj] + T.float32(1)
        for i, j in T.grid(n, T.int64(4)):
            with T.sblock("second"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = space[vi, vj] * T.float32(2)

    @R.function
    def main(x: R.Tensor(("m", 4), "float32")) -> R.Tensor(("m", 4), "float32"):
        m = T.int64()
        with R.dataflow():
            y = R.call_tir(Before.twice, (x,), out_ty=R.Tensor((m, 4), "float32"))
            z = R.call_tir(Before.twice, (y,), out_ty=R.Tensor((m, 4), "float32"))
            R.output(z)
        return z


@I.ir_module
class Expected:
    @T.prim_func(s_tir=True, private=True)
    def twice_with_workspace(x: T.handle, y: T.handle, w: T.handle):
        n = T.int64()
        a = T.match_buffer(x, (n, 4))
        b = T.match_buffer(y, (n, 4))
        space = T.match_buffer(w, (n, 4))
        for i, j in T.grid(n, T.int64(4)):
            with T.sblock("first"):
                vi, vj = T.axis.remap("SS", [i, j])
                space[vi, vj] = a[vi, vj] + T.float32(1)
        for i, j in T.grid(n, T.int64(4)):
            with T.sblock("second"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = space[vi, vj] * T.float32(2)

    @R.function
    def main(x: R.Tensor(("m", 4), "float32")) -> R.Tensor(("m", 4), "float32"):
        m = T.int64()
        with R.dataflow():
            t = R.call_tir(
                Expected.twice_with_workspace,
                (x,),
                out_ty=[R.Tensor((m, 4), "float32"), R.Tensor((m, 4), "float32")],
            )
            y = t[0]
            u = R.call_tir(
                Expected.twice_with_workspace,
                (y,),
                out_ty=[R.Tensor((m, 4), "float32"), R.Tensor((m, 4), "float32")],
            )
            z = u[0]
            R.output(z)
        return z


def test_workspaces_are_results() -> None:
    after = LiftWorkspaces()(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    x = np.arange(12, dtype="float32").reshape(3, 4)
    found = machine(quickly(after, "default"))["main"](tvm.runtime.tensor(x))
    assert (found.numpy() == ((x + 1) * 2 + 1) * 2).all()


def test_a_size_that_the_caller_does_not_know() -> None:
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True, private=True)
        def flat(x: T.handle, y: T.handle):
            n = T.int64()
            a = T.match_buffer(x, (n * 4,))
            b = T.match_buffer(y, (n * 4,))
            space = T.sblock_alloc_buffer((n,))
            for i in range(n):
                with T.sblock("first"):
                    vi = T.axis.spatial(n, i)
                    space[vi] = a[vi * T.int64(4)]
            for i in range(n * 4):
                with T.sblock("second"):
                    vi = T.axis.spatial(n * 4, i)
                    b[vi] = space[vi // T.int64(4)]

        @R.function
        def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
            cls = Module
            with R.dataflow():
                y = R.call_tir(cls.flat, (x,), out_ty=R.Tensor((8,), "float32"))
                R.output(y)
            return y

    tvm.ir.assert_structural_equal(LiftWorkspaces()(Module), Module)


def test_a_module_without_workspaces_stays_the_same() -> None:
    assert LiftWorkspaces()(Expected).same_as(Expected)
