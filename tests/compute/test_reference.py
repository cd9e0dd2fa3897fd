"""Reference bodies: what a fused function computes until its kernels are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import IRModule
from tvm.runtime import empty, tensor

from relax_fusion.compute import build_prim_func, description, reference_prim_func
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import make_target
from relax_fusion.mend.narrow_floats import RoundNarrowFloats
from relax_fusion.workload import Dim, DynamicDim, Graph, Packed, Workload
from relax_fusion.workload.builder import GraphBuilder
from relax_fusion.workload.reference import evaluate, numpy_dtype
from relax_fusion.workload.values import Axis

from ..support import small_workloads
from ..support.quick import loaded, quickly
from ..support.workloads import inputs, results

STEP = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2, "int32": 0.0}
"""What an element may differ by, of the largest: intermediates are stored in their dtypes."""


def found() -> dict[str, Workload]:
    """Return every workload of the numerics page."""
    named: dict[str, Any] = {}
    for name, value in vars(small_workloads).items():
        several = value if isinstance(value, dict) and name.isupper() else {"": value}
        named |= {f"{name}{key}": work for key, work in several.items()}
    return {name: work for name, work in named.items() if isinstance(work, Workload)}


WORKS = found()


def computed(graph: Graph, given: dict[str, Any], made: list[Any]) -> list[np.ndarray]:
    """Return the results of the reference body on this machine."""
    mod = IRModule({"main": reference_prim_func(graph).with_attr("global_symbol", "main")})
    func = loaded(quickly(RoundNarrowFloats(make_target("llvm"))(mod)["main"]))["main"]
    outs = [_device(np.full(shape, 77, numpy_dtype(dtype))) for shape, dtype in made]
    args = [given[o.name] if o.shape is None else _device(given[o.name]) for o in graph.inputs]
    func(*args, *outs)
    return [out.numpy().astype("float64") for out in outs]


def _device(array: np.ndarray) -> Any:
    if array.dtype.kind != "V":
        return tensor(array)
    return empty(array.shape, str(array.dtype)).copyfrom(array)


@pytest.mark.parametrize("name", WORKS)
def test_numbers_are_those_of_the_graph(name: str) -> None:
    graph = WORKS[name].graph
    known = {"rows": 5, "batch": 2, "q_len": 3, "kv_len": 9, "kv_capacity": 11}
    sizes = {dim: known[dim] for dim in graph.dims}
    given: dict[str, Any] = inputs(WORKS[name], sizes)
    told = {s.name: s.dim for s in graph.slots if s.role == "scalar" and s.dim is not None}
    for slot, dim in told.items():
        given[slot] = sizes[dim.name] if isinstance(dim, DynamicDim) else dim
    want = evaluate(graph, given)
    got = computed(graph, given, results(WORKS[name], sizes))
    half = "x" in given and given["x"].dtype.itemsize == 2
    for operand, array in zip(graph.outputs, got, strict=True):
        exact = want[operand.name]
        step = max(STEP[operand.dtype], STEP["float16"] if half and operand.dtype[0] == "f" else 0)
        assert np.abs(array - exact).max() <= step * max(1, np.abs(exact).max()), operand.name


@pytest.mark.parametrize("keys", [DynamicDim("kv_len"), 0])
def test_sums_of_nothing_are_started(keys: Dim) -> None:
    work = replace(small_workloads.CAUSAL, batch=1, q_len=2, kv_len=keys, v_dim=3)
    given: dict[str, Any] = inputs(work, {"kv_len": 0})
    (got,) = computed(work.graph, given, results(work, {"kv_len": 0}))
    assert (got == 0).all()


FORMS = (
    Packed(4, 32, 7),
    Packed(4, 32, None, axis=-2),
    Packed(4, 16, None, axis=-1, across=True, turns=2),
    Packed(2, 3, 1, word="uint8", axis=-2, across=True),
    Packed(3, 40, None, axis=-2, turns=5),
    Packed(8, 12, 127, word="uint16", scale_dtype="float32", turns=2),
    Packed(8, -1, 0, "float8_e4m3fn", "float32", number="float8_e4m3fn", lines=-1),
    Packed(8, 16, 0, "float8_e5m2", "float32", axis=-2, number="float8_e5m2", lines=3),
    Packed(8, -1, 0, scale_dtype="", number="float8_e4m3fn"),
    Packed(8, 13, 0, "float8_e4m3fn", number="float8_e4m3fn", lines=19),
    Packed(8, -1, 0, "int8", number="int8", limit=2.0),
    Packed(8, 16, 3, "int8", "float32", number="int8", lines=-1),
    Packed(8, 7, 128, "uint8", axis=-2),
)


@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_are_decoded(form: Packed) -> None:
    g = GraphBuilder()
    i, j, k = Axis("i", 3), Axis("j", 20), Axis("k", 40)
    x = g.input("x", (3, 40), "float32")
    w = g.input("w", (20, 40), "float16", form)
    g.output(g.sum("out", (i, j), (k,), x[i, k] * w[j, k], "float32"))
    graph, rng = g.graph(), np.random.default_rng(1)
    given = {}
    for operand in graph.inputs:
        if operand.name == "w":
            kind = numpy_dtype(operand.dtype)
            stored = rng.integers(0, 256, (*operand.shape, kind.itemsize), "uint8")
            given["w"] = stored.view(kind)[..., 0]
        elif operand.dtype.startswith("uint"):
            most = np.iinfo(operand.dtype).max
            given[operand.name] = rng.integers(0, most, operand.shape, operand.dtype, endpoint=True)
        else:
            given[operand.name] = rng.standard_normal(operand.shape).astype(operand.dtype)
            given[operand.name].flat[0] = 0
    (got,) = computed(graph, given, [((3, 20), "float32")])
    np.testing.assert_allclose(got, evaluate(graph, given)["out"], rtol=1e-4, atol=1e-3)


def test_workload_and_plans_are_read_back() -> None:
    table = PlanTable(
        (
            (16, TilePlan(1, 64, 64, lanes=8, family="words")),
            (None, TilePlan(8, 64, 64, lanes=8, family="words")),
        )
    )
    for form in (None, *FORMS):
        (plain,) = small_workloads.PLAIN.outputs
        work = replace(small_workloads.PLAIN, outputs=(replace(plain, packed=form),))
        assert description(build_prim_func(work, table)) == (work, table)
