"""Pairs are sorted by their experts once for all products by the same choice."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import ir, relax, tirx

from relax_fusion.compute import build_prim_func
from relax_fusion.estimator.families.triton_experts import ExpertPlan
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.hardware import device
from relax_fusion.hardware.target import make_target
from relax_fusion.transforms.modules import functions_of
from relax_fusion.triton_bridge import EmitTritonKernels
from relax_fusion.triton_bridge.emit import fused_of
from relax_fusion.workload import DynamicDim, ExpertMatmul, Gate

from ..support.launches import Values
from .common import kernels

pytestmark = pytest.mark.usefixtures("not_compiled")

ROWS = DynamicDim("rows")
UP = ExpertMatmul(ROWS, 6, 2, 64, 32, "nk", "float16", "float16", gate=Gate())
DOWN = ExpertMatmul(ROWS, 6, 2, 32, 64, "nk", "float16", "float16", each=True, share="float16")
PAIRS = ExpertPlan(1, 4, 256, num_warps=4, family="expert_pairs")
TILES = ExpertPlan(16, 64, 64, num_stages=3, num_warps=4, family="expert_tiles")
SORTED = PlanTable.single(TILES)
APART = PlanTable.single(PAIRS)


def upto(rows: int) -> PlanTable:
    """Return a table of pairs up to some rows, and of tiles beyond."""
    return PlanTable(((rows, PAIRS), (None, TILES)))


def layer(up: PlanTable, down: PlanTable, numbers: str = "same") -> ir.IRModule:
    """Return two products, by one choice, by a view of it, by another, or in two blocks."""
    builder, n = relax.BlockBuilder(), tirx.Var("n", "int64")

    def tensor(name: str, *shape: Any, dtype: str = "float16") -> relax.Var:
        return relax.Var(name, relax.TensorType(shape, dtype))

    kernels = {
        name: builder.add_func(build_prim_func(work, table).without_attr("global_symbol"), name)
        for name, work, table in (("up", UP, up), ("down", DOWN, down))
    }
    ids, other = (tensor(name, n, 2, dtype="int64") for name in ("ids", "other"))
    x, share = tensor("x", n, 64), tensor("share", n, 2)
    weights = tensor("w", 6 * 64, 64), tensor("w2", 6 * 64, 32)
    with builder.function("main", [x, ids, other, share, *weights]):
        with builder.dataflow():
            args = relax.Tuple([x, ids, weights[0]])
            h = relax.op.call_tir(kernels["up"], args, relax.TensorType((n, 2, 32), "float16"))
            h = builder.emit(h) if numbers != "blocks" else builder.emit_output(h)
            if numbers == "view":
                ids = builder.emit(relax.op.reshape(ids, (n, 2, 1)))
                ids = builder.emit(relax.op.reshape(ids, (n, 2)))
            out = relax.Tuple([h, other if numbers == "other" else ids, weights[1], share])
            call = relax.op.call_tir(kernels["down"], out, relax.TensorType((n, 64), "float16"))
            if numbers != "blocks":
                result = builder.emit_output(call)
        if numbers == "blocks":
            builder.emit(relax.op.negative(share))  # else the two are one
            with builder.dataflow():
                result = builder.emit_output(call)
        builder.emit_func_output(result)
    return EmitTritonKernels(make_target("h200"))(relax.transform.LegalizeOps()(builder.get()))


@pytest.mark.parametrize(
    ("numbers", "sorts"), [("same", 1), ("view", 1), ("other", 2), ("blocks", 2)]
)
def test_each_choice_is_sorted_once_in_a_block(numbers: str, sorts: int) -> None:
    mod = layer(SORTED, SORTED, numbers)
    relax.analysis.well_formed(mod)
    assert _calls(mod, "order") == sorts
    names = ["expert_counts", "expert_order", "expert_sum", "expert_tiles"]
    assert sorted(kernels(mod)) == names


def test_pairs_that_stay_as_they_are_are_not_sorted() -> None:
    assert set(kernels(layer(APART, APART))) == {"expert_pairs"}


@pytest.mark.parametrize(
    ("tables", "needed"),
    [
        ((SORTED, APART), range(1, 12)),
        ((upto(4), upto(8)), range(5, 12)),
        ((APART, upto(8)), range(9, 12)),
    ],
)
def test_pairs_are_sorted_where_a_product_reads_them_so(
    tables: tuple[PlanTable, PlanTable], needed: range
) -> None:
    found = []
    for work, table in zip((UP, DOWN), tables, strict=True):
        fused = fused_of(build_prim_func(work, table))
        assert fused is not None
        found += [fused.sort] if fused.sort is not None else []
    sort = found[0]
    for other in found[1:]:
        sort = sort.both(other)
    cases = sort.cases(device("h200"))
    for rows in range(1, 12):
        values = Values([], [])
        values.dims = {sort.ids.ty.shape.values[0]: rows}
        assert bool(values.chosen(cases)) == (rows in needed), rows
    mod = layer(*tables)
    relax.analysis.well_formed(mod)
    assert _calls(mod, "order") == 1


def _calls(mod: ir.IRModule, name: str) -> int:
    """Return how many calls the functions of a module have of PrimFuncs of a name."""
    bindings = (
        b.value
        for f in functions_of(mod, relax.Function).values()
        for block in f.body.blocks
        for b in block.bindings
    )
    calls = (
        v for v in bindings if isinstance(v, relax.Call) and isinstance(v.args[0], ir.GlobalVar)
    )
    return sum(call.args[0].name_hint == name for call in calls)
