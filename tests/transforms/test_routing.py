"""Choices of experts: the same numbers, and the first of equals, in one kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.target import Target

from relax_fusion import make_target
from relax_fusion.dlight_rules.apply import ScheduleKernels
from relax_fusion.report.coverage import coverage_of
from relax_fusion.report.decision import Decision
from relax_fusion.transforms.routing import RouteExperts
from relax_fusion.tvm_ir import structural_map

from ..support.quick import machine, quick_host, quickly

EXPERTS = 12
Make = Callable[[relax.BlockBuilder, relax.Var], list[relax.Var]]


def softmax_first(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
    best = builder.emit(op.topk(op.nn.softmax(x), 3, ret_type="both", dtype="int64"))
    total = op.sum(best[0], axis=[-1], keepdims=True)
    return [builder.emit(op.divide(best[0], total)), builder.emit(best[1])]


def softmax_behind(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
    best = builder.emit(op.topk(x, 4, ret_type="both", dtype="int32"))
    return [builder.emit(op.nn.softmax(best[0])), builder.emit(best[1])]


def beside_shared(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
    """Choose two beside two parts of an expert that all rows go to, whose score is the last."""
    rows, routed = x.ty.shape[0], x.ty.shape[1] - 1
    scores = op.strided_slice(x, [1], [0], [routed], assume_inbound=True)
    best = builder.emit(op.topk(op.nn.softmax(scores), 2, ret_type="both", dtype="int64"))
    own = op.strided_slice(x, [1], [routed], [routed + 1], assume_inbound=True)
    share = op.concat([best[0], op.broadcast_to(op.sigmoid(own), [rows, 2])], axis=-1)
    numbers = relax.const(np.array([[int(routed), int(routed) + 1]]), "int64")
    numbers = builder.emit(op.broadcast_to(numbers, [rows, 2]))
    return [builder.emit(share), builder.emit(op.concat([best[1], numbers], axis=-1))]


def by_groups(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
    """Choose as DeepSeek-V3 does."""
    rows, bias = x.ty.shape[0], np.linspace(0, 0.3, EXPERTS).astype("float32")
    share = builder.emit(op.sigmoid(x))
    score = builder.emit(op.add(share, relax.const(bias)))
    grouped = op.reshape(score, [rows, 4, EXPERTS // 4])
    two = builder.emit(op.topk(grouped, 2, ret_type="both", dtype="int64"))
    group = builder.emit(op.topk(op.sum(two[0], axis=[-1]), 2, ret_type="both", dtype="int64"))
    ones = op.broadcast_to(relax.const(1.0), [rows, 2])
    zeros = op.full_like(op.sum(two[0], axis=[-1]), relax.const(0.0))
    mask = builder.emit(op.scatter_elements(zeros, group[1], ones, axis=1))
    wide = op.broadcast_to(op.expand_dims(mask, -1), [rows, 4, EXPERTS // 4])
    hidden = op.bitwise_not(op.astype(op.reshape(wide, [rows, EXPERTS]), "bool"))
    left = op.where(hidden, relax.const(float("-inf")), score)
    best = builder.emit(op.topk(left, 3, ret_type="both", dtype="int64"))
    ids = builder.emit(best[1])
    chosen = builder.emit(op.gather_elements(share, ids, axis=1))
    total = op.add(op.sum(chosen, axis=[-1], keepdims=True), relax.const(1e-20))
    scaled = op.multiply(op.divide(chosen, total), relax.const(2.5))
    return [builder.emit(scaled), ids]


def by_biased_shares(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
    """Choose as ERNIE 4.5 does: a bias of two axes, and shares of a sum that is not too small."""
    bias = relax.const(np.linspace(0.3, 0, int(x.ty.shape[1])).astype("float32")[None])
    share = builder.emit(op.nn.softmax(x))
    score = builder.emit(op.add(share, op.squeeze(bias, [0])))
    best = builder.emit(op.topk(score, 3, ret_type="both", dtype="int64"))
    chosen = builder.emit(op.gather_elements(share, best[1], axis=1))
    total = op.clip(op.sum(chosen, axis=[-1], keepdims=True), 0.4, float("inf"))
    return [builder.emit(op.divide(chosen, total)), builder.emit(best[1])]


def module(
    make: Make, rows: int | tirx.Var = 7, experts: int = EXPERTS, dtype: str = "float32"
) -> tvm.IRModule:
    """Return a function of logits that returns shares and experts, each times or plus one."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([rows, experts], dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            share, ids = make(builder, x)
            flat = op.reshape(share, [rows * share.ty.shape[1]])
            more = op.add(ids, relax.const(1, ids.ty.dtype))
            result = builder.emit_output((builder.emit(flat), builder.emit(more)))
        builder.emit_func_output(result)
    return relax.transform.CanonicalizeBindings()(builder.get())


