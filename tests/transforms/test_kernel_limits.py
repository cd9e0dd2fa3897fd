"""Kernels do without what some targets lack."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import ir, te, tirx

from relax_fusion.transforms.kernel_limits import (
    FiniteConstants,
    FoldGridDepth,
    NarrowVectors,
    RoundConstants,
)

Before = tvm.script.from_source("""
@I.ir_module
class Before:
    @T.prim_func(s_tir=True)
    def half(x: T.Buffer((4,), "float16")):
        for i in range(4):
            with T.sblock("x"):
                v = T.axis.spatial(4, i)
                x[v] = T.Select(v < 2, T.float16("inf"), T.float16(1.5))

    @T.prim_func(s_tir=True)
    def single(x: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("x"):
                v = T.axis.spatial(4, i)
                x[v] = T.max(x[v], T.float32("-inf"))

    @T.prim_func(s_tir=True)
    def without(x: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("x"):
                v = T.axis.spatial(4, i)
                x[v] = x[v] + T.float32(1e30)
""")


def test_infinities_become_the_largest_numbers() -> None:
    after = FiniteConstants()(Before)
    text = after.script()
    assert "inf" in Before.script() and "inf" not in text
    assert "T.float16(65504.0)" in text
    assert f"T.float32({float(np.finfo('float32').min):.1f})" in text


def test_a_function_without_stays_the_same_object() -> None:
    after = FiniteConstants()(Before)
    assert after["without"].same_as(Before["without"])
    assert "inf" in Before["half"].script(), "the module that went in is unchanged"
    tvm.ir.assert_structural_equal(FiniteConstants()(after), after)


Deep = tvm.script.from_source("""
@I.ir_module
class Deep:
    @T.prim_func(s_tir=True)
    def three(x: T.Buffer((3, 4, 5, 8), "float32")):
        for b in T.thread_binding(3, thread="blockIdx.z"):
            for y in T.thread_binding(4, thread="blockIdx.y"):
                for g in T.thread_binding(5, thread="blockIdx.x"):
                    for t in T.thread_binding(8, thread="threadIdx.x"):
                        with T.sblock("x"):
                            vb, vy, vg, vt = T.axis.remap("SSSS", [b, y, g, t])
                            x[vb, vy, vg, vt] = T.float32(1)

    @T.prim_func(s_tir=True)
    def two(x: T.Buffer((3, 8), "float32")):
        for b in T.thread_binding(3, thread="blockIdx.z"):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("x"):
                    vb, vt = T.axis.remap("SS", [b, t])
                    x[vb, vt] = T.float32(1)
""")


Flat = tvm.script.from_source("""
@I.ir_module
class Flat:
    @T.prim_func(s_tir=True)
    def three(x: T.Buffer((3, 4, 5, 8), "float32")):
        for f in T.thread_binding(12, thread="blockIdx.y"):
            for g in T.thread_binding(5, thread="blockIdx.x"):
                for t in T.thread_binding(8, thread="threadIdx.x"):
                    with T.sblock("x"):
                        vb = T.axis.spatial(3, f // 4)
                        vy = T.axis.spatial(4, f % 4)
                        vg, vt = T.axis.remap("SS", [g, t])
                        x[vb, vy, vg, vt] = T.float32(1)

    @T.prim_func(s_tir=True)
    def two(x: T.Buffer((3, 8), "float32")):
        for b in T.thread_binding(3, thread="blockIdx.y"):
            for t in T.thread_binding(8, thread="threadIdx.x"):
                with T.sblock("x"):
                    vb, vt = T.axis.remap("SS", [b, t])
                    x[vb, vt] = T.float32(1)
""")


def test_constants_are_those_of_float32() -> None:
    """``1e-50f`` is an error in CUDA C++."""

    def filled(value: float, dtype: str) -> ir.IRModule:
        func = te.create_prim_func([te.compute((4,), lambda _: tirx.const(value, dtype), "filled")])
        return ir.IRModule({"main": func})

    for value, dtype, rounded in (
        *((1e-50, "float32", 0.0), (1e-50, "float16", 0.0), (1e-50, "float64", 1e-50)),
        *((0.1, "float32", float(np.float32(0.1))), (0.5, "float32", 0.5)),
        (float("-inf"), "float32", float("-inf")),
    ):
        after = RoundConstants()(filled(value, dtype))
        tvm.ir.assert_structural_equal(after, filled(rounded, dtype))


def test_the_third_grid_dimension_joins_the_second() -> None:
    tvm.ir.assert_structural_equal(FoldGridDepth()(Deep), Flat)
    assert FoldGridDepth()(Flat)["two"].same_as(Flat["two"])


Wide = tvm.script.from_source("""
@I.ir_module
class Wide:
    @T.prim_func(s_tir=True)
    def eight(x: T.Buffer((8,), "float16")):
        for i in T.vectorized(8):
            with T.sblock("x"):
                v = T.axis.spatial(8, i)
                x[v] = T.float16(1)

    @T.prim_func(s_tir=True)
    def six(x: T.Buffer((6,), "float16")):
        for i in T.vectorized(6):
            with T.sblock("x"):
                v = T.axis.spatial(6, i)
                x[v] = T.float16(1)

    @T.prim_func(s_tir=True)
    def five(x: T.Buffer((5,), "float16")):
        for i in T.vectorized(5):
            with T.sblock("x"):
                v = T.axis.spatial(5, i)
                x[v] = T.float16(1)

    @T.prim_func(s_tir=True)
    def four(x: T.Buffer((4,), "float16")):
        for i in T.vectorized(4):
            with T.sblock("x"):
                v = T.axis.spatial(4, i)
                x[v] = T.float16(1)
""")


Narrow = tvm.script.from_source("""
@I.ir_module
class Narrow:
    @T.prim_func(s_tir=True)
    def eight(x: T.Buffer((8,), "float16")):
        for o in T.unroll(2):
            for i in T.vectorized(4):
                with T.sblock("x"):
                    v = T.axis.spatial(8, o * 4 + i)
                    x[v] = T.float16(1)

    @T.prim_func(s_tir=True)
    def six(x: T.Buffer((6,), "float16")):
        for o in T.unroll(2):
            for i in T.vectorized(3):
                with T.sblock("x"):
                    v = T.axis.spatial(6, o * 3 + i)
                    x[v] = T.float16(1)

    @T.prim_func(s_tir=True)
    def five(x: T.Buffer((5,), "float16")):
        for o in T.unroll(5):
            with T.sblock("x"):
                v = T.axis.spatial(5, o)
                x[v] = T.float16(1)

    @T.prim_func(s_tir=True)
    def four(x: T.Buffer((4,), "float16")):
        for i in T.vectorized(4):
            with T.sblock("x"):
                v = T.axis.spatial(4, i)
                x[v] = T.float16(1)
""")


def test_vectors_are_cut_into_parts_that_the_target_can_name() -> None:
    after = NarrowVectors(4)(Wide)
    tvm.ir.assert_structural_equal(tvm.tirx.transform.StmtSimplify()(after), Narrow)
    assert after["four"].same_as(Wide["four"])
