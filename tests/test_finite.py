"""Infinite constants become finite where a target cannot write them."""

from __future__ import annotations

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import tirx as T

from relax_fusion.finite import FiniteConstants


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
    assert f"T.float32({float(np.finfo('float32').min)!r})" in text


def test_a_function_without_stays_the_same_object() -> None:
    after = FiniteConstants()(Before)
    assert after["without"].same_as(Before["without"])
    assert "inf" in Before["half"].script(), "the module that went in is unchanged"
    tvm.ir.assert_structural_equal(FiniteConstants()(after), after)
