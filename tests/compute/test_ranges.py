"""Stitching schedules of one function into one that branches on a dynamic dimension."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import s_tir, tirx
from tvm.runtime import tensor
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from relax_fusion.compute.ranges import stitch
from relax_fusion.errors import LoweringError

from ..support.quick import quickly

WIDTH = 64
CUDA = {"kind": "cuda", "arch": "sm_90a", "max_threads_per_block": 1024, "thread_warp_size": 32}


def mirrored(columns: int = WIDTH, dtype: str = "float32") -> tirx.PrimFunc:
    """Return a function that mirrors the rows of a matrix, with as many rows as there are."""
    rows = tirx.Var("rows", "int64")
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        source = T.arg("source", T.buffer((rows, columns), dtype))
        out = T.arg("out", T.buffer((rows, columns), dtype))
        with T.grid(rows, tirx.const(columns, "int64")) as (i, j), T.sblock("mirror"):
            vi, vj = T.axis.remap("SS", [i, j])
            T.buffer_store(out, source[vi, columns - 1 - vj], [vi, vj])
    return builder.get()


def on_cpu(func: tirx.PrimFunc, lanes: int) -> tirx.PrimFunc:
    """Schedule for a CPU."""
    sch = s_tir.Schedule(func)
    row, column = sch.get_loops(sch.get_sblock("mirror"))
    sch.parallel(row)
    sch.vectorize(sch.split(column, [None, lanes])[1])
    return sch.mod["main"]


def on_gpu(func: tirx.PrimFunc, threads: int) -> tirx.PrimFunc:
    """Schedule for a GPU, through shared memory, so that barriers are needed."""
    sch = s_tir.Schedule(func)
    block = sch.get_sblock("mirror")
    staged = sch.cache_read(block, 0, "shared")
    row, column = sch.get_loops(block)
    sch.bind(row, "blockIdx.x")
    sch.compute_at(staged, row)
    for loop in (sch.get_loops(staged)[-1], column):
        sch.bind(sch.split(loop, [None, threads])[1], "threadIdx.x")
    return sch.mod["main"]


def row_count(func: tirx.PrimFunc) -> tirx.Var:
    """Return the variable of the number of rows."""
    return func.params[0].ty.shape[0]


def test_llvm_runs_every_range() -> None:
    func = mirrored()
    rows = row_count(func)
    joined = stitch(
        [(rows <= 4, on_cpu(func, 2)), (rows <= 16, on_cpu(func, 4)), (None, on_cpu(func, 8))]
    )
    assert all(f"T.vectorized(T.int64({n}))" in joined.script() for n in (2, 4, 8))
    library = quickly(joined)
    for rows in (1, 4, 5, 16, 17):
        source = np.random.default_rng(0).standard_normal((rows, WIDTH)).astype("float32")
        out = tensor(np.zeros_like(source))
        library["main"](tensor(source), out)
        np.testing.assert_array_equal(out.numpy(), source[:, ::-1])


def test_cuda_has_a_kernel_per_range() -> None:
    func = mirrored()
    rows = row_count(func)
    variants = [(rows <= 4, on_gpu(func, 16)), (rows <= 16, on_gpu(func, 32))]
    library = tvm.compile(
        stitch([*variants, (None, on_gpu(func, 64))]), target=Target(CUDA, host="llvm")
    )
    source = library.mod.imports[0].inspect_source()
    bounds = re.findall(r"__launch_bounds__\((\d+)\) \w+\([^)]*\) \{", source)
    assert sorted(bounds) == ["16", "32", "64"]
    assert source.count("__syncthreads()") >= 3


def test_functions_made_apart_are_joined_over_the_first_ones_variables() -> None:
    first, second = mirrored(), mirrored()
    joined = stitch([(row_count(first) <= 8, on_cpu(first, 4)), (None, on_cpu(second, 8))])
    assert joined.params[0].same_as(first.params[0])
    library = quickly(joined)
    source = np.arange(20 * WIDTH, dtype="float32").reshape(20, WIDTH)
    out = tensor(np.zeros_like(source))
    library["main"](tensor(source), out)
    np.testing.assert_array_equal(out.numpy(), source[:, ::-1])


def test_result_can_be_scheduled_on() -> None:
    func = mirrored()
    joined = stitch([(row_count(func) <= 4, on_cpu(func, 2)), (None, on_cpu(func, 8))])
    assert s_tir.Schedule(joined).mod["main"].attrs["tirx.noalias"]


def test_one_range_is_the_function_itself() -> None:
    func = mirrored()
    assert stitch([(None, func)]).same_as(func)


@pytest.mark.parametrize(
    ("other", "message"),
    [(mirrored(columns=32), "differ in shape"), (mirrored(dtype="float16"), "differ in type")],
    ids=["shape", "dtype"],
)
def test_other_signatures_are_refused(other: tirx.PrimFunc, message: str) -> None:
    func = mirrored()
    with pytest.raises(LoweringError, match=message):
        stitch([(row_count(func) <= 4, func), (None, other)])


@pytest.mark.parametrize("uppers", [[4, 8], [None, None], []], ids=str)
def test_bounds_must_end_open(uppers: list[int | None]) -> None:
    func = mirrored()
    with pytest.raises(LoweringError, match="must end in None"):
        stitch([(upper and row_count(func) <= upper, func) for upper in uppers])