def fused(mod: tvm.IRModule, target: Target | None = None) -> tvm.IRModule:
    """Return a module after the pass."""
    target = target or quick_host()
    with target:
        after = RouteExperts(target)(mod)
    relax.analysis.well_formed(after)
    return after


def run(mod: tvm.IRModule, x: np.ndarray) -> list[np.ndarray]:
    """Return what a module computes."""
    return [each.numpy() for each in machine(quickly(mod))["main"](tvm.runtime.tensor(x))]


def same(mod: tvm.IRModule, x: np.ndarray) -> None:
    """Check what the kernel computes, and that there is one."""
    after = fused(mod)
    text = after["main"].script()
    assert text.count("R.call_tir(") == 1 and "R.topk" not in text
    (share, ids), (wanted, places) = run(after, x), run(mod, x)
    np.testing.assert_array_equal(ids, places)
    np.testing.assert_allclose(share, wanted, rtol=2e-6, atol=1e-7)


MAKES = [softmax_first, softmax_behind, beside_shared, by_groups, by_biased_shares]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_choice_is_one_kernel(make: Make, dynamic: bool) -> None:
    x = np.random.default_rng(0).standard_normal((5 if dynamic else 7, EXPERTS)).astype("float32")
    same(module(make, tirx.Var("n", "int64") if dynamic else 7), x)


@pytest.mark.parametrize("make", [softmax_first, softmax_behind, by_groups])
def test_of_equals_the_first_is_chosen(make: Make) -> None:
    x = np.random.default_rng(1).integers(0, 3, (7, EXPERTS)).astype("float32")
    x[0], x[1, ::2] = 0, -0.0
    same(module(make), x)


def test_experts_of_nan_are_experts() -> None:
    x = np.full((7, EXPERTS), np.nan, "float32")
    x[1:, :6] = np.arange(6)
    _, ids = run(fused(module(softmax_behind)), x)
    assert all(len({*row}) == 4 and {*row} <= {*range(1, EXPERTS + 1)} for row in ids.tolist())


