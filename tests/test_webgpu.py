"""Kernels do without what WebGPU lacks."""

from __future__ import annotations

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import tirx as T

from relax_fusion.webgpu import FiniteConstants, FoldGridDepth


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


def test_the_third_grid_dimension_joins_the_second() -> None:
    tvm.ir.assert_structural_equal(FoldGridDepth()(Deep), Flat)
    assert FoldGridDepth()(Flat)["two"].same_as(Flat["two"])
