"""Which arguments no kernel writes, and which function is the first to launch one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from tvm import ir, relax, tirx
from tvm.script import tirx as T
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware.target import make_target
from relax_fusion.transforms.fixed_arguments import Fixed, MarkFixedArguments, fixed_arguments
from relax_fusion.transforms.parts import PART_ATTR

from ..support.contraction_cases import HALF, plain

PRIM_FUNC = """
    @T.prim_func(private=True)
    def {}({}):
        T.evaluate(0)
"""
OUT = 'out_ty=R.Tensor((4,), "float16")'
INPLACE = 'inplace_indices=[0], ty_args=R.Tensor((4,), "float16")'


def module(*bindings: str) -> ir.IRModule:
    """Return ``main(x, w, packed, flag)`` of those bindings, the last one of y."""
    vector = 'R.Tensor((4,), "float16")'
    lines = "".join(f"        {line}\n" for line in bindings)
    text = f"""
    @R.function
    def main(x: {vector}, w: {vector}, packed: R.Tuple({vector}, R.Tuple({vector}, {vector})),
             flag: R.Tensor((), "bool"), sizes: R.Shape(["n", "m"])):
        n, m = T.int64(), T.int64()
        R.func_attr({{"relax.force_pure": True}})
        cls = Module
{lines}        return y
"""
    functions = "".join(
        PRIM_FUNC.format(name, ", ".join(f'{a}: T.Buffer((4,), "float16")' for a in args))
        for name, args in (("f", "abc"), ("g", "abc"), ("double", "a"))
    )
    source = "@I.ir_module\nclass Module:" + functions + text
    return tvm.script.from_source(source, check_well_formed=False)  # results of any size


def call(weight: str, x: str = "x", out: str = "y", function: str = "f") -> str:
    return f"{out} = R.call_tir(cls.{function}, ({x}, {weight}), {OUT})"


def in_place(changed: str) -> str:
    return f"z = R.call_tir_inplace(cls.double, ({changed},), inplace_indices=[0], {OUT})"


def known(*bindings: str, functions: str = "f") -> Fixed:
    """Return what is known of the first of `functions`, which wait for their predecessors."""
    mod = module(*bindings)
    gvars = [mod.get_global_var(name) for name in functions]
    return fixed_arguments(mod, set(gvars))[gvars[0]]


PARTS = ("u = packed[1]", "v = u[1]")


@pytest.mark.parametrize(
    ("bindings", "fixed"),
    [
        ((call("w"),), True),
        (("v = w", call("v")), True),
        (("v = packed[0]", call("v")), True),
        ((*PARTS, call("v")), True),
        ((call('R.const([1, 2, 3, 4], "float16")'),), True),
        (("v = R.add(w, w)", call("v")), False),
        (("u = R.split(R.concat([w, w]), 2)", "v = u[0]", call("v")), False),
        ((in_place("w"), call("w")), False),
        ((call("w"), in_place("w")), False),
        ((in_place("x"), call("w")), True),
        (("t = packed[0]", in_place("t"), *PARTS, call("v")), True),
        (("t = packed[1]", "r = t[1]", in_place("r"), *PARTS, call("v")), False),
        (("v = R.reshape(w, (4,))", in_place("v"), call("w")), False),
        ((f"z = R.call_inplace_packed('fill', w, {INPLACE})", call("w")), False),
        (('v = R.match_cast(w, R.Tensor((4,), "float16"))', in_place("v"), call("w")), False),
        (('z = R.call_packed("fill", w, ty_args=(R.Object,))', call("w")), False),
    ],
    ids=lambda v: "; ".join(v) if isinstance(v, tuple) else str(v),
)
def test_weights(bindings: tuple[str, ...], fixed: bool) -> None:
    found = known(*bindings)
    assert found.arguments == (in_place("x") not in bindings, fixed) and found.leads


@pytest.mark.parametrize("source", ["w", "z"])
def test_parts_count_as_what_they_are_of(source: str) -> None:
    part = f"v = R.call_tir(cls.double, ({source},), {OUT})"
    mod = module("z = R.add(x, x)", part, call("v"))
    mod.update_func(double := mod.get_global_var("double"), mod[double].with_attr(PART_ATTR, 0))
    gvar = mod.get_global_var("f")
    assert fixed_arguments(mod, {gvar})[gvar].arguments == (True, source == "w")


def test_every_call_counts() -> None:
    first = ("v = R.add(x, x)", call("w", out="z"))
    assert known(*first, call("w", x="v")).arguments == (False, True)
    assert known(*first, call("v")).arguments == (True, False)


BRANCHES = (
    "v = R.add(x, x)",
    "if flag:",
    "    " + call("w", out="z"),
    "else:",
    "    " + call("v", out="z"),
)


def test_calls_in_branches_count() -> None:
    assert known(*BRANCHES, call("w")).arguments == (True, False)


def test_the_first_function_leads() -> None:
    bindings = (call("w", out="z", function="g"), call("w"))
    assert known(*bindings, functions="gf").leads
    assert not known(*bindings, functions="fg").leads
    # What does not wait for its predecessor proves nothing of that one
    assert known(*bindings).leads


def test_a_function_leads_if_it_does_so_once() -> None:
    bindings = (call("w", out="z"), call("w", function="g", out="t"), call("w"))
    assert known(*bindings, functions="fg").leads
    assert not known(*bindings, functions="gf").leads


def test_a_branch_leads_to_nothing() -> None:
    behind = (*BRANCHES, call("w", function="g"))
    assert known(*behind, functions="gf").leads


@pytest.mark.parametrize(
    ("first", "second", "leads"),
    [
        ("n, 4", "n, 8", False),
        ("8, 4", "n, 8", False),
        ("n, m, 4", "n * m, 8", False),
        ("n * m * 2, 4", "m, n, 8", False),
        ("n, 4", "m, 8", True),
        ("n * m, 4", "n, 8", True),
        ("n // 2, 4", "n, 8", True),
        ("n, 4", "8, 4", True),
        ("0, 4", "8, 4", True),
    ],
)
def test_what_may_launch_nothing_is_no_first(first: str, second: str, leads: bool) -> None:
    bindings = [
        f'{name} = R.call_tir(cls.{function}, (x, w), out_ty=R.Tensor(({shape}), "float16"))'
        for name, function, shape in (("z", "f", first), ("y", "g", second))
    ]
    assert known(*bindings, functions="gf").leads == leads


IDS = call("w", out="v", function="g")
BETWEEN = call("v", out="h", function="g")


@pytest.mark.parametrize(
    ("bindings", "functions", "settled"),
    [
        ((IDS, BETWEEN, call("v", x="h")), "fg", True),
        ((IDS, BETWEEN, "t = R.reshape(v, (4,))", call("t")), "fg", False),  # it may be a copy
        ((IDS, BETWEEN, call("w", x="h")), "fg", True),
        ((IDS, call("v")), "fg", False),
        ((BETWEEN.replace("(x, v)", "(x, w)"), IDS, call("v", x="h")), "fg", False),
        ((IDS, BETWEEN, call("v", x="h")), "f", False),
        ((IDS, BETWEEN, in_place("v"), call("v", x="h")), "fg", False),
        ((IDS, BETWEEN.replace("(4,)", "(n,)"), call("v", x="x")), "fg", False),
        (("v = R.add(x, x)", *BRANCHES[1:], call("v")), "fg", False),
    ],
)
def test_what_was_written_before_the_kernel_in_front(
    bindings: tuple[str, ...], functions: str, settled: bool
) -> None:
    found = known(*bindings, functions=functions).settled
    assert found[1] == settled


def test_what_is_settled_at_one_call_need_not_be_at_another() -> None:
    bindings = (IDS, BETWEEN, call("v", x="h", out="z"), call("z"))
    assert not known(*bindings, functions="fg").settled[1]


WORK = replace(HALF, rows=1, k=64, outputs=(plain(32),))
PLAN = TilePlan(64, 64, 32, reg_m=4, reg_n=4, lanes=8, num_warps=8, family="fma_tiles")
H200 = make_target("h200")


@T.prim_func(private=True, s_tir=True)
def doubled(x: T.Buffer((1, 64), "float16"), y: T.Buffer((1, 64), "float16")):
    for i in range(64):
        with T.sblock("y"):
            v = T.axis.remap("S", [i])
            y[0, v] = x[0, v] + x[0, v]


@T.prim_func(private=True, s_tir=True)
def copied(x: T.Buffer((1, 64), "float16"), y: T.Buffer((1, 64), "float16")):
    for i in range(64):
        with T.sblock("y"):
            v = T.axis.remap("S", [i])
            y[0, v] = x[0, v]


@T.prim_func(private=True, s_tir=True)
def called(x: T.Buffer((1, 64), "float16"), y: T.Buffer((1, 64), "float16")):
    T.evaluate(T.call_packed("library", x.data, y.data))


def marked(first: tirx.PrimFunc, target: Target = H200) -> ir.IRModule:
    """Return ``main(x, w)`` of a function and a matmul behind it, marked."""
    func = build_prim_func(WORK, PlanTable.single(PLAN)).without_attr("global_symbol")
    types = [relax.TensorType(list(p.ty.shape), "float16") for p in func.params]
    x, w = (relax.Var(name, ty) for name, ty in zip("xw", types, strict=False))
    builder = relax.BlockBuilder()
    gvars = builder.add_func(first, "first"), builder.add_func(func, "fused")
    with builder.function("main", [x, w]):
        with builder.dataflow():
            before = builder.emit(relax.op.call_tir(gvars[0], relax.Tuple([x]), types[0]))
            call = relax.op.call_tir(gvars[1], relax.Tuple([before, w]), types[2])
            out = builder.emit_output(call)
        builder.emit_func_output(out)
    return MarkFixedArguments(target)(builder.get())


@pytest.mark.parametrize(
    ("first", "leads"),
    [
        (doubled, False),
        (copied, True),
        (called, True),
        (doubled.with_attr("target", Target("llvm")), True),
    ],
    ids=["a kernel", "a view", "a library", "on the host"],
)
def test_fused_functions_are_marked(first: tirx.PrimFunc, leads: bool) -> None:
    mod = marked(first)
    assert Fixed.of(mod["fused"]) == Fixed((False, True), leads, (False, not leads))
    assert Fixed.of(mod["first"]) is None


def test_nothing_is_marked_where_launches_do_not_overlap() -> None:
    assert Fixed.of(marked(doubled, make_target("a100"))["fused"]) is None