def smallest(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
    best = builder.emit(op.topk(x, 4, ret_type="both", largest=False, dtype="int64"))
    return [builder.emit(best[0]), builder.emit(best[1])]


@pytest.mark.parametrize(("make", "experts"), [(smallest, EXPERTS), (softmax_behind, 1025)])
def test_other_choices_are_left(make: Make, experts: int) -> None:
    mod = module(make, experts=experts)
    assert fused(mod).same_as(mod)


def counted_from_the_end(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
    best = builder.emit(op.topk(x, 4, ret_type="both", dtype="int64"))
    ids = builder.emit(op.subtract(best[1], relax.const(EXPERTS, "int64")))
    ones = op.broadcast_to(relax.const(1.0), [x.ty.shape[0], 4])
    zeros = op.full_like(x, relax.const(0.0))
    marks = builder.emit(op.scatter_elements(zeros, ids, ones, axis=1))
    return [builder.emit(op.multiply(marks, x)), ids]


def halved_numbers(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
    best = builder.emit(op.topk(x, 4, ret_type="both", dtype="int64"))
    less = op.subtract(best[1], relax.const(EXPERTS // 2, "int64"))
    return [best[0], builder.emit(op.divide(less, relax.const(2, "int64")))]


@pytest.mark.parametrize("make", [counted_from_the_end, halved_numbers])
def test_arithmetic_of_chosen_numbers(make: Make) -> None:
    same(module(make), np.random.default_rng(4).standard_normal((7, EXPERTS)).astype("float32"))


def test_a_number_less_itself_may_be_nan() -> None:
    def make(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
        return softmax_behind(builder, builder.emit(op.subtract(x, x)))

    x = np.full((7, EXPERTS), np.inf, "float32")
    assert np.isnan(run(fused(module(make)), x)[0]).all()


def test_numbers_of_64_bits_are_not_chosen_among_by_32() -> None:
    mod = module(softmax_behind, dtype="float64")
    assert fused(mod).same_as(mod)
    wide = module(lambda builder, x: softmax_behind(builder, op.astype(x, "float64")))
    assert "R.topk" in fused(wide)["main"].script()


def step_by_step(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a kernel of a GPU whose blocks and threads are loops, one step after the other."""

    def serial(loop: tirx.For) -> tirx.For:
        kind = tirx.ForKind.SERIAL if loop.thread_binding is not None else loop.kind
        return tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body)

    return func.with_body(structural_map(func.body, (tirx.For, serial), order="post"))


@pytest.mark.parametrize("make", [softmax_first, softmax_behind, by_groups, by_biased_shares])
@pytest.mark.parametrize("experts", [EXPERTS, 60, 300])
def test_a_block_of_a_gpu_has_a_row(make: Make, experts: int) -> None:
    if make is by_groups and experts != EXPERTS:
        return
    target, n = make_target("h200"), tirx.Var("n", "int64")
    mod = fused(module(make, n, experts), target)
    (gvar, func) = next(x for x in mod.functions_items() if isinstance(x[1], tirx.PrimFunc))
    text = func.script()
    assert text.count('thread="blockIdx.x"') == 1 and 'scope="shared"' in text
    built = tvm.tirx.build(func.with_attr("global_symbol", "main"), target)
    # Each warp adds up a row by itself; warps that add together exchange sums in such a buffer
    assert "staging" not in built.imports[0].inspect_source()
    mod.update_func(gvar, step_by_step(func))
    x = np.random.default_rng(2).standard_normal((5, experts)).astype("float32")
    wanted = run(module(make, n, experts), x)
    for got, want in zip(run(mod, x), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("rows", "early"), [(64, True), (512, False)])
def test_many_blocks_do_not_begin_early(rows: int, early: bool) -> None:
    target = make_target("h200")
    made = ScheduleKernels(target, [])(fused(module(softmax_first, rows), target))
    text = next(f.script() for g, f in made.functions_items() if "routing" in g.name_hint)
    assert ("griddepcontrol" in text) == early


def test_what_comes_late_is_no_part_of_it() -> None:
    def weighed(builder: relax.BlockBuilder, x: relax.Var) -> list[relax.Var]:
        share, ids = softmax_first(builder, x)
        late = builder.emit(op.astype(op.cumsum(x, 0), "float32"))
        total = builder.emit(op.sum(share, axis=[-1], keepdims=True))
        return [builder.emit(op.multiply(total, late)), ids]

    same(module(weighed), np.random.default_rng(2).standard_normal((7, EXPERTS)).astype("float32"))


def test_a_decision_tells_of_it() -> None:
    decisions: list[Decision] = []
    RouteExperts(quick_host(), decisions)(module(softmax_first))
    (told,) = decisions
    assert (told.function, told.kernel, told.fused) == ("main", "routing", True)
    (coverage,) = coverage_of(decisions, [], [])
    assert coverage.chains == {"routing": (1, 1)}
