"""Workspaces: how much memory they take, and which of them are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest
import tvm
from tvm import relax, tirx

from relax_fusion.estimator.families.generated.plan import GeneratedPlan
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.launch.arguments import Part, TensorMap, Workspace
from relax_fusion.launch.branches import Branch, Launch, shared_workspaces
from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.launch.prim_func import ExternFunc
from relax_fusion.matching.expressions import substitute, variables_of
from relax_fusion.triton_bridge import EmitTritonKernels
from relax_fusion.workload import DynamicDim, Workload

from ..support.matmul_chains import TwoMatmuls
from ..support.triton_modules import module_of
from .common import H200, add_source, copy_tile_source, not_compiled
from .test_emit import GEMV, SPLIT, WORK

N = tirx.Var("n", "int64")
ADD, COPY = not_compiled([add_source(), copy_tile_source()])


def branch(*spaces: object, when: object = True, kernel: CompiledKernel = ADD) -> Branch:
    return Branch(when, [Launch(kernel, [1], [space]) for space in spaces])


def shapes(cases: Sequence[Branch]) -> list[tuple[list[str], str]]:
    """Return the sizes and elements of the memory that workspaces are in."""
    return [
        ([str(d) for d in shared.shape], shared.dtype) for shared, _ in shared_workspaces(cases)
    ]


def test_those_of_one_branch_are_apart() -> None:
    a, b = Workspace((8,)), Workspace((8,))
    assert [inside for _, inside in shared_workspaces([branch(a, b, a)])] == [[a], [b]]


def test_those_of_different_branches_are_the_same() -> None:
    cases = [branch(Workspace((8, N)), when=N < 4), branch(Workspace((100,)))]
    assert shapes(cases) == [(["T.max(n * T.int64(8), T.int64(100))"], "float32")]


def test_of_equal_elements_only() -> None:
    cases = [branch(Workspace((8,)), when=N < 4), branch(Workspace((8,), "float16"))]
    assert shapes(cases) == [(["8"], "float32"), (["8"], "float16")]


def test_a_third_branch_may_keep_two_apart() -> None:
    a, b, c = Workspace((8,)), Workspace((16,)), Workspace((32,))
    cases = [branch(a, when=N < 2), branch(b, when=N < 3), branch(a, b, when=N < 4), branch(c)]
    assert [inside for _, inside in shared_workspaces(cases)] == [[a, c], [b]]


def test_parts_and_maps_count() -> None:
    a, b = Workspace((8, 64), "float16"), Workspace((16, 64), "float16")
    cases = [branch(Part(a, 64), when=N < 4), branch(TensorMap(Part(b, 128), (8, 64)))]
    (found,) = shared_workspaces(cases)
    assert found[1] == [a, b]


def test_a_map_has_the_sizes_of_its_own_workspace() -> None:
    spaces = [Workspace((rows, 64), "float16") for rows in (N, 40)]
    x = relax.Var("x", relax.TensorType([N], "float32"))
    cases = [
        Branch(when, [Launch(COPY, [1], [TensorMap(space, (32, 64)), x])])
        for when, space in zip((N < 4, True), spaces, strict=True)
    ]
    extern = ExternFunc.of([relax.TensorType([N], "float32")], cases)
    text = extern.func.script()
    sizes = ["n, T.int64(64), T.int64(64), T.int64(1)", "40), T.int64(64), T.int64(64), T.int64(1)"]
    assert all(s in text for s in sizes) and len(extern.workspaces) == 1


def taken(work: Workload, table: PlanTable, rows: int) -> list[int]:
    """Return the elements of the workspaces that a function of a workload takes, by its rows."""
    mod = EmitTritonKernels(H200)(module_of(work, table, outputs=1))
    (func,) = (f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc))
    spaces = [p for p in func.params if p.name.startswith("workspace")]
    sizes = [prod(p.ty.shape, start=tirx.IntImm("int64", 1)) for p in spaces]
    (name,) = {v for p in func.params if tirx.is_buffer_var(p) for v in variables_of(p.ty.shape)}
    here = {name: tirx.IntImm("int64", rows)}
    return [int(tvm.sym.Analyzer().simplify(substitute(size, here))) for size in sizes]


GENERATED = GeneratedPlan(
    *(16, 48, 40),
    num_stages=2,
    num_warps=4,
    family="generated",
    expression="ij0kj1",
    tiles="i=16 j0=32 k=16 j1=48",
)
CHAIN = TwoMatmuls(
    DynamicDim("rows"), 40, 64, 48, ("kn", "nk"), ("gelu",), (), "float16", "float16"
)


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("bound", [None, 64])
@pytest.mark.parametrize("kind", ["matmul", "generated"])
def test_parts_take_memory_for_the_rows_of_their_range(kind: str, bound: int | None) -> None:
    plain, dim = replace(WORK, norm=None), DynamicDim("rows", bound)
    work = replace(plain, rows=dim) if kind == "matmul" else replace(CHAIN, rows=dim).chain
    split = SPLIT if kind == "matmul" else replace(GENERATED, split="j0=2")
    whole = GEMV if kind == "matmul" else GENERATED
    row = 2 * 385 if kind == "matmul" else 2 * 48
    few = PlanTable(((16, split), (None, whole)))
    assert [taken(work, few, n) for n in (1, 16, 40)] == [[row], [16 * row], [16 * row]]
    always = PlanTable.single(split)
    assert taken(work, always, 80) == [80 * row], "a bound of the module is a caller's word"


@pytest.mark.usefixtures("not_compiled")
def test_parts_of_several_ranges_are_the_same_memory() -> None:
    table = PlanTable(((16, SPLIT), (32, replace(SPLIT, split_k=4)), (None, GEMV)))
    found = [taken(WORK, table, n) for n in (1, 16, 20, 99)]
    assert found == [[4 * 385 * n] for n in (1, 16, 20, 32)]
